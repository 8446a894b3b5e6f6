#!/usr/bin/env python3
"""Compiles the CUDA kernels as a build folder does, prints the registers of each, fails where one uses local memory.

Usage: tools/check_ptxas.py BUILD [ARCHITECTURE ...]     architectures: 80 90, if none is named

A kernel whose arrays do not stay in registers, or that has too many values for them, keeps some of them in memory, at a
fraction of the speed. ptxas says so as a stack frame, spills or local memory; here each must be 0 in every kernel.
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

REPORT = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '\w+'\n"
    r"(?:.*\n)*?\s*(?P<stack>\d+) bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads\n"
    r".*Used (?P<registers>\d+) registers(?P<rest>.*)"
)


def stop(text: str) -> None:
    sys.exit(f"[check-ptxas] {text}")


def compile_for(architecture: str, entry: dict[str, str]) -> str:
    """What ptxas says of the source's kernels."""
    command = [word for word in shlex.split(entry["command"]) if not re.match(r"--generate-code|-arch", word)]
    command[command.index("-o") + 1] = f"ptxas-{architecture}.o"
    command += [f"-arch=sm_{architecture}", "-Xptxas", "-v"]
    done = subprocess.run(command, cwd=entry["directory"], capture_output=True, text=True, timeout=900)
    if done.returncode != 0:
        stop(f"nvcc failed on {entry['file']}:\n{done.stderr}")
    return done.stderr


def readable(names: list[str]) -> list[str]:
    text = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    kernels = [re.sub(r"^void .*run<(.*)>\(.*$", r"\1", line).strip() for line in text.splitlines()]
    return [kernel.replace("zc::cuda::", "").replace("zc::", "") for kernel in kernels]


def main(build: str, *architectures: str) -> None:
    architectures = architectures or ("80", "90")
    database = Path(build, "compile_commands.json")
    entries = json.loads(database.read_text()) if database.exists() else []
    sources = [entry for entry in entries if entry["file"].endswith(".cu")]
    if not sources:
        stop(
            f"no CUDA sources in {database}: got {len(entries)} commands, expected some of nvcc. Build with make cuda."
        )
    registers: dict[str, list[str]] = {}
    failures = []
    for architecture in architectures:
        for entry in sources:
            report = compile_for(architecture, entry)
            found = list(REPORT.finditer(report))
            if len(found) != report.count("Compiling entry function"):
                stop(f"the report of ptxas reads differently from what is expected here:\n{report}")
            for kernel, match in zip(readable([match["name"] for match in found]), found, strict=True):
                registers.setdefault(kernel, []).append(match["registers"])
                if match["stack"] != "0" or match["stores"] != "0" or match["loads"] != "0" or "lmem" in match["rest"]:
                    failures.append(f"sm_{architecture} {kernel}: {' '.join(match[0].splitlines()[-2:]).strip()}")
    if not registers:
        stop("no kernels in the report of ptxas")
    print(f"registers of {len(registers)} kernels for sm_{', sm_'.join(architectures)}:")
    for kernel, numbers in sorted(registers.items()):
        print("  " + "".join(f"{number:>4}" for number in numbers), "", kernel)
    if failures:
        stop("\n".join([f"{len(failures)} kernels use local memory, expected none:", *failures]))
    print("0 bytes of stack frame, spills and local memory in each")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])

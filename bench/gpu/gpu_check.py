"""Runs the steps of gpu_check, each a process with a time limit, and reports; see bench/gpu_check.sh."""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from step_report import RESULT, ROOT, run_command, tail

TOTAL_S = 480
DRY_JOBS = 2  # at a time: nothing is measured then
STEPS = {  # a file beside this one: its time limit in seconds
    "facts": 30,
    "build": 200,
    "kernel_bits": 60,
    "train_bits": 60,
    "cpp_tests": 60,
    "two_ranks": 90,
    "bandwidth": 60,
    "adamw": 40,
    "gpt_steps": 90,
    "copies": 30,
    "host_overhead": 30,
    "sanitizers": 100,  # last: it may take what is left
}
LOGS = ROOT / "build" / "gpu_check"


def run_one(name: str, deadline: float, flags: list[str]) -> dict[str, Any]:
    """A step's report, its seconds and its result: "good", "failed" or "left out"."""
    limit_s = min(STEPS[name], deadline - time.monotonic())
    print(f"{name} ...", flush=True)
    start = time.monotonic()
    if limit_s < 5:
        report = {"failed": [f"not run: the {TOTAL_S} s of all steps are over"]}
    else:
        command = [sys.executable, str(Path(__file__).with_name(f"{name}.py")), *flags]
        code, output = run_command(command, timeout_s=limit_s, PYTHONUNBUFFERED="1")
        LOGS.mkdir(parents=True, exist_ok=True)
        (LOGS / f"{name}.log").write_text(output)
        found = [line[len(RESULT) :] for line in output.splitlines() if line.startswith(RESULT)]
        told = json.loads(found[-1]) if found else {}
        report = told if code is not None and found else {**told, "failed": [f"ended with {code}:\n{tail(output)}"]}
    report = {"rows": [], "failed": [], "left_out": [], "figures": {}} | report
    only_left_out = report["left_out"] and not report["rows"]
    report["result"] = "failed" if report["failed"] else "left out" if only_left_out else "good"
    report["seconds"] = time.monotonic() - start
    return report


def lines_of(name: str, step: dict[str, Any]) -> list[str]:
    """A step in the table."""
    mark = step["result"].upper() if step["result"] == "failed" else step["result"]
    lines = [f"{name:<14} {mark:<9} {step['seconds']:6.1f} s"]
    lines += [f"    {row:<40} {text}" for row, text in step["rows"]]
    lines += [f"    left out: {text}" for text in step["left_out"]]
    more = len(step["failed"]) - 5
    lines += [f"    FAILED: {text}" for text in step["failed"][:5]]
    return lines + ([f"    and {more} more failures: see the JSON file"] if more > 0 else [])


def main() -> int:
    """All steps, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("json", nargs="?", type=Path, default=ROOT / "build" / "gpu_check.json", help="where it goes")
    parser.add_argument("--dry", action="store_true", help="on the CPU, in little, without what needs CUDA")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS), metavar="STEP", help=f"of {[*STEPS]}")
    args = parser.parse_args()
    start = time.monotonic()
    names = [name for name in STEPS if name in args.only]
    with ThreadPoolExecutor(DRY_JOBS if args.dry else 1) as pool:
        reports = pool.map(lambda name: run_one(name, start + TOTAL_S, ["--dry"] * args.dry), names)
        steps = dict(zip(names, reports, strict=True))
    good = all(step["result"] != "failed" for step in steps.values())
    seconds = time.monotonic() - start
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({"good": good, "dry": args.dry, "seconds": seconds, "steps": steps}, indent=1))
    print("\n" + "\n".join(line for name, step in steps.items() for line in lines_of(name, step)))
    failed = [name for name, step in steps.items() if step["result"] == "failed"]
    left_out = [name for name, step in steps.items() if step["left_out"]]
    print(f"\n{seconds:.0f} s; failed: {', '.join(failed) or 'none'}; left out in part or whole: ", end="")
    print(f"{', '.join(left_out) or 'nothing'}; figures in {args.json}, logs in {LOGS}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

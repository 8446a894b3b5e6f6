"""Step: compute-sanitizer's memcheck and racecheck on small cases of every kernel."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from step_report import Report, run_command, run_step, tail

TIMEOUT_S = 45
CLEAN = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "RACECHECK SUMMARY: 0 hazards displayed"}
CANNOT = ("not supported", "Internal Sanitizer Error", "Unable to find injection library")


def run(report: Report, args: argparse.Namespace) -> None:
    """One after the other."""
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if args.dry or sanitizer is None:
        report.left_out.append("compute-sanitizer: " + ("a dry run" if args.dry else "not installed"))
        return
    cases = [sys.executable, str(Path(__file__).with_name("kernel_bits.py")), "--few"]
    for tool, clean in CLEAN.items():
        code, output = run_command([sanitizer, "--tool", tool, "--error-exitcode", "9", *cases], timeout_s=TIMEOUT_S)
        if code is None or (code != 9 and any(text in output for text in CANNOT)):
            report.left_out.append(f"{tool}: compute-sanitizer cannot run here: {tail(output, 2)}")
            continue
        report.row(tool, "clean" if clean in output else f"NOT clean, exit code {code}")
        report.check(code == 0 and clean in output, f"{tool} ended with {code}:\n{tail(output, 25)}")


if __name__ == "__main__":
    run_step(run)

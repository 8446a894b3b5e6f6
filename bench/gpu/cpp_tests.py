"""Step: the C++ tests of the CUDA backend, where build.py could build them."""

from __future__ import annotations

import argparse
import re

from step_report import ROOT, Report, run_command, run_step, tail

TIMEOUT_S = 60


def run(report: Report, args: argparse.Namespace) -> None:
    """All of them."""
    tests = [] if args.dry else sorted(path for path in (ROOT / "build/cuda").rglob("test_cuda*") if path.is_file())
    if not tests:
        report.left_out.append("C++ TESTS: there are none, as the step before says; kernel_bits stands for them")
    for test in tests:
        code, output = run_command([str(test)], timeout_s=TIMEOUT_S)
        passed = re.search(r"\[  PASSED  \] (\d+) test", output)
        report.row(test.name, f"{passed[1] if passed else 'no'} tests passed, exit code {code}")
        report.check(code == 0, f"{test.name} ended with {code}:\n{tail(output, 20)}")


if __name__ == "__main__":
    run_step(run)

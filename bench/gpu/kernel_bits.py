"""Step: CUDA's kernels give the CPU's bits, every kernel and dtype. --few: a part of the cases, for sanitizers.

Without a GPU: two threads against one.
"""

from __future__ import annotations

import argparse
from collections import Counter

import kernel_cases
from step_report import Report, run_step
from timing import device
from zerocore import _core
from zerocore._device import Host

FEW = 12  # of a kernel's cases, one in so many


def compare(report: Report, args: argparse.Namespace) -> None:
    """Runs all cases on both."""
    target = device(dry=args.dry)
    equal: dict[str, list[bool]] = {}
    seen: Counter[str] = Counter()
    for case in kernel_cases.all_cases(large=not (args.dry or args.few)):
        seen[case.kernel] += 1
        if args.few and seen[case.kernel] % FEW != 1:
            continue
        _core.set_num_threads(2)
        got = kernel_cases.outcome(case, target)
        _core.set_num_threads(1)
        text = kernel_cases.difference(case, got, kernel_cases.outcome(case, Host()))
        equal.setdefault(case.kernel, []).append(text is None)
        if text is not None:
            report.failed.append(text)
    for kernel, results in equal.items():
        bad = results.count(False)
        report.row(
            kernel,
            f"{len(results):4} cases: {f'{bad} DIFFER' if bad else 'equal'}",
            cases=len(results),
            different=bad,
        )
    report.check(len(equal) > 5, f"only {len(equal)} kernels were run")


if __name__ == "__main__":
    run_step(compare, "--few")

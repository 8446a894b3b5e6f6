"""Step: builds the package for this GPU only, in place, and the C++ tests of the CUDA backend."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from step_report import ROOT, Report, run_command, run_step, tail

MODULE_S, TESTS_S = 180, 60
BUILD = "build/cuda"


def build(report: Report, args: argparse.Namespace) -> None:
    """The module first: everything after needs it."""
    if args.dry:
        report.left_out.append("build with nvcc: a dry run takes the module that is there")
    else:
        _module(report)
    status = "from zerocore import _core; print(*_core.cuda_status()[1:])"
    code, output = run_command([sys.executable, "-c", status], timeout_s=60)
    report.row("module", tail(output, 1))
    report.check(code == 0, f"the module does not load:\n{tail(output)}")
    if not args.dry:
        report.check(not output.startswith("0"), f"the module finds no device: {tail(output, 1)}")
        _tests(report)


def _module(report: Report) -> None:
    import torch

    major, minor = torch.cuda.get_device_capability()
    defines = [f"-DZC_CUDA_ARCHITECTURES={major}{minor}-real"]
    if prefix := os.environ.get("ZC_MPI_PREFIX"):
        defines.append(f"-DZC_MPI_PREFIXES={prefix}")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/local/cuda/bin"
    start = time.monotonic()
    code, output = run_command(["tools/build", "cuda", "python", *defines], timeout_s=MODULE_S, PATH=path)
    seconds = time.monotonic() - start
    report.row("build", f"{seconds:.0f} s, {defines}", seconds=seconds)
    if code != 0:
        raise RuntimeError(f"tools/build ended with {code}:\n{tail(output, 30)}")


def _tests(report: Report) -> None:
    configure = ["cmake", "-S", str(ROOT), "-B", BUILD]
    _, output = run_command([*configure, "-DZC_BUILD_TESTS=ON"], timeout_s=TESTS_S)
    if "GoogleTest was not found" in output:
        report.left_out.append("C++ TESTS: there is no GoogleTest here; kernel_bits stands for them")
        run_command([*configure, "-DZC_BUILD_TESTS=OFF"], timeout_s=TESTS_S)
        return
    code, output = run_command(["cmake", "--build", BUILD, "--target", "test_cuda"], timeout_s=TESTS_S)
    report.check(code == 0, f"the C++ tests do not build:\n{tail(output, 20)}")


if __name__ == "__main__":
    run_step(build)

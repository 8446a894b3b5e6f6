"""Step: what is measured, and where."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil

from step_report import Report, run_command, run_step

NEEDED = ("torch", "pydantic", "xxhash", "pybind11")
WANTED = ("mpi4py", "mpich", "nvidia-nccl-cu13")  # two ranks; more than one GPU


def tell(report: Report, args: argparse.Namespace) -> None:
    """Names and versions."""
    import torch

    code, commit = run_command(["git", "rev-parse", "HEAD"], timeout_s=10) if shutil.which("git") else (1, "")
    report.row("commit", os.environ.get("ZC_COMMIT") or (commit.strip() if code == 0 else "unknown: set ZC_COMMIT"))
    report.row("machine", f"{os.cpu_count()} cores, {platform.platform()}")
    report.row("python", platform.python_version())
    for name in (*NEEDED, *WANTED):
        try:
            report.row(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            report.row(name, "not installed")
            report.check(name not in NEEDED, f"{name} is not installed: carry its wheel in ZC_WHEELS")
    if args.dry:
        report.left_out.append("GPU, driver, nvcc: a dry run")
        return
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    report.row("GPU", run_command(query, timeout_s=20)[1].strip())
    report.row("torch's CUDA", f"{torch.version.cuda}, capability {torch.cuda.get_device_capability()}")
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    report.row("nvcc", run_command([nvcc, "--version"], timeout_s=20)[1].strip().splitlines()[-1])


if __name__ == "__main__":
    run_step(tell)

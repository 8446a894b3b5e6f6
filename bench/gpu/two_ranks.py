"""Step: two ranks that share the GPU end training with one rank's bits, in every run of train_bits.py.

Needs an MPI; without, it is left out. Collectives go through host memory then, as NCCL takes one rank a device.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import train_bits
from step_report import RESULT, Report, run_command, run_step, tail
from zerocore._launcher.mpi import find_mpirun
from zerocore.errors import ConfigError

TIMEOUT_S = 60


def compare(report: Report, args: argparse.Namespace) -> None:
    """The job first, then one rank, which is this process."""
    try:
        mpirun = find_mpirun()
    except ConfigError as error:
        report.left_out.append(f"two ranks: there is no MPI to start them with: {error}")
        return
    script = [sys.executable, str(Path(__file__).with_name("train_bits.py")), "--hashes", *["--dry"] * args.dry]
    command = mpirun.command(2, script)
    code, output = run_command(command, timeout_s=TIMEOUT_S, OMP_NUM_THREADS="1", **mpirun.environment({}))
    found = [json.loads(line[len(RESULT) :]) for line in output.splitlines() if line.startswith(RESULT)]
    if len(found) != 2 or any(each["failed"] for each in found):
        raise RuntimeError(f"{' '.join(command)} ended with {code}:\n{tail(output, 20)}")
    wanted = train_bits.hashes("cpu" if args.dry else "cuda", dry=args.dry)
    train_bits.report_equal(report, found[0]["figures"], wanted)
    report.check(found[0] == found[1], f"ranks differ: {found}")


if __name__ == "__main__":
    run_step(compare)

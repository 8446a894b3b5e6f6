"""Starts a script on several ranks and carries results back, for the scripts that launch jobs of their own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESULT = "zerocore-result "  # begins a line of output that holds a result
TAIL_LINES = 30


class JobError(Exception):
    """A job could not be started, failed, or did not end in time; the message ends with its last output."""


def send_result(result: Any) -> None:
    """Hands a JSON value to the process that called run_job()."""
    print(f"\n{RESULT}{json.dumps(result)}", flush=True)


def run_job(ranks: int, script: str, *arguments: str, timeout_s: float) -> list[Any]:
    """Runs `mpirun -n ranks python script arguments...`. Returns what its ranks sent, in order."""
    beside = Path(sys.executable).with_name("mpirun")  # a wheel's
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise JobError("no mpirun on PATH: pip install mpich mpi4py, or use the site's MPI")
    command = [mpirun, "-n", str(ranks), sys.executable, script, *arguments]
    # Whoever ends this process ends the job: its ranks are in a session of their own.
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    job = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = job.communicate(timeout=timeout_s)
        problem = f"ended with exit code {job.returncode}" if job.returncode else None
    except subprocess.TimeoutExpired:
        job.terminate()  # mpirun ends its ranks
        try:
            output, _ = job.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            output, _ = job.communicate()
        problem = f"did not end within {timeout_s:g} s"
    except BaseException:
        job.terminate()
        try:
            job.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    lines = output.splitlines()
    if problem is not None:
        tail = "\n".join(lines[-TAIL_LINES:])
        raise JobError(f"{' '.join(command)} {problem}. The end of its output:\n{tail}")
    return [json.loads(line[len(RESULT) :]) for line in lines if line.startswith(RESULT)]


def join_torch_distributed() -> tuple[int, int]:
    """Lets the ranks of this MPI job form torch's default process group, over gloo. Returns rank and world size."""
    import torch
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    port = None
    if world.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(world.bcast(port)), "RANK": str(world.rank)}
    os.environ |= environment | {"WORLD_SIZE": str(world.size), "LOCAL_RANK": str(world.rank)}
    torch.distributed.init_process_group("gloo")
    return world.rank, world.size


def leave_torch_distributed() -> None:
    """Ends the group."""
    import torch

    torch.distributed.barrier()
    # gloo's threads have yet to drop the last tensors, which takes the interpreter: if that shuts down first, they
    # abort the process (torch 2.13).
    time.sleep(0.5)
    torch.distributed.destroy_process_group()

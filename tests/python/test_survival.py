"""Whole jobs that are stopped, killed and started again: they end with the bits of a run that was left alone."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import train_gpt

FLAGS = ["--layers", "1", "--hidden", "32", "--heads", "2", "--seq", "16", "--micro-batch", "1", "--global-batch", "8"]
STEPS = 60
NO_CHILD_OF = ("ZC_RANK_PROCESS", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "ZC_LAUNCHER")
TIMEOUT_S = 120
KILLED_AT = Path(__file__).with_name("killed_at.py")


@pytest.fixture
def start(tmp_path):
    """start(*launcher flags, stage=..., script=[...]): a job in the background that saves every 10 steps."""
    jobs = []

    def start(*launcher, stage=2, script=(train_gpt.__file__,), save="run"):
        env = {name: value for name, value in os.environ.items() if name not in NO_CHILD_OF}
        command = [sys.executable, "-m", "zerocore", *launcher, *map(str, script), *FLAGS, "--dtype", "fp32"]
        command += ["--steps", str(STEPS), "--stage", str(stage), "--out", str(tmp_path)]
        command += ["--save", str(tmp_path / save), "--save-every", "10"]
        job = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True
        )
        jobs.append(job)
        return job

    yield start
    for job in jobs:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def finish(job):
    output, _ = job.communicate(timeout=TIMEOUT_S)
    return output


def sha256(output):
    found = re.search(r"^params sha256: ([0-9a-f]{64})", output, re.M)
    assert found, output
    return found[1]


def wait_for(path):
    deadline = time.monotonic() + TIMEOUT_S
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.05)


def ranks_of(folder):
    """The process ids of the scripts that run as ranks and save into `folder`."""
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        is_shim_or_launcher = any(b"shim" in part or b"mpirun" in part for part in command) or b"-m" in command
        if str(folder).encode() in command and not is_shim_or_launcher:
            found.append(int(process))
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    env = {name: value for name, value in os.environ.items() if name not in NO_CHILD_OF}
    command = [sys.executable, train_gpt.__file__, *FLAGS, "--dtype", "fp32", "--steps", str(STEPS)]
    done = subprocess.run(
        [*command, "--out", str(folder)], capture_output=True, text=True, env=env, timeout=TIMEOUT_S, check=True
    )
    return sha256(done.stdout)


def test_sigterm_finishes_the_step_saves_and_ends_well(start, tmp_path, undisturbed):
    job = start("--num_ranks", "2")
    wait_for(tmp_path / "run" / "global_step10")
    job.send_signal(signal.SIGTERM)
    output = finish(job)
    assert job.returncode == 0, output
    stopped = re.search(r"zerocore: stopped on SIGTERM after step (\d+); saved (.*)", output)
    assert stopped, output
    assert 10 <= int(stopped[1]) < STEPS
    assert stopped[2] == str(tmp_path / "run" / f"global_step{stopped[1]}")
    assert "params sha256" not in output
    resumed = start("--num_ranks", "3", stage=3)
    assert sha256(finish(resumed)) == undisturbed


def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(start, tmp_path, undisturbed):
    job = start("--num_ranks", "3", "--max-restarts", "2")
    wait_for(tmp_path / "run" / "global_step10")
    victims = ranks_of(tmp_path / "run")
    assert len(victims) == 3
    os.kill(victims[1], signal.SIGKILL)
    output = finish(job)
    assert job.returncode == 0, output
    assert re.search(r"rank \d failed first, .* \(signal 9\)", output), output
    assert re.search(r"2 ranks, without rank \d that died", output), output
    assert sha256(output) == undisturbed


@pytest.mark.soak
def test_twenty_kills_at_random_steps(start, undisturbed):
    """4 ranks, one of them killed: the others go on, 3 of them carrying batches of 8."""
    rng = random.Random(0)
    for number in range(20):
        rank, step = rng.randrange(4), rng.randrange(STEPS)
        stage = number % 4
        script = (KILLED_AT, rank, step, train_gpt.__file__)
        job = start("--num_ranks", "4", "--max-restarts", "1", stage=stage, script=script, save=f"run{number}")
        output = finish(job)
        assert job.returncode == 0, output
        assert f"3 ranks, without rank {rank} that died" in output
        assert sha256(output) == undisturbed, (number, rank, step)

"""The machinery of @pytest.mark.ranks, run on small files of tests in a pytest of its own."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent

OUTCOMES = """
import os, pytest
from mpi4py import MPI
world = MPI.COMM_WORLD

@pytest.fixture
def only_in_workers():
    assert world.size > 1, "a fixture was set up in the parent session"

@pytest.mark.ranks(2)
def test_good(only_in_workers):
    assert world.allreduce(world.rank) == 1

@pytest.mark.ranks(2)
def test_one_rank_fails():
    print("said before failing")
    assert world.rank == 0, "the reason"

@pytest.mark.ranks(2)
def test_after_failure():
    assert world.allreduce(1) == 2

@pytest.mark.ranks(2)
@pytest.mark.skipif(True, reason="why not")
def test_skipped():
    pass

@pytest.mark.ranks(2)
def test_fixture_fails(no_such_fixture):
    pass

@pytest.mark.ranks(2)
def test_disagreeing():
    if world.rank == 1:
        pytest.skip("only here")

@pytest.mark.ranks(3, 2)
def test_sizes(world_size):
    assert world.size == world_size

@pytest.mark.parametrize("x", ["a::b", "c d"])
@pytest.mark.ranks(2)
class TestInClass:
    def test_parametrized(self, x):
        assert len(x) >= 3

def test_local(world_size):
    assert world.size == world_size == 1
"""

CRASH = """
import os, pytest
from mpi4py import MPI

@pytest.mark.ranks(2)
def test_before():
    pass

@pytest.mark.ranks(2)
def test_crash():
    if MPI.COMM_WORLD.rank == 1:
        os.kill(os.getpid(), 11)
    MPI.COMM_WORLD.barrier()

@pytest.mark.ranks(2)
def test_after():
    pass
"""

HANG = """
import os, pathlib, pytest, time
from mpi4py import MPI

@pytest.mark.ranks(2)
def test_hang():
    pathlib.Path(f"pid{MPI.COMM_WORLD.rank}").write_text(str(os.getpid()))
    print("about to hang", flush=True)
    if MPI.COMM_WORLD.rank == 0:
        MPI.COMM_WORLD.recv(source=1)
    time.sleep(1000)

@pytest.mark.ranks(2)
def test_after():
    pass
"""

EVERY_LAUNCH_ENDS_EARLY = """
import os, pytest
os._exit(7) if "ZC_TEST_RANKS_DIR" in os.environ else None

@pytest.mark.ranks(2)
@pytest.mark.parametrize("i", range(5))
def test_any(i):
    pass
"""


@pytest.fixture
def run_pytest(tmp_path):
    def run(source, *arguments):
        for name in ("conftest.py", "rank_launch.py", "simulated_cuda.py"):
            shutil.copy(HERE / name, tmp_path)
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        (tmp_path / "test_it.py").write_text(source)
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        outcomes = dict(re.findall(r"^test_it.py::(.+?) (PASSED|FAILED|SKIPPED|ERROR)\b", done.stdout, re.M))
        return outcomes, done.stdout

    return run


def test_outcomes_of_ranks_are_mapped_back(run_pytest):
    outcomes, output = run_pytest(OUTCOMES)
    assert outcomes == {
        "test_good": "PASSED",
        "test_one_rank_fails": "FAILED",
        "test_after_failure": "PASSED",
        "test_skipped": "SKIPPED",
        "test_fixture_fails": "FAILED",
        "test_disagreeing": "FAILED",
        "test_sizes[2ranks]": "PASSED",
        "test_sizes[3ranks]": "PASSED",
        "TestInClass::test_parametrized[a::b]": "PASSED",
        "TestInClass::test_parametrized[c d]": "PASSED",
        "test_local": "PASSED",
    }
    assert "--- rank 1 of 2: failed ---" in output and "rank 0 of 2: failed ---\n[call]" not in output
    assert "the reason" in output and "said before failing" in output
    assert "no_such_fixture" in output
    assert "--- rank 1 of 2: skipped ---" in output


@pytest.mark.parametrize("arguments", [["-k", "good"], ["test_it.py::test_good"]], ids=["-k", "id"])
def test_selecting(run_pytest, arguments):
    assert run_pytest(OUTCOMES, *arguments)[0] == {"test_good": "PASSED"}


def test_crash_fails_one_test_and_the_rest_runs(run_pytest):
    outcomes, output = run_pytest(CRASH)
    assert outcomes == {"test_before": "PASSED", "test_crash": "FAILED", "test_after": "PASSED"}
    assert "did not finish this test: exit code" in output
    assert "Segmentation fault" in output  # the end of mpirun's output


def test_hang_is_killed(run_pytest, tmp_path):
    outcomes, output = run_pytest(HANG, "--ranks-timeout=6")
    assert outcomes == {"test_hang": "FAILED", "test_after": "PASSED"}
    assert "no test finished within 6 s, the ranks were killed" in output
    for rank in (0, 1):
        pid = int((tmp_path / f"pid{rank}").read_text())
        assert ended(pid), f"rank {rank} outlived its launch"


def test_gives_up_when_every_launch_ends_early(run_pytest):
    outcomes, output = run_pytest(EVERY_LAUNCH_ENDS_EARLY)
    assert outcomes == {f"test_any[{i}]": "FAILED" for i in range(5)}
    assert "not run: 3 launches of 2 ranks for this file failed before" in output


def ended(pid):
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False

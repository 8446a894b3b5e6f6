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
    def run(source, *arguments, **beside):
        for name in ("conftest.py", "rank_launch.py", "simulated_cuda.py"):
            shutil.copy(HERE / name, tmp_path)
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        (tmp_path / "test_it.py").write_text(source)
        for name, text in beside.items():
            (tmp_path / f"{name}.py").write_text(text)
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


FILE_OF_SEVERAL = """
import os, pathlib, pytest, time

@pytest.mark.ranks(3, 2)
def test_who(world_size):
    with open("who.txt", "a") as file:
        file.write(f"{world_size} {os.getpid()} test_NAME\\n")

def test_alone():
    time.sleep(0.1)
    assert pathlib.Path("who.txt").read_text().endswith("test_NAME\\n")
"""


def test_files_share_their_ranks_and_wait_for_each_other(run_pytest, tmp_path):
    names = ["test_it", "test_second", "test_third"]
    first, *others = (FILE_OF_SEVERAL.replace("test_NAME", f"{name}.py") for name in names)
    _, output = run_pytest(first, **dict(zip(names[1:], others, strict=True)))
    assert "9 passed" in output, output
    ran = [line.split() for line in (tmp_path / "who.txt").read_text().splitlines()]
    assert [name for _, _, name in ran] == [f"{name}.py" for name in names for _ in range(5)]
    assert len({(size, pid) for size, pid, _ in ran}) == 5
    assert all(ended(int(pid)) for _, pid, _ in ran)


def test_a_file_that_ends_the_ranks_as_it_is_imported_costs_no_other_file_a_test(run_pytest):
    outcomes, output = run_pytest(OUTCOMES, "-k", "good or any", test_second=EVERY_LAUNCH_ENDS_EARLY)
    assert outcomes == {"test_good": "PASSED"}
    assert output.count("FAILED") >= 5 and "1 passed" in output and "5 failed" in output


def ended(pid):
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False

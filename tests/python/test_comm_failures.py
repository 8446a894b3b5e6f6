"""Jobs in which ranks fail, leave or do not come: every rank says so within seconds, and none hangs in MPI_Finalize."""

import time

import pytest

# `comm`, and helpers whose names say what a rank does.
PRELUDE = """
import os, sys, threading, time
from zerocore import _comm, _core
from zerocore.errors import CommError
comm = _comm.world(timeout_ms=60_000)
rank = comm.rank
def meet(label="meet"):
    return comm.all_reduce([1], _core.ReduceOp.sum, label)
meet("start")
"""
SECONDS = 30  # "within seconds", on a busy machine, with the start of Python on every rank


@pytest.fixture
def job(mpirun):
    def run(n, script, **env):
        start = time.monotonic()
        done = mpirun(n, "-c", PRELUDE + script, timeout=90, **env)
        assert time.monotonic() - start < SECONDS, done.stdout
        return done.returncode, done.stdout

    return run


@pytest.mark.parametrize("n", [2, 4])
def test_a_normal_end_is_quiet(job, n):
    script = """
import atexit
from mpi4py import MPI
atexit.register(lambda: sys.stderr.write("finalized early\\n") if MPI.Is_finalized() else None)
time.sleep(0.3 * rank)
"""
    assert job(n, script) == (0, "")


def test_exit_codes_survive(job):
    code, output = job(2, "sys.exit(7)")
    assert code == 7
    assert "zerocore" not in output


@pytest.mark.parametrize("n", [2, 4])
def test_a_rank_that_raises(job, n):
    script = """
comm.set_activity("step 3")
if rank == 1:
    raise ValueError("bad sample in\\n shard 5")
meet("reduce bucket 7 (layers.3.mlp.*)")
"""
    code, output = job(n, script)
    assert code != 0
    assert "ValueError: bad sample in" in output  # the traceback of the rank itself
    told = "[comm] rank 1 has left (raised ValueError: bad sample in shard 5) while others need it: rank 0 is in step 3, "
    assert output.count(f"zerocore.errors.CommError: {told}reduce bucket 7 (layers.3.mlp.*)") == n - 1, output


def test_a_rank_that_raises_while_another_computes(job):
    script = """
if rank == 1:
    raise ValueError("early")
time.sleep(2)
meet("late")
"""
    code, output = job(2, script)
    assert code != 0
    assert "CommError: [comm] rank 1 has left (raised ValueError: early) while others need it: rank 0 is in late" in output


@pytest.mark.parametrize("way", ["sys.exit(0)", "sys.exit(3)", "pass"])
def test_a_rank_that_ends_early(job, way):
    code, output = job(3, f"if rank == 2: {way}\nelse: meet('one more')")
    assert code != 0
    assert (
        output.count("CommError: [comm] rank 2 has left (ended its script) while others need it: rank 0 is in one more")
        == 2
    ), output
    assert "zerocore: this rank had ended its script when the job failed: [comm] rank " in output


def test_different_collectives(job):
    script = """
comm.set_activity("step 41")
if rank == 0:
    comm.barrier("save_checkpoint").wait()
else:
    meet("reduce bucket 7")
"""
    code, output = job(2, script)
    assert code != 0
    assert (
        output.count(
            "CommError: [comm] ranks are in different collectives: rank 0 is in step 41, save_checkpoint [barrier, call 2]"
        )
        == 2
    ), output
    assert "rank 1 is in step 41, reduce bucket 7 [all_reduce (sum) of 1 int64, call 2]" in output


def test_a_rank_that_does_not_come(job):
    script = """
comm.timeout_ms = 500
comm.set_activity("step 2")
if rank == 1:
    time.sleep(2.5)
meet("agree on the norm")
"""
    code, output = job(2, script)
    assert code != 0
    assert "CommError: [comm] timed out after 0.5 s in step 2, agree on the norm: rank 1 did not arrive." in output
    assert "rank 1 has not arrived (it was last in start)" in output
    assert "raise comm.timeout_ms, now 500" in output
    assert "CommError: [comm] rank 0 has left (raised CommError: [comm] timed out after 0.5 s" in output


def test_a_failure_with_a_large_transfer_under_way(job):
    """A rank gives up in the middle: nothing is written into the memory that it frees, and all ranks end."""
    script = """
import array
size = 64 << 20
full = array.array("B", bytes(size))
work = comm.all_gather(_core.BufferView(full.buffer_info()[0], size, _core.DType.uint8), "weights")
if rank == 1:
    raise ValueError("in the middle")
work.wait()
meet("next")
"""
    code, output = job(2, script)
    assert code != 0
    assert "ValueError: in the middle" in output
    assert "CommError: [comm] rank 1 has left (raised ValueError: in the middle)" in output


def test_a_caught_failure_still_ends_the_job_with_an_error(job):
    script = """
if rank == 1:
    raise ValueError("bad")
try:
    meet("next")
except CommError as error:
    print("caught", error)
try:
    meet("again")
except CommError as error:
    print("still", error)
"""
    code, output = job(2, script)
    assert code != 0
    assert "caught [comm] rank 1 has left (raised ValueError: bad)" in output
    assert "still [comm] rank 1 has left (raised ValueError: bad)" in output


def test_a_replaced_excepthook_hides_nothing(job):
    script = """
sys.excepthook = lambda kind, value, traceback: print("my hook", value)
if rank == 1:
    raise ValueError("bad")
meet("next")
"""
    code, output = job(2, script)
    assert code != 0
    assert "my hook bad" in output
    assert "my hook [comm] rank 1 has left (raised ValueError: bad)" in output


def test_an_exception_in_a_thread_is_no_end(job):
    script = """
def fail():
    raise ValueError("in a thread")
if rank == 1:
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
print("sum", meet("after"))
"""
    code, output = job(2, script)
    assert code == 0
    assert output.count("sum [2]") == 2


def test_forked_children_say_nothing(job):
    script = """
if rank == 1:
    child = os.fork()
    if child == 0:
        try:
            meet("in the child")
        except CommError as error:
            print("child:", error, flush=True)
        try:
            raise ValueError("the child failed")
        except ValueError:
            sys.excepthook(*sys.exc_info())
        os._exit(0)
    os.waitpid(child, 0)
print("sum", meet("after"))
"""
    code, output = job(2, script)
    assert code == 0, output
    assert "child: [comm] a collective was called in a forked child process, which is no rank of the job." in output
    assert output.count("sum [2]") == 2


def test_ctrl_c_ends_a_wait(job):
    script = """
import signal
if rank == 0:
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(1)
else:
    time.sleep(3)
meet("late")
"""
    code, output = job(2, script)
    assert code != 0
    assert "KeyboardInterrupt" in output
    assert "CommError: [comm] rank 0 has left (raised KeyboardInterrupt) while others need it: rank 1 is in late" in output

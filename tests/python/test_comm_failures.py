"""Jobs in which ranks fail, leave or do not come: every rank says so within seconds, and none hangs in MPI_Finalize."""

import re
import time

import pytest

# Each rank writes to a file of its own. `rank` is the launcher's; no MPI yet.
START = """
import os, sys, threading, time
rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
output = os.open(os.path.join(os.environ["ZC_TEST_OUTPUT"], str(rank)), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
os.dup2(output, 1)
os.dup2(output, 2)
import zerocore
"""

# Then `comm`, over which the ranks have met once, and meet() for a collective.
MEET = """
from zerocore import _comm, _core
from zerocore.errors import CommError
comm = _comm.world(timeout_ms=60_000)
def meet(label="meet"):
    return comm.all_reduce([1], _core.ReduceOp.sum, label)
meet("start")
"""
SECONDS = 30  # "within seconds", on a busy machine, with the start of Python on every rank


@pytest.fixture
def job(mpirun, tmp_path):
    """Runs a script on n ranks; returns mpirun's exit code and what each rank wrote."""

    def run(n, script, *, prelude=START + MEET):
        start = time.monotonic()
        done = mpirun(n, "-c", prelude + script, timeout=90, ZC_TEST_OUTPUT=str(tmp_path))
        assert time.monotonic() - start < SECONDS, done.stdout
        return done.returncode, [(tmp_path / str(rank)).read_text() for rank in range(n)]

    return run


@pytest.mark.parametrize("n", [2, 4])
def test_a_normal_end_is_quiet(job, n):
    assert job(n, "time.sleep(0.3 * rank)") == (0, [""] * n)


def test_exit_codes_survive(job):
    assert job(2, "sys.exit(7)") == (7, ["", ""])


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
    assert "ValueError: bad sample in\n shard 5" in output.pop(1)  # the traceback of the rank itself
    for text in output:
        assert (
            "CommError: [comm] rank 1 has left (raised ValueError: bad sample in shard 5) while others need it: "
            in text
        )
        assert "rank 0 is in step 3, reduce bucket 7 (layers.3.mlp.*)" in text


def test_a_rank_that_raises_while_another_computes(job):
    script = """
if rank == 1:
    raise ValueError("early")
time.sleep(2)
meet("late")
"""
    code, output = job(2, script)
    assert code != 0
    assert "CommError: [comm] rank 1 has left (raised ValueError: early)" in output[0]
    assert "while others need it: rank 0 is in late (this rank). Look at the output of rank 1 first." in output[0]


@pytest.mark.parametrize("way", ["", "from mpi4py import MPI\n    "])
def test_a_rank_that_raises_before_it_has_met_the_others(job, way):
    """MPI_Init waits for all ranks, so this rank joins the job to tell why it ends."""
    script = f"""
if rank == 1:
    {way}raise ValueError("no data")
from zerocore import _comm
_comm.world().barrier("first").wait()
"""
    code, output = job(2, script, prelude=START)
    assert code != 0
    assert "ValueError: no data" in output[1]
    assert (
        "CommError: [comm] rank 1 has left (raised ValueError: no data) while others need it: rank 0 is in" in output[0]
    )


def test_all_ranks_raise_before_they_have_met(job):
    code, output = job(2, "raise ValueError('no data')", prelude=START)
    assert code != 0
    for text in output:
        assert text.endswith("ValueError: no data\n")


@pytest.mark.parametrize("way", ["sys.exit(0)", "os._exit(0)"])
def test_a_rank_that_ends_before_it_has_met_the_others(job, way):
    script = f"""
from zerocore import _comm
if rank == 1:
    {way}
_comm.world(timeout_ms=60_000)
"""
    code, output = job(3, script, prelude=START)
    assert code != 0
    for text in output[::2]:
        assert text.startswith("zerocore.errors.CommError: [comm] rank 1 ended before the job had started, while this")


def test_a_rank_that_comes_late_is_waited_for(job):
    script = """
if rank == 1:
    time.sleep(4)
from zerocore import _comm
_comm.world(timeout_ms=60_000).barrier("first").wait()
"""
    assert job(2, script, prelude=START) == (0, ["", ""])


def test_the_start_of_the_job_has_a_timeout(job):
    script = """
from zerocore import _comm
if rank == 1:
    time.sleep(5)
_comm.world(timeout_ms=2000)
"""
    code, output = job(2, script, prelude=START)
    assert code != 0
    assert output[0].startswith(
        "zerocore.errors.CommError: [comm] timed out after 2 s in the start of the job: not all ranks came."
    )
    assert "raise comm.timeout_ms, now 2000" in output[0]


@pytest.mark.parametrize("way", ["sys.exit(0)", "sys.exit(3)", "pass"])
def test_a_rank_that_ends_early(job, way):
    code, output = job(3, f"if rank == 2: {way}\nelse: meet('one more')")
    assert code != 0
    for text in output[:2]:
        assert (
            "CommError: [comm] rank 2 has left (ended its script) while others need it: rank 0 is in one more" in text
        )
    assert output[2].startswith("zerocore: this rank had ended its script when the job failed: [comm] rank ")


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
    for text in output:
        assert (
            "CommError: [comm] ranks are in different collectives: rank 0 is in step 41, save_checkpoint [barrier, "
            in text
        )
        assert "rank 1 is in step 41, reduce bucket 7 [all_reduce (sum) of 1 int64, call 3]" in text


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
    assert "CommError: [comm] timed out after 0.5 s in step 2, agree on the norm: rank 1 did not arrive." in output[0]
    assert "rank 1 has not arrived (it was last in start)" in output[0]
    assert "raise comm.timeout_ms, now 500" in output[0]
    told = (
        r"CommError: \[comm\] rank 0 (has left \(raised CommError: |reports a failure \()\[comm\] timed out after 0\.5"
    )
    assert re.search(told, output[1])


def test_a_failure_with_a_large_transfer_under_way(job):
    """The transfer that both have entered is finished, so nothing is written into memory that has been freed."""
    script = """
import array
size = 64 << 20
full = array.array("B", bytes([rank]) * size)
work = comm.all_gather(_core.BufferView(full.buffer_info()[0], size, _core.DType.uint8), "weights")
if rank == 1:
    time.sleep(0.005)
    raise ValueError("in the middle")
work.wait()
meet("next")
"""
    code, output = job(2, script)
    assert code != 0
    assert "ValueError: in the middle" in output[1]
    assert "CommError: [comm] rank 1 has left (raised ValueError: in the middle)" in output[0]


def test_a_caught_failure_still_ends_the_job_with_an_error(job):
    script = """
if rank == 1:
    raise ValueError("bad")
for word in ("caught", "still"):
    try:
        meet("next")
    except CommError as error:
        print(word, error)
"""
    code, output = job(2, script)
    assert code != 0
    assert "caught [comm] rank 1 has left (raised ValueError: bad)" in output[0]
    assert "still [comm] rank 1 has left (raised ValueError: bad)" in output[0]


def test_a_replaced_excepthook_hides_nothing(job):
    script = """
sys.excepthook = lambda kind, value, traceback: print("my hook", value)
if rank == 1:
    raise ValueError("bad")
meet("next")
"""
    code, output = job(2, script)
    assert code != 0
    assert output[1] == "my hook bad\n"
    assert output[0].startswith("my hook [comm] rank 1 has left (raised ValueError: bad)")


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
    assert output[0] == "sum [2]\n"
    assert output[1].endswith("ValueError: in a thread\nsum [2]\n")


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
    assert code == 0
    assert output[0] == "sum [2]\n"
    assert output[1].startswith(
        "child: [comm] a collective was called in a forked child process, which is no rank of the"
    )
    assert output[1].endswith("ValueError: the child failed\nsum [2]\n")


def test_programs_started_by_a_rank_are_no_ranks(job):
    """They inherit the launcher's variables; an exception in one must not join MPI in the rank's place."""
    script = """
import subprocess
if rank == 1:
    child = subprocess.run([sys.executable, "-c", "import zerocore; raise ValueError('only a child')"], timeout=20)
    print("child ended with", child.returncode)
print("sum", meet("after"))
"""
    code, output = job(2, script)
    assert code == 0
    assert output[0] == "sum [2]\n"
    assert "ValueError: only a child" in output[1]
    assert output[1].endswith("child ended with 1\nsum [2]\n")


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
    assert "KeyboardInterrupt" in output[0]
    assert (
        "CommError: [comm] rank 0 has left (raised KeyboardInterrupt) while others need it: rank 1 is in" in output[1]
    )

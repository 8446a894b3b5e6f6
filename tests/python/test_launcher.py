"""The command `zerocore`: real jobs, in which ranks fail in all ways. Without torch, so that each takes a second."""

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import pytest
from zerocore._cli import COMMANDS
from zerocore._launcher import mpi
from zerocore._launcher.restarts import Restarts
from zerocore._launcher.server import Server
from zerocore.errors import ConfigError

# `rank` and `size` before MPI; join() meets the others over zerocore's own communicator.
START = """
import os, signal, subprocess, sys, time
rank = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
size = int(os.environ.get("PMI_SIZE") or os.environ.get("OMPI_COMM_WORLD_SIZE") or 1)
restart = int(os.environ["ZC_RESTART"])
from zerocore import _channel
def join():
    from zerocore import _comm, _core
    comm = _comm.world(timeout_ms=20_000)
    meet = lambda label: comm.all_reduce([1], _core.ReduceOp.sum, label)
    meet("start")
    return meet
"""
NO_CHILD_OF = ("ZC_RANK_PROCESS", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "ZC_LAUNCHER", "OMP_NUM_THREADS")


class Job:
    """One call of the command, in the background; all of its processes carry a mark in their environment."""

    def __init__(self, folder, arguments, env):
        self.mark = f"ZC_TEST_MARK={uuid.uuid4()}"
        name, value = self.mark.split("=")
        clean = {key: text for key, text in os.environ.items() if key not in NO_CHILD_OF}
        self.files = folder / "stdout", folder / "stderr"
        self.start = time.monotonic()
        with self.files[0].open("w") as stdout, self.files[1].open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "zerocore", *arguments],
                stdout=stdout,
                stderr=stderr,
                stdin=subprocess.DEVNULL,
                env={**clean, name: value, **env},
                cwd=folder,
            )

    def wait(self, timeout=40):
        try:
            self.code = self.process.wait(timeout)
        finally:
            self.process.kill()
            self.seconds = time.monotonic() - self.start
            self.out, self.err = (file.read_text() for file in self.files)
        return self

    def processes(self):
        """Those of the job that are still there, the command itself aside."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z" and self.mark.encode() in (path / "environ").read_bytes().split(b"\0"):
                    found.append(int(path.name))
            except OSError:
                continue
        return [pid for pid in found if pid != self.process.pid]

    def wait_for(self, text, timeout=20):
        deadline = time.monotonic() + timeout
        while text not in self.files[0].read_text():
            assert time.monotonic() < deadline, self.files[1].read_text()
            time.sleep(0.02)


@pytest.fixture
def job(tmp_path):
    """job(options, code) starts a script; after the test none of its processes may be left."""
    started = []

    def start(options, code, *arguments, **env):
        (tmp_path / "script.py").write_text(START + textwrap.dedent(code))
        started.append(Job(tmp_path, [*options.split(), "script.py", *arguments], env))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        deadline = time.monotonic() + 8
        while (left := each.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left


def run(job, options, code, *arguments, **env):
    return job(options, code, *arguments, **env).wait()


# Starting


@pytest.mark.parametrize("option", ["--num_ranks", "--num-ranks"])
def test_ranks_meet_and_get_the_arguments(job, option):
    done = run(
        job,
        f"{option} 3",
        """
        print(f"rank {rank} of {size}: {join()('all')}, {sys.argv[1:]}, {os.environ['OMP_NUM_THREADS']}", flush=True)
        """,
        *["--num_ranks", "7", "-m", "--", "report"],
    )
    assert (done.code, done.err) == (0, "")
    told = "[3], ['--num_ranks', '7', '-m', '--', 'report'], 1"
    assert sorted(done.out.splitlines()) == [f"rank {rank} of 3: {told}" for rank in range(3)]


def test_one_rank_has_no_mpi_and_keeps_its_threads(job):
    done = run(job, "", "join(); print(rank, size, 'mpi4py' in sys.modules, os.environ.get('OMP_NUM_THREADS'))")
    assert (done.code, done.out, done.err) == (0, "0 1 False None\n", "")


def test_a_module(tmp_path):
    (tmp_path / "training.py").write_text("import sys; print(__name__, sys.argv[1:])")
    done = Job(tmp_path, ["-m", "training", "-x"], {}).wait()
    assert (done.code, done.out) == (0, "__main__ ['-x']\n")


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="this machine has GPUs")
def test_gpus_that_are_not_there(job):
    done = run(job, "--num_gpus=2", "print(rank)")
    assert (done.code, sorted(done.out.split())) == (0, ["0", "1"])
    assert done.err == "zerocore: --num_gpus=2: there is no GPU here, so 2 CPU ranks are started\n"


def test_a_script_that_is_not_there(tmp_path):
    done = Job(tmp_path, ["--num_ranks", "2", "nothing.py"], {}).wait()
    assert done.code == 2  # Python's
    assert "can't open file" in done.err
    assert re.search(r"zerocore: rank [01] failed first, .* it exited with code 2; see what it wrote above\n", done.err)


def test_the_command_is_not_for_ranks(job):
    done = run(job, "--num_ranks 2", "", PMI_RANK="0", PMI_SIZE="2")
    assert done.code == 2
    assert done.err.startswith("zerocore: [launch] zerocore starts the ranks itself: ")


# Failures


def test_the_first_failure_is_shown_first(job):
    done = run(
        job,
        "--num_ranks 3",
        """
        meet = join()
        if rank == 1:
            raise ValueError("bad sample in shard 5")
        meet("next")
        """,
    )
    assert done.code == 1
    first, *others = [line for line in done.err.splitlines() if line.startswith("zerocore:")]
    assert re.fullmatch(
        r"zerocore: rank 1 failed first, \d+\.\d s after the start: it raised ValueError: bad sample in shard 5", first
    )
    assert done.err.startswith(first)
    assert done.err.count("Traceback") == 1
    assert done.err.splitlines()[1] == "Traceback (most recent call last):"
    assert 'script.py", line' in done.err
    assert re.match(
        r"zerocore: \d\.\d s later ranks 0, 2 raised CommError: \[comm\] rank 1 has left \(raised ValueError: bad",
        others[0],
    )
    assert others[1:] == ["zerocore: the job has failed; exit code 1 is that of rank 1"]
    assert "BAD TERMINATION" not in done.out + done.err  # mpirun's own opinion
    assert "----" not in done.err


def test_a_consequence_that_comes_first_is_not_shown_first(job):
    done = run(
        job,
        "--num_ranks 2",
        """
        if rank == 0:
            from zerocore.errors import CommError
            open("raising", "w").close()
            raise CommError("[comm] somebody else has failed")
        while not os.path.exists("raising"):
            time.sleep(0.01)
        time.sleep(0.2)
        raise ValueError("the cause")
        """,
    )
    assert re.match(r"zerocore: rank 1 failed first, .*: it raised ValueError: the cause\nTraceback", done.err)
    assert "zerocore: 0.0 s later rank 0 raised CommError: [comm] somebody else has failed\n" in done.err


def test_survivors_of_a_kill_can_speak(job):
    """mpirun alone would kill them within milliseconds, as both MPIs have been told of the rank."""
    done = run(
        job,
        "--num_ranks 3",
        """
        join()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1.5)
        print(f"rank {rank} is still here")
        for number in os.listdir("/proc/self/fd"):
            if os.path.exists(f"/proc/self/fd/{number}"):
                print("file", os.readlink(f"/proc/self/fd/{number}"))
        os._exit(5)
        """,
    )
    assert done.code == 128 + signal.SIGKILL
    lines = sorted(set(done.out.splitlines()))
    assert lines[-2:] == ["rank 0 is still here", "rank 2 is still here"]
    shared = [line.split()[1] for line in lines if line.startswith("file /dev/shm/")]
    assert not any(os.path.exists(path) for path in shared), shared  # MPICH would leave its own
    assert re.match(r"zerocore: rank 1 failed first, .*: it was killed by SIGKILL \(signal 9\)\. If nobody", done.err)
    assert " s later ranks 0, 2 exited with code 5\n" in done.err
    assert "BAD TERMINATION" not in done.out + done.err


def test_survivors_name_the_dead(job):
    done = run(
        job,
        "--num_ranks 3",
        """
        meet = join()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        meet("next")
        """,
    )
    assert done.code == 128 + signal.SIGKILL
    first, *others = done.err.splitlines()
    assert first.startswith("zerocore: rank 1 failed first, ")
    named = re.findall(
        r"^zerocore: (.*) s later ranks? (.*) raised CommError: \[comm\] rank 1 has died \(its process", done.err, re.M
    )
    assert sorted(", ".join(ranks for _, ranks in named).split(", ")) == ["0", "2"], others
    assert all(float(seconds) < 5 for seconds, _ in named)
    assert done.seconds < 15  # although the grace is 30


def test_an_exit_code_is_kept_and_the_others_are_ended(job):
    """Ranks that wait for ever, deaf to SIGTERM, and what they have started."""
    done = run(
        job,
        "--num_ranks 2 --grace-seconds 0.5",
        """
        if rank == 1:
            sys.exit(42)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["sleep", "600"])
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        time.sleep(600)
        """,
    )
    assert done.code == 42
    assert "rank 1 failed first" in done.err
    assert "later rank 0 did not end within 0.5 s of the failure and had to be killed" in done.err
    assert done.seconds < 15  # 3 of them between SIGTERM and SIGKILL


def test_a_stopped_rank_is_ended(job):
    done = run(
        job,
        "--num_ranks 2 --grace-seconds 0.5",
        """
        meet = join()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        from zerocore import _comm
        _comm.world(timeout_ms=500)
        meet("next")
        """,
    )
    assert done.code == 1
    assert re.search(
        r"rank 0 failed first, .* \[comm\] timed out after 0\.5 s in next: rank 1 did not arrive", done.err
    )
    assert "later rank 1 did not end within 0.5 s of the failure and had to be killed" in done.err


def test_mpi_abort_ends_the_job(job):
    done = run(
        job,
        "--num_ranks 2 --grace-seconds 20",
        """
        join()
        from mpi4py import MPI
        if rank == 1:
            MPI.COMM_WORLD.Abort(3)
        time.sleep(600)
        """,
    )
    assert done.code != 0
    assert done.seconds < 15


def test_a_rank_ends_with_its_shim(job):
    done = run(
        job,
        "--num_ranks 2 --grace-seconds 1",
        """
        if rank == 1:
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(0.5)
        print("alive", rank, flush=True)
        """,
    )
    assert done.code == 1
    assert "alive 1" not in done.out
    assert "was ended together with its shim" in done.err


def test_lines_of_ranks_stay_apart(job):
    done = run(job, "--num_ranks 3", "for i in range(300): print(f'{rank}-{i}'); time.sleep(0.001)")
    assert sorted(done.out.splitlines()) == sorted(f"{rank}-{i}" for rank in range(3) for i in range(300))


@pytest.mark.parametrize("way", ["sys.exit(0)", "os._exit(1)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_no_output_is_lost(job, way):
    done = run(
        job,
        "--num_ranks 2",
        f"""
        if rank == 1:
            for i in range(20_000):
                print(i)
            sys.stdout.flush()
        {way}
        """,
    )
    assert done.out == "".join(f"{i}\n" for i in range(20_000))


# Restarts


def test_a_restart_without_the_dead(job):
    done = run(
        job,
        "--num_ranks 3 --max-restarts 2",
        """
        meet = join()
        print(f"run {restart}: rank {rank} of {size}", flush=True)
        if rank == 0:
            _channel.report("saved", step=10 + restart, path="ckpt/global_step10")
        meet("saved")
        if restart == 0 and rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if restart == 0:
            os._exit(1)
        meet("more")
        """,
    )
    assert done.code == 0, done.err
    expected = [f"run 0: rank {rank} of 3" for rank in range(3)] + [f"run 1: rank {rank} of 2" for rank in range(2)]
    assert sorted(done.out.splitlines()) == expected
    assert (
        "zerocore: restart 1 of 2: 2 ranks, without rank 2 that died; newest checkpoint: step 10, ckpt/global_step10\n"
        in done.err
    )


def test_a_restart_with_all_and_down_to_one(job):
    """A rank that raised can run again; one that remains alone needs no MPI."""
    done = run(
        job,
        "--num_ranks 2 --max-restarts 5",
        """
        print(f"run {restart} has {size}", flush=True)
        if restart == 0 and rank == 1:
            sys.exit(1)
        if restart == 1 and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    assert done.code == 0, done.err
    assert sorted(done.out.splitlines()) == ["run 0 has 2", "run 0 has 2", "run 1 has 2", "run 1 has 2", "run 2 has 1"]
    assert "restart 1 of 5: 2 ranks\n" in done.err
    assert "restart 2 of 5: 1 ranks, without rank 0 that died\n" in done.err


def test_a_crash_loop_stops(job):
    done = run(job, "--max-restarts 100", "_channel.report('saved', step=5, path='x'); sys.exit(9)")
    assert done.code == 9
    assert done.err.count("failed first") == 3
    assert (
        "zerocore: no further restart: 2 restarts in a row ended without a new checkpoint: the job fails before it "
        "gets on; newest checkpoint: step 5, x\n" in done.err
    )


def test_when_restarts_end():
    restarts = Restarts(most=3, min_ranks=2)
    assert restarts.decide(ranks=4, dead=[1], progress=False).ranks == 3
    assert restarts.decide(ranks=3, dead=[], progress=True).ranks == 3
    assert restarts.decide(ranks=3, dead=[0], progress=True).ranks == 2
    assert restarts.decide(ranks=2, dead=[], progress=True).reason == "all 3 restarts are used up"
    few = Restarts(most=9, min_ranks=2).decide(ranks=3, dead=[0, 2], progress=True)
    assert (few.ranks, few.reason) == (None, "1 of 3 ranks are left, and --min-ranks is 2")
    assert Restarts(most=9, min_ranks=1).decide(ranks=1, dead=[0], progress=True).ranks is None
    loop = Restarts(most=99, min_ranks=1)
    assert [loop.decide(ranks=2, dead=[], progress=progress).ranks for progress in (0, 0, 1, 0, 0)] == [
        2,
        2,
        2,
        2,
        None,
    ]


# Ending a job


FINISHES = """
stop = False
def ask(*_):
    global stop
    stop = True
signal.signal(signal.SIGTERM, ask)
print("up", flush=True)
while not stop:
    time.sleep(0.05)
if rank == 0:
    _channel.report("saved", step=7, path="ckpt")
print("saved", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_sigterm_lets_the_ranks_finish(job, number):
    started = job("--num_ranks 2 --max-restarts 3", FINISHES)
    started.wait_for("up\nup")
    started.process.send_signal(number)
    done = started.wait()
    assert (done.code, done.out.count("saved")) == (0, 2)
    assert done.err == (
        f"zerocore: stopped on {number.name}: all 2 ranks ended by themselves, with exit code 0; "
        "newest checkpoint: step 7, ckpt\n"
    )


def test_sigterm_to_a_script_that_does_not_listen(job):
    started = job("--num_ranks 2 --max-restarts 3", "print('up', flush=True); time.sleep(600)")
    started.wait_for("up\nup")
    started.process.terminate()
    done = started.wait()
    assert done.code == 128 + signal.SIGTERM
    assert done.err == "zerocore: stopped on SIGTERM, before all ranks had finished: exit code 143\n"


def test_sigterm_while_the_ranks_start(job):
    started = job("--num_ranks 2 --grace-seconds 600", "time.sleep(600)")
    while not started.processes():  # mpirun, before its shims
        time.sleep(0.005)
    started.process.terminate()
    assert started.wait(20).code == 128 + signal.SIGTERM


DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"


def test_sigterm_has_an_end(job):
    started = job("--num_ranks 2 --grace-seconds 1", DEAF)
    started.wait_for("up\nup")
    started.process.terminate()
    done = started.wait(20)
    assert done.code == 128 + signal.SIGKILL
    assert "before all ranks had finished" in done.err


def test_a_second_signal_ends_the_job_now(job):
    started = job("--num_ranks 2 --grace-seconds 600", DEAF)
    started.wait_for("up\nup")
    started.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert started.process.poll() is None
    started.process.send_signal(signal.SIGINT)
    assert started.wait(20).code == 128 + signal.SIGKILL


@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_outlives_a_killed_launcher(job, ranks):
    started = job(
        f"--num_ranks {ranks}", "subprocess.Popen(['sleep', '600']); print('up', flush=True); time.sleep(600)"
    )
    started.wait_for("up\n" * ranks)
    assert started.processes()
    started.process.kill()
    started.wait()  # the fixture looks at what is left


# Parts


def test_strangers_are_not_heard():
    server = Server(ranks=2)
    host, port, token = server.address.split(":")

    def say(*lines):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall("".join(line + "\n" for line in lines).encode())
            stranger.settimeout(0.5)
            events = [event for _ in range(5) for event in server.poll(0.05)]
            try:
                dropped = stranger.recv(1) == b""
            except TimeoutError:
                dropped = False
            except ConnectionResetError:
                dropped = True
        return dropped, [(event.rank, event.name) for event in events]

    event = '{"event": "exited", "code": 0}'
    assert say(f'{{"token": "{token}", "rank": 1, "role": "rank"}}', event) == (False, [(1, "exited")])
    assert say('{"token": "0000", "rank": 1, "role": "shim"}', event) == (True, [])
    assert say(f'{{"token": "{token}", "rank": 2, "role": "shim"}}', event) == (True, [])
    assert say("GET / HTTP/1.1", "") == (True, [])
    assert say("[]") == (True, [])
    server.close()


def test_an_mpirun_of_the_other_family_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(mpi, "mpi_library", lambda: "Open MPI v5.0.1")
    monkeypatch.setattr(mpi, "_candidates", lambda family: ["/site/mpirun", "/other/mpiexec"])
    monkeypatch.setattr(mpi, "_version_of", {"/site/mpirun": "HYDRA build details:", "/other/mpiexec": "?"}.get)
    with pytest.raises(ConfigError, match=r"no mpirun fits .* got /site/mpirun \(mpich\), /other/mpiexec \(of another"):
        mpi.find_mpirun()
    versions = {"/site/mpirun": "HYDRA build details:", "/other/mpiexec": "mpirun (Open MPI) 5.0.1"}
    monkeypatch.setattr(mpi, "_version_of", versions.get)
    assert mpi.find_mpirun() == mpi.Mpirun("/other/mpiexec", "openmpi")
    monkeypatch.setattr(mpi, "mpi_library", lambda: "Other MPI 1")
    with pytest.raises(ConfigError, match="this MPI library is not known: got Other MPI 1"):
        mpi.find_mpirun()


def test_the_command_line(tmp_path):
    shown = Job(tmp_path, ["--help"], {}).wait()
    assert shown.code == 0
    assert all(f"zerocore {name}" in shown.out for name in COMMANDS)
    assert re.fullmatch(r"zerocore \d+\.\d+\.\d+\n", Job(tmp_path, ["--version"], {}).wait().out)
    assert Job(tmp_path, [], {}).wait().code == 2
    wrong = Job(tmp_path, ["--num_ranks", "0", "script.py"], {}).wait()
    assert (wrong.code, "invalid number above 0 value: '0'" in wrong.err) == (2, True)
    assert Job(tmp_path, ["--num_ranks", "2", "--num_gpus", "2", "script.py"], {}).wait().code == 2


def test_report(tmp_path):
    done = Job(tmp_path, ["report"], {}).wait()
    assert done.code == 0, done.err
    facts = dict(line.split(maxsplit=1) for line in done.out.splitlines() if len(line.split()) > 1)
    assert facts["zerocore"].startswith("0.")
    assert facts["self-test"].startswith("passed: two ranks, ")
    assert {"torch", "mpi4py", "processor", "memory", "O_DIRECT", "io_uring", "libaio"} <= set(facts)


# Whole trainings


@pytest.mark.soak
@pytest.mark.parametrize("flags", [[], ["--kills", "20"]], ids=["four-ways", "random-kills"])
def test_disturbed_trainings_end_with_the_same_bits(flags):
    chaos = Path(__file__).parents[2] / "examples" / "chaos.py"
    done = subprocess.run([sys.executable, chaos, *flags], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same parameters, bit for bit" in done.stdout
    named = re.findall(r"s later ranks? [\d, ]+ raised CommError: \[comm\] rank \d has", done.stdout)
    assert len(named) == (20 if flags else 3)  # of the rank that is stopped, the first failure tells

"""Starts `mpirun` for multi-rank tests and carries outcomes from the ranks to the parent session (see conftest.py)."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

# A (file, n) is given up after so many launches: each costs the import of torch on every rank, a hung one the timeout.
MAX_FAILED_LAUNCHES = 8
MAX_LOST_LAUNCHES = 3  # of them, those that crashed or hung
GRACE_S = 20.0  # how long a rank waits for the others' outcomes of a test that it failed, and the parent for its end
TESTS, TOLD = "tests", "told"  # files: which tests the ranks collect, and how many of them they are to run so far
END = -1  # instead of that number
TAIL_LINES = 40

OF_LAUNCHERS = {"RANK", "WORLD_SIZE", "LOCAL_RANK"}  # which init_distributed() has set here, perhaps
# Open MPI refuses more ranks than cores, and root, unless told otherwise. MPICH does not look at these.
OPEN_MPI_ENV = {"OMPI_MCA_rmaps_base_oversubscribe": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
if os.getuid() == 0:
    OPEN_MPI_ENV |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def mpi_rank_and_size():
    """From the environment, since importing MPI in a worker before its tests would hide what zerocore does."""
    env = os.environ
    rank = env.get("PMI_RANK") or env.get("OMPI_COMM_WORLD_RANK")
    size = env.get("PMI_SIZE") or env.get("OMPI_COMM_WORLD_SIZE")
    if rank is None or size is None:
        raise RuntimeError("[tests] mpirun set neither PMI_RANK nor OMPI_COMM_WORLD_RANK: expected MPICH or Open MPI")
    return int(rank), int(size)


def mpirun_path():
    """The mpirun beside this Python (a wheel's), else the one on PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def start_ranks(n, command, output, env, cwd=None):
    """Starts `mpirun -n n python command...` in a process group of its own; output: a file."""
    mpirun = mpirun_path()
    if mpirun is None:
        raise RuntimeError(
            "[tests] no mpirun for tests on several ranks: pip install mpich mpi4py, or load the site's MPI"
        )
    return subprocess.Popen(
        [mpirun, "-n", str(n), sys.executable, *command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={key: value for key, value in os.environ.items() if key not in OF_LAUNCHERS} | OPEN_MPI_ENV | env,
        cwd=cwd,
        start_new_session=True,
    )


def kill_ranks(job):
    """Ends mpirun, which ends its ranks; then whatever is left of the process group."""
    job.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    job.wait(5)


def run_ranks(n, *command, timeout=120, **env):
    """One job of n ranks: `mpirun -n n python command...`. Documented at the fixture `mpirun`."""
    with tempfile.TemporaryFile("w+") as output:
        job = start_ranks(n, command, output, env)
        try:
            job.wait(timeout)
            late = False
        except subprocess.TimeoutExpired:
            late = True
        finally:
            kill_ranks(job)
        output.seek(0)
        text = output.read()
    if late:
        raise AssertionError(f"the job did not end within {timeout} s; output:\n{text}")
    return subprocess.CompletedProcess(job.args, job.returncode, text, None)


@dataclass(frozen=True)
class Outcome:
    kind: str  # "passed", "failed" or "skipped"
    text: str = ""


class Outcomes:
    """One rank's outcomes as they come: a file with a JSON line a test."""

    def __init__(self, path):
        self.path = path
        self.found = {}  # {test: Outcome} in the order finished
        self._read = 0

    def look(self):
        """Reads what is new; a line that is being written is left for later. Returns how many there are."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._read)
                *lines, rest = file.read().split(b"\n")
                self._read = file.tell() - len(rest)
            for entry in map(json.loads, lines):
                self.found[entry["test"]] = Outcome(entry["kind"], entry["text"])
        return len(self.found)


class WorkerOutcomes:
    """What a rank writes down, and what it reads of the others to stay together with them without using MPI."""

    def __init__(self, folder):
        rank, size = mpi_rank_and_size()
        self.path = folder / f"{rank}.jsonl"
        self.ranks = [Outcomes(folder / f"{other}.jsonl") for other in range(size)]
        self.count = 0
        self.kind, self.text = "passed", ""

    def add_phase(self, report):
        """Takes the report of a phase (setup, call, teardown); the worst one is the test's outcome."""
        if report.failed:
            captured = "".join(f"\n--- {title} ---\n{text}" for title, text in report.sections)
            self.kind = "failed"
            self.text += f"[{report.when}]\n{report.longreprtext}{captured}\n"
        elif report.skipped and self.kind == "passed":
            self.kind = "skipped"
            self.text = report.longrepr[2] if isinstance(report.longrepr, tuple) else "xfail"

    def finish_test(self, nodeid):
        """Writes the outcome down and waits for the other ranks. False when a rank failed or did not finish."""
        kind = self.kind
        with self.path.open("a") as file:
            file.write(json.dumps({"test": nodeid, "kind": kind, "text": self.text}) + "\n")
        self.count += 1
        self.kind, self.text = "passed", ""
        deadline = time.monotonic() + GRACE_S if kind == "failed" else None  # else the parent's timeout bounds it
        while not all(rank.look() >= self.count for rank in self.ranks):
            if deadline is not None and time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return all(list(rank.found.values())[self.count - 1].kind != "failed" for rank in self.ranks)


class Ranks:
    """One mpirun: it runs tests in order, as many as it has been told to so far, and waits for more in between.

    Those of several files share it, since importing torch on every rank takes seconds.
    """

    def __init__(self, n, tests, rootdir):
        self.tests = tests
        self.timed_out = False
        self._told = 0
        self._folder = tempfile.TemporaryDirectory(prefix="zc-ranks-")
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        folder = Path(self._folder.name)
        self._ranks = [Outcomes(folder / f"{rank}.jsonl") for rank in range(n)]
        (folder / TESTS).write_text("\n".join(tests))  # a file, since thousands of names do not fit a command line
        self._tell(0)
        command = ["-m", "pytest", "-m", "", "-p", "no:cacheprovider", f"--rootdir={rootdir}", f"@{folder / TESTS}"]
        env = {"ZC_TEST_RANKS_DIR": str(folder), "ZC_TEST_PARENT": str(os.getpid())}
        self._job = start_ranks(n, command, self._output, env, cwd=rootdir)

    def is_next(self, tests):
        """Whether these are what the ranks wait to run."""
        return self._job.poll() is None and self.tests[self._told : self._told + len(tests)] == tests

    def run(self, tests, timeout):
        """Runs the next tests, until all are done or the job has ended. Returns each rank's {test: Outcome}."""
        self._told += len(tests)
        self._tell(self._told)
        progress, since = -1, time.monotonic()
        while self._job.poll() is None:
            counts = [rank.look() for rank in self._ranks]
            if self._told < len(self.tests) and min(counts) >= self._told:
                break
            if sum(counts) != progress:
                progress, since = sum(counts), time.monotonic()
            elif time.monotonic() - since > timeout:
                self.timed_out = True
                break
            time.sleep(0.02)
        if self.timed_out or any(each.kind == "failed" for rank in self._ranks for each in rank.found.values()):
            self._end(GRACE_S if not self.timed_out else 0)
        for rank in self._ranks:
            rank.look()
        return [{test: rank.found[test] for test in tests if test in rank.found} for rank in self._ranks]

    def exit_code(self):
        """None while the ranks wait for more."""
        return self._job.poll()

    def last_output(self):
        self._output.seek(0)
        return "\n".join(self._output.read().splitlines()[-TAIL_LINES:])

    def close(self):
        """Ends the ranks; those that wait by themselves."""
        self._tell(END)
        self._end(GRACE_S)
        self._output.close()
        self._folder.cleanup()

    def _tell(self, count):
        told = Path(self._folder.name) / TOLD
        beside = told.with_suffix(".new")
        beside.write_text(str(count))
        beside.replace(told)

    def _end(self, grace_s):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._job.wait(grace_s)
        kill_ranks(self._job)


def wait_until_told(folder, count):
    """In a rank: waits until more than `count` tests are to be run; False when there will be none."""
    parent = int(os.environ["ZC_TEST_PARENT"])
    told = folder / TOLD
    while (allowed := int(told.read_text())) != END and os.path.exists(f"/proc/{parent}"):
        if allowed > count:
            return True
        time.sleep(0.01)
    return False


class Launcher:
    """The launches for the tests of one file on n ranks.

    Args:
        pool: {n: Ranks}, shared by all files.
        after: the tests of later files on as many ranks, which may follow in the same job.
    """

    def __init__(self, n, config, pool):
        self.n = n
        self.config = config
        self.pool = pool
        self.tests = []  # node ids, in order
        self.after = []
        self.outcomes = {}
        self.failed_launches = 0
        self.lost_launches = 0

    def outcome(self, test):
        """The merged outcome of a test; has the ranks run it when they have not yet."""
        if test not in self.outcomes:
            if self.failed_launches >= MAX_FAILED_LAUNCHES or self.lost_launches >= MAX_LOST_LAUNCHES:
                reason = f"{self.failed_launches} launches of {self.n} ranks for this file failed before"
                self.outcomes[test] = Outcome("failed", f"not run: {reason}")
            else:
                self.launch(self.tests[self.tests.index(test) :], self.after)
        return self.outcomes[test]

    def launch(self, tests, after):
        """Runs tests until all are done or one has failed; at least the first has an outcome afterwards."""
        ranks = self.pool.get(self.n)
        if ranks is None or not ranks.is_next(tests):
            if ranks is not None:
                ranks.close()
            ranks = self.pool[self.n] = Ranks(self.n, tests + after, self.config.rootpath)
        timeout = self.config.getoption("--ranks-timeout")
        found = ranks.run(tests, timeout)
        if not any(found) and after:  # whatever it was may have come with another file
            self.launch(tests, [])
            return
        end = "exit code 0" if ranks.exit_code() is None else f"exit code {ranks.exit_code()}"
        if ranks.timed_out:
            end = f"no test finished within {timeout:g} s, the ranks were killed"
        for test in tests:
            each = [rank.get(test) for rank in found]
            if None not in each:
                self.outcomes[test] = merge(each)
                if self.outcomes[test].kind != "failed":
                    continue
            else:
                parts = [
                    f"--- rank {rank} of {self.n} ---\n{outcome.text}"
                    for rank, outcome in enumerate(each)
                    if outcome and outcome.kind == "failed"
                ]
                waiting = ", ".join(str(rank) for rank, outcome in enumerate(each) if outcome is None)
                parts.append(
                    f"rank {waiting} of {self.n} did not finish this test: {end}. End of the output:\n"
                    f"{ranks.last_output()}"
                )
                self.outcomes[test] = Outcome("failed", "\n".join(parts))
                self.lost_launches += 1
            self.failed_launches += 1
            return
        if end != "exit code 0":  # all tests passed, and then the job failed: say so in the last one
            text = f"after the last test: {end}. End of the output:\n{ranks.last_output()}"
            self.outcomes[tests[-1]] = Outcome("failed", text)


def merge(found):
    """One outcome from those of all ranks."""
    kinds = {outcome.kind for outcome in found}
    if len(kinds) == 1 and kinds != {"failed"}:
        return found[0]
    return Outcome(
        "failed",
        "\n".join(
            f"--- rank {rank} of {len(found)}: {outcome.kind} ---\n{outcome.text}"
            for rank, outcome in enumerate(found)
            if outcome.kind != "passed"
        ),
    )

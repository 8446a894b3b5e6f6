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
GRACE_S = 20.0  # how long a rank waits for the others' outcomes of a test that it failed
TAIL_LINES = 40

# Open MPI refuses more ranks than cores, and root, unless told otherwise. MPICH does not look at these.
OF_LAUNCHERS = {"RANK", "WORLD_SIZE", "LOCAL_RANK"}  # which init_distributed() has set here, perhaps
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


class OutcomeFile:
    """One rank's outcomes, a JSON line a test. The ranks read each other's to stay together without using MPI."""

    def __init__(self, folder):
        self.folder = folder
        self.rank, self.size = mpi_rank_and_size()
        self.path = folder / f"{self.rank}.jsonl"
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
        while True:
            others = [read_outcomes(self.folder / f"{rank}.jsonl") for rank in range(self.size)]
            if all(len(other) >= self.count for other in others):
                return all(list(other.values())[self.count - 1].kind != "failed" for other in others)
            if deadline is not None and time.monotonic() > deadline:
                return False
            time.sleep(0.01)


def read_outcomes(path):
    """{test: Outcome} in the order finished; a line that is being written is left out."""
    if not path.exists():
        return {}
    lines = path.read_text().split("\n")[:-1]
    return {entry["test"]: Outcome(entry["kind"], entry["text"]) for entry in map(json.loads, lines)}


class Launcher:
    """The launches of one (file, n)."""

    def __init__(self, n, config):
        self.n = n
        self.config = config
        self.tests = []  # node ids, in order
        self.outcomes = {}
        self.failed_launches = 0
        self.lost_launches = 0

    def outcome(self, test):
        """The merged outcome of a test; launches the ranks when it has not run yet."""
        if test not in self.outcomes:
            if self.failed_launches >= MAX_FAILED_LAUNCHES or self.lost_launches >= MAX_LOST_LAUNCHES:
                reason = f"{self.failed_launches} launches of {self.n} ranks for this file failed before"
                self.outcomes[test] = Outcome("failed", f"not run: {reason}")
            else:
                self.launch(self.tests[self.tests.index(test) :])
        return self.outcomes[test]

    def launch(self, tests):
        """Runs tests until all are done or one has failed; at least the first has an outcome afterwards."""
        timeout = self.config.getoption("--ranks-timeout")
        with tempfile.TemporaryDirectory(prefix="zc-ranks-") as name, tempfile.TemporaryFile("w+") as output:
            folder = Path(name)
            end = self.run(tests, folder, output, timeout)
            ranks = [read_outcomes(folder / f"{rank}.jsonl") for rank in range(self.n)]
            output.seek(0)
            tail = "\n".join(output.read().splitlines()[-TAIL_LINES:])
        for test in tests:
            found = [rank.get(test) for rank in ranks]
            if None not in found:
                self.outcomes[test] = merge(found)
                if self.outcomes[test].kind != "failed":
                    continue
            else:
                parts = [
                    f"--- rank {rank} of {self.n} ---\n{outcome.text}"
                    for rank, outcome in enumerate(found)
                    if outcome and outcome.kind == "failed"
                ]
                waiting = ", ".join(str(rank) for rank, outcome in enumerate(found) if outcome is None)
                parts.append(f"rank {waiting} of {self.n} did not finish this test: {end}. End of the output:\n{tail}")
                self.outcomes[test] = Outcome("failed", "\n".join(parts))
                self.lost_launches += 1
            self.failed_launches += 1
            return
        if end != "exit code 0":  # all tests passed, and then the job failed: say so in the last one
            self.outcomes[tests[-1]] = Outcome("failed", f"after the last test: {end}. End of the output:\n{tail}")

    def run(self, tests, folder, output, timeout):
        """One mpirun. Returns how it ended, in words."""
        rootdir = str(self.config.rootpath)
        selection = folder / "tests"  # a file, since thousands of names do not fit a command line
        selection.write_text("\n".join(tests))
        command = ["-m", "pytest", "-m", "", "-p", "no:cacheprovider", f"--rootdir={rootdir}", f"@{selection}"]
        job = start_ranks(self.n, command, output, {"ZC_TEST_RANKS_DIR": str(folder)}, cwd=rootdir)
        try:
            progress, since = -1, time.monotonic()
            while (code := job.poll()) is None:
                size = sum(path.stat().st_size for path in folder.iterdir())
                if size != progress:
                    progress, since = size, time.monotonic()
                elif time.monotonic() - since > timeout:
                    return f"no test finished within {timeout:g} s, the ranks were killed"
                time.sleep(0.02)
            return f"exit code {code}"
        finally:
            kill_ranks(job)


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

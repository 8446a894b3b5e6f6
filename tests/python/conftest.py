"""Tests on several ranks: `@pytest.mark.ranks(n)`.

Multi-rank tests with equal n run in one `mpirun -n n python -m pytest FILE::TEST ...`, since importing torch on every
rank takes seconds. This session (the parent) shows each of them as an item of its own and maps the ranks' outcomes
back; no fixture of such a test is set up here. The ranks (the workers) load this same file, write down each outcome,
and go on to the next test together; after the tests of a file they wait until the parent has come to the next file.
rank_launch.py holds the launch, docs/testing.md the rules.
"""

import collections
import os
from pathlib import Path

import pytest
import simulated_cuda
from rank_launch import TESTS, Launcher, WorkerOutcomes, run_ranks, wait_until_told

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores, and bits depend on the number of threads

if simulated_cuda.is_on():
    simulated_cuda.install()

RANKS = pytest.StashKey()
RANKS_DIR = os.environ.get("ZC_TEST_RANKS_DIR")  # set in workers: where each rank writes its outcomes


def pytest_addoption(parser):
    parser.addoption(
        "--ranks-timeout",
        type=float,
        default=180.0,
        metavar="SECONDS",
        help="kill the ranks of a multi-rank launch that finish no test for this long",
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "ranks(*n): run the test on n ranks; several n, one run each")
    if RANKS_DIR:
        config.pluginmanager.register(Worker(Path(RANKS_DIR)))


def pytest_generate_tests(metafunc):
    """A test with several n runs once for each; `world_size` says which."""
    sizes = sorted({n for mark in metafunc.definition.iter_markers("ranks") for n in mark.args})
    if len(sizes) > 1:
        if "world_size" not in metafunc.fixturenames:
            metafunc.fixturenames.append("world_size")
        metafunc.parametrize("world_size", sizes, ids=[f"{n}ranks" for n in sizes])


@pytest.fixture
def world_size(request):
    """The number of ranks the test runs on."""
    return ranks_of(request.node)


@pytest.fixture
def one_thread():
    """One torch thread, since some of torch's bits depend on their number."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def folder(tmp_path):
    """A folder that all ranks of the test share."""
    from zerocore import _comm

    comm = _comm.world()
    path = comm.gather_bytes(str(tmp_path).ljust(512).encode(), "test folder")[0].decode().strip()
    yield Path(path)
    comm.barrier("test folder").wait()


@pytest.fixture
def mpirun(request):
    """`mpirun(n, *command, timeout=120, **env)`: runs a job of its own, for tests in which ranks fail or end early.

    The command follows `python`. Returns subprocess.CompletedProcess with stdout and stderr together in stdout; a job
    that takes longer than the timeout is killed and fails the test.
    """
    return run_ranks


def ranks_of(item):
    callspec = getattr(item, "callspec", None)
    if callspec and "world_size" in callspec.params:
        return callspec.params["world_size"]
    mark = item.get_closest_marker("ranks")
    return mark.args[0] if mark else 1


@pytest.hookimpl(trylast=True)  # after -k and -m have selected
def pytest_collection_modifyitems(config, items):
    if RANKS_DIR:
        order = {test: at for at, test in enumerate((Path(RANKS_DIR) / TESTS).read_text().split("\n"))}
        items.sort(key=lambda item: order[item.nodeid])
        return
    launchers = {}
    for i, item in enumerate(items):
        n = ranks_of(item)
        if n > 1:
            launcher = launchers.setdefault((n, item.path), Launcher(n, config, config.stash.setdefault(RANKS, {})))
            launcher.tests.append(item.nodeid)
            items[i] = RanksItem.from_parent(item.parent, name=item.name, original=item, launcher=launcher)
    later = collections.defaultdict(list)  # by n
    for (n, _), launcher in reversed(launchers.items()):
        launcher.after = list(later[n])
        later[n] = launcher.tests + later[n]


def pytest_unconfigure(config):
    for ranks in config.stash.get(RANKS, {}).values():
        ranks.close()


class RanksItem(pytest.Item):
    """Stands in the parent session for a test that runs on several ranks."""

    def __init__(self, *, original, launcher, **kwargs):
        super().__init__(**kwargs)
        self.launcher = launcher
        self.reported_as = original.reportinfo()

    def reportinfo(self):
        return self.reported_as

    def runtest(self):
        outcome = self.launcher.outcome(self.nodeid)
        if outcome.kind == "skipped":
            pytest.skip(outcome.text)
        if outcome.kind != "passed":
            pytest.fail(outcome.text, pytrace=False)


class Worker:
    """Writes this rank's outcomes down and keeps the ranks together between tests."""

    def __init__(self, folder):
        self.folder = folder
        self.outcomes = WorkerOutcomes(folder)

    def pytest_runtest_logreport(self, report):
        self.outcomes.add_phase(report)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        result = yield
        if not self.outcomes.finish_test(item.nodeid):
            # A rank failed: the ranks may have left the test at different points, so the next test needs new ones.
            item.session.shouldstop = "a rank failed; the parent starts the remaining tests anew"
        elif nextitem is not None and not wait_until_told(self.folder, self.outcomes.count):
            item.session.shouldstop = "the parent needs no more tests"
        return result

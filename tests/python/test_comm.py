"""The world communicator over real MPI and over shared memory: the conformance that tests/cpp/comm asks of backends."""

import array
import ctypes
import functools
import os
import random
import subprocess
import sys

import pytest
from zerocore import _comm, _core
from zerocore._launch import find_launch, rank_of
from zerocore.errors import ConfigError, Error

BF16_ONE, BF16_SMALL = 0x3F80, 0x3A80  # 1 and 2^-10
LAUNCH_VARIABLES = ("PMI", "PMIX", "OMPI", "MPI_", "MV2", "HYDRA", "RANK", "WORLD_SIZE", "LOCAL_RANK")


@functools.cache
def mpi_world():
    """Beside the job's communicator, which shares memory here."""
    from mpi4py import MPI

    plugin = _comm._plugin_path(MPI.Get_library_version())
    return _core.mpi_communicator(plugin=str(plugin), fortran_handle=MPI.COMM_WORLD.Dup().py2f(), timeout_ms=60_000)


@pytest.fixture(params=["shm", "mpi"])
def comm(request):
    world = _comm.world(timeout_ms=60_000)
    return world if request.param == "shm" else mpi_world()


def view(values, dtype):
    address, numel = values.buffer_info()
    return _core.BufferView(address, numel, dtype)


@pytest.mark.ranks(2, 4)
def test_place(comm, world_size, request):
    assert (comm.backend, comm.size) == (request.node.callspec.params["comm"], world_size)
    assert comm.gather_bytes(bytes([comm.rank]), "ranks") == [bytes([r]) for r in range(world_size)]
    assert comm.all_reduce([_comm.local_rank()], _core.ReduceOp.sum, "local ranks") == [sum(range(world_size))]
    assert (_comm.world() is comm) == (comm.backend == "shm")


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("numel", [0, 1, 1023, 700_001])  # the last one takes several messages
def test_reduce_scatter_add_sums_slices(comm, numel):
    bucket = array.array("f", [i % 997 + 1000 * comm.rank for i in range(comm.size * numel)])
    before = bucket[:]
    shard = array.array("f", [0.5] * numel)
    comm.reduce_scatter_add(view(bucket, _core.DType.fp32), view(shard, _core.DType.fp32), "sum").wait()
    ranks = 1000 * sum(range(comm.size)) + 0.5
    assert shard == array.array("f", [comm.size * ((comm.rank * numel + i) % 997) + ranks for i in range(numel)])
    assert bucket == before


@pytest.mark.ranks(2, 4)
def test_reduce_scatter_add_folds_in_rank_order(comm):
    term, total = [1.0, 1e8, -1e8, 3.0][comm.rank], {2: 1e8, 4: 3.0}[comm.size]  # in fp32, 1e8 + 1 is 1e8
    bucket, shard = array.array("f", [term] * 5 * comm.size), array.array("f", [0.0] * 5)
    comm.reduce_scatter_add(view(bucket, _core.DType.fp32), view(shard, _core.DType.fp32), "order").wait()
    assert list(shard) == [total] * 5


@pytest.mark.ranks(2)
def test_reduce_scatter_add_sums_bf16_in_fp32(comm):
    bucket, shard = array.array("H", [[BF16_ONE, BF16_SMALL][comm.rank]] * 6), array.array("f", [0.0] * 3)
    comm.reduce_scatter_add(view(bucket, _core.DType.bf16), view(shard, _core.DType.fp32), "bf16").wait()
    assert list(shard) == [1 + 2**-10] * 3


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("numel", [1, 333, 20_000_003])  # the last one takes several messages
def test_all_gather_and_broadcast(comm, numel):
    full = array.array("B", bytes(numel * comm.size))
    full[comm.rank * numel : (comm.rank + 1) * numel] = array.array("B", bytes([comm.rank + 1]) * numel)
    comm.all_gather(view(full, _core.DType.uint8), "gather").wait()
    assert all(full[r * numel : (r + 1) * numel].tobytes() == bytes([r + 1]) * numel for r in range(comm.size))
    for root in (0, comm.size - 1):
        data = array.array("B", bytes([comm.rank + 1]) * numel)
        comm.broadcast(view(data, _core.DType.uint8), root, "broadcast").wait()
        assert data.tobytes() == bytes([root + 1]) * numel


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("numel", [1, 333, 20_000_003])
def test_all_gather_takes_a_shard_from_elsewhere(comm, numel):
    shard = array.array("B", bytes([comm.rank + 1])) * numel
    full = array.array("B", bytes(numel * comm.size))
    before = comm.counters()["all_gather"]["elements"]
    comm.all_gather(view(shard, _core.DType.uint8), view(full, _core.DType.uint8), "gather").wait()
    assert all(full[r * numel : (r + 1) * numel].tobytes() == bytes([r + 1]) * numel for r in range(comm.size))
    assert comm.counters()["all_gather"]["elements"] - before == numel * comm.size


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("numel", [1, 128, 129, 200_000])  # the first two travel with the header
def test_all_reduce_is_exact(comm, numel):
    large = 1 << 60  # a double would lose the low bits
    ranks = range(comm.size)
    sums = comm.all_reduce([large + i * comm.rank for i in range(numel)], _core.ReduceOp.sum, "sum")
    assert sums == [large * comm.size + i * sum(ranks) for i in range(numel)]
    assert comm.all_reduce([-large + comm.rank] * numel, _core.ReduceOp.max, "max") == [-large + ranks[-1]] * numel
    assert comm.all_reduce([1 << comm.rank] * numel, _core.ReduceOp.bit_or, "or") == [(1 << comm.size) - 1] * numel


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("length", [0, 3, 1024, 1025, 100_000])
def test_gather_bytes(comm, length):
    assert comm.gather_bytes(bytes([65 + comm.rank]) * length, "gather") == [
        bytes([65 + rank]) * length for rank in range(comm.size)
    ]


@pytest.mark.ranks(4)
def test_split(comm):
    group = comm.split(comm.rank % 2, -comm.rank)
    assert (group.size, group.rank) == (2, 1 - comm.rank // 2)
    members = [comm.rank % 2 + 2, comm.rank % 2]
    assert [int(b) for b in group.gather_bytes(b"%d" % comm.rank, "members")] == members
    nested = group.split(group.rank, 0)
    assert nested.all_reduce([comm.rank], _core.ReduceOp.sum, "alone") == [comm.rank]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("numel", [1, 2_000_003])
def test_two_groups_are_used_in_opposite_order(comm, numel):
    gathers, reductions = comm.split(0, comm.rank), comm.split(0, -comm.rank)
    full = array.array("f", [1 + comm.rank]) * (numel * comm.size)
    bucket, shard = array.array("f", [1 << comm.rank]) * (numel * comm.size), array.array("f", [0.5]) * numel

    def gather():
        return gathers.all_gather(view(full, _core.DType.fp32), "gather")

    def reduce():
        return reductions.reduce_scatter_add(view(bucket, _core.DType.fp32), view(shard, _core.DType.fp32), "reduce")

    calls = [gather] * 3 + [reduce] * 3
    for work in [call() for call in (calls if comm.rank % 2 else reversed(calls))]:
        work.wait()
    assert all(full[r * numel] == full[(r + 1) * numel - 1] == 1 + r for r in range(comm.size))
    assert shard == array.array("f", [0.5 + 3 * ((1 << comm.size) - 1)]) * numel


@pytest.mark.ranks(2, 4)
def test_many_in_flight(comm):
    sizes = [1 + 97 * k for k in range(100)]
    buckets = [array.array("f", [k] * (n * comm.size)) for k, n in enumerate(sizes)]
    shards = [array.array("f", [1.0] * n) for n in sizes]
    before = comm.counters()["reduce_scatter_add"]
    works = [
        comm.reduce_scatter_add(view(bucket, _core.DType.fp32), view(shard, _core.DType.fp32), f"bucket {k}")
        for k, (bucket, shard) in enumerate(zip(buckets, shards, strict=True))
    ]
    for work in reversed(works):
        work.wait()
    assert all(list(shard) == [1.0 + k * comm.size] * len(shard) for k, shard in enumerate(shards))
    after = comm.counters()["reduce_scatter_add"]
    assert after["calls"] - before["calls"] == 100
    assert after["elements"] - before["elements"] == sum(sizes) * comm.size


@pytest.mark.ranks(2)
def test_wrong_arguments_are_errors_of_the_package(comm):
    three = array.array("f", [0.0] * 3)
    with pytest.raises(Error, match=r"all_gather: buffer length: got 3 elements, expected a multiple of the 2 ranks"):
        comm.all_gather(view(three, _core.DType.fp32), "gather")
    with pytest.raises(ConfigError, match=r"broadcast: root: got rank 7, expected 0 to 1"):
        comm.broadcast(view(three, _core.DType.fp32), 7, "broadcast")


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_backends_give_the_same_bits_from_memory_that_peers_read(dtype):
    kind, numel, results = getattr(_core.DType, dtype), 100_003, []
    for world in (_comm.world(), mpi_world()):
        comm = world.split(0, world.rank)  # which has not staged anything
        size = 4 if dtype == "fp32" else 2
        memory = [comm.allocate(n) for n in (comm.size * numel * size, numel * 4, comm.size * numel * 4)]
        bucket, shard, full = ((ctypes.c_char * len(memoryview(each))).from_buffer(each) for each in memory)
        mask = int.from_bytes(b"\xff\xbf" * (len(bucket) // 2), "little")
        bits = random.Random(comm.rank).getrandbits(8 * len(bucket))  # many magnitudes; no inf, no NaN
        bucket.raw = (bits & mask).to_bytes(len(bucket), "little")
        parts = [_core.BufferView(ctypes.addressof(bucket), comm.size * numel, kind)]
        parts += [_core.BufferView(ctypes.addressof(each), len(each) // 4, _core.DType.fp32) for each in (shard, full)]
        comm.reduce_scatter_add(parts[0], parts[1], "sum").wait()
        comm.all_gather(parts[1], parts[2], "gather").wait()
        assert (comm.staging_bytes() == 0) == (comm.backend == "shm")
        results.append(full.raw)
    assert results[0] == results[1]


# How the process was started


def python(script, **variables):
    """Runs a script as a process of its own, without the variables of any launcher but the given ones."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCH_VARIABLES)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env | variables, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_a_plain_process_is_one_rank_without_mpi():
    code, output = python(
        "import sys; from zerocore import _comm; comm = _comm.world()\n"
        "print(comm.backend, comm.size, _comm.local_rank())\n"
        "print('mpi4py' in sys.modules)"
    )
    assert (code, output) == (0, "self 1 0\nFalse\n")


def test_a_job_of_one_rank_needs_no_mpi():
    code, output = python(
        "import sys; from zerocore import _comm; print(_comm.world().backend, 'mpi4py' in sys.modules)",
        PMI_RANK="0",
        PMI_SIZE="1",
    )
    assert (code, output) == (0, "self False\n")


@pytest.mark.parametrize(
    ("env", "launcher", "size", "local_rank"),
    [
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}, "an mpirun of the MPICH family", 4, 1),
        (
            {
                "PMIX_RANK": "1",
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            },
            "Open MPI's mpirun",
            2,
            0,
        ),
        ({"PMIX_RANK": "5"}, "a PMIx launcher (srun --mpi=pmix)", None, None),
    ],
)
def test_launchers_are_told_apart(env, launcher, size, local_rank):
    launch = find_launch(env)
    assert (launch.launcher, launch.size, launch.local_rank) == (launcher, size, local_rank)


def test_a_launcher_without_mpi_is_refused():
    assert find_launch({"RANK": "0", "WORLD_SIZE": "1"}) is None
    with pytest.raises(
        ConfigError,
        match=r"got WORLD_SIZE=4 and no MPI rank from torchrun or the like, .* `zerocore --num-ranks 4 script.py`",
    ):
        find_launch({"RANK": "0", "WORLD_SIZE": "4"})


def test_slurm_without_mpi():
    batch_script = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    assert find_launch(batch_script) is None
    assert rank_of(batch_script) == 0
    task = {**batch_script, "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}
    with pytest.raises(
        ConfigError, match=r"SLURM_STEP_NUM_TASKS=4 and no MPI rank from srun, .* `srun --mpi=pmix python"
    ):
        find_launch(task)
    assert rank_of(task) == 3
    under_pmix = {**task, "PMIX_RANK": "2"}
    assert find_launch(under_pmix).launcher == "a PMIx launcher (srun --mpi=pmix)"
    assert rank_of(under_pmix) == 2
    assert rank_of({"RANK": "1", "WORLD_SIZE": "2"}) == 1


def test_launcher_and_library_of_different_families():
    """The classic N jobs of one rank: the library does not know this launcher and sees a single process."""
    script = (
        "import os; from mpi4py import MPI; from zerocore import _comm;"
        "os.environ.update(OMPI_COMM_WORLD_RANK='0', OMPI_COMM_WORLD_SIZE='2'); _comm.world()"
    )
    code, output = python(script)
    assert code == 1
    assert (
        "ConfigError: [comm] the launcher and the MPI library do not belong together: got 2 ranks from Open MPI's"
        in output
    )
    assert "which mpi4py loaded, sees 1. Start the job with" in output


def test_a_library_without_a_plugin():
    with pytest.raises(ConfigError, match=r"was not built for the MPI library that runs: got HPE MPI 2\.2, built for"):
        _comm._plugin_path("HPE MPI 2.2")


def test_missing_mpi4py():
    script = "import sys; sys.modules['mpi4py'] = None; from zerocore import _comm; _comm.world()"
    code, output = python(script, PMI_RANK="0", PMI_SIZE="2")
    assert code == 1
    assert "[comm] a job of several ranks needs mpi4py: an mpirun of the MPICH family started this process" in output
    assert "pip install 'zerocore[mpi]'" in output


def test_a_backend_that_cannot_be_had(mpirun):
    script = "from zerocore import _comm; print(_comm.world(backend={}).backend)"
    for backend, variables, expected in [
        ("'auto'", {}, "shm"),
        ("'mpi'", {}, "mpi"),
        ("'auto'", {"ZC_COMM_BACKEND": "mpi"}, "mpi"),
        ("'shm'", {"ZC_COMM_BACKEND": "mpi"}, "shm"),
    ]:
        done = mpirun(2, "-c", script.format(backend), **variables)
        assert done.returncode == 0, done.stdout
        assert "".join(done.stdout.split()) == 2 * expected  # lines of two ranks may mix
    done = mpirun(2, "-c", script.format("'auto'"), ZC_COMM_BACKEND="fast")
    assert "ConfigError: [comm] ZC_COMM_BACKEND: got 'fast', expected auto, shm, mpi." in done.stdout
    done = mpirun(
        2,
        "-c",
        "import os; "
        + script.format("['shm', 'mpi'][int(os.environ.get('PMI_RANK') or os.environ['OMPI_COMM_WORLD_RANK'])]"),
    )
    assert "ConfigError: [comm] ranks want different comm.backend: got both 'shm' and 'mpi'" in done.stdout
    late = "from zerocore import _comm; _comm.world(); _comm.world(backend='mpi')"
    assert "[comm] comm.backend comes too late: got 'mpi', but the ranks are connected by 'shm'" in (
        mpirun(2, "-c", late).stdout
    )

"""What ranks may do differently, and what becomes of it, as three lists: docs/errors.md has them for users.

1. It has a right meaning: the bits are those of one rank that goes through all micro-batches in their order.
2. It is an error in stage 3 only, named.
3. It is always an error, named on all other ranks within 5 s of their next collective.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
import zerocore
from one_weight import config, one_weight, train
from torch import nn
from zerocore import _comm, _core
from zerocore.errors import ConfigError

SECONDS = 5.0  # from the next collective to its error
STEPS = 3


def rank():
    return _comm.world().rank


# --- 1. A right meaning, with the same bits


class Branches(nn.Module):
    """Two branches and a head; `how` says what a micro-batch does with them. Each case is one method of `how`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(40, 40), nn.Linear(40, 40)
        self.head = nn.Linear(40, 40)
        self.never = nn.Linear(40, 7)

    def forward(self, x, how):
        return getattr(self, how)(x).square().mean()

    def left_first(self, x):
        left = self.left(x)
        right = self.right(x)
        return self.head(left + right)

    def right_first(self, x):  # autograd goes back in the order of creation: gradients come in another order
        right = self.right(x)
        left = self.left(x)
        return self.head(left + right)

    def data_dependent(self, x):
        return self.head(self.left(x) if x.sum() > 0 else self.right(x))

    def head_once(self, x):
        return self.head(self.left(x))

    def head_thrice(self, x):
        return self.head(self.head(self.head(self.left(x)))) + self.right(x)

    def left_only(self, x):
        return self.left(x)

    def nothing_but_the_head(self, x):
        return self.head(x)


CASES = {
    "gradients ready in another order by rank": ("left_first", "right_first", "left_first"),
    "data-dependent branches": ("data_dependent",) * 3,
    "a head called thrice here and once there": ("head_thrice", "head_once", "head_thrice"),
    "parameters unused on some ranks": ("left_only", "nothing_but_the_head", "left_first"),
}


def settings(stage):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "gradient_clipping": 0.05,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 2000},
    }


def micro_batch(step, r):
    return torch.randn(2, 40, generator=torch.Generator().manual_seed(10 * step + r))


def of_one_rank(steps):
    """The parameters after steps of (micro-batch, how) on one rank."""
    engine = zerocore.Engine(Branches(), settings(0), comm=_core.self_communicator(timeout_ms=60_000))
    for micro_batches in steps:
        for i, (x, how) in enumerate(micro_batches):
            engine.set_gradient_accumulation_boundary(i == len(micro_batches) - 1)
            engine.backward(engine(x, how))
            engine.step()
    return list(engine.module.parameters())


def equal(got, expected):
    return all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("case", CASES)
def test_it_has_a_right_meaning(case, stage, world_size):
    hows = CASES[case]
    engine = zerocore.Engine(Branches(), settings(stage))
    for step in range(STEPS):
        engine.backward(engine(micro_batch(step, rank()), hows[rank()]))
        engine.step()
    ranks = range(world_size)
    expected = of_one_rank([[(micro_batch(step, r), hows[r]) for r in ranks] for step in range(STEPS)])
    assert equal(engine.module.parameters(), expected)
    untouched = Branches()
    assert equal(engine.module.never.parameters(), untouched.never.parameters())


@pytest.mark.usefixtures("one_thread")
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_uneven_batches_through_join_have_a_right_meaning(stage, world_size):
    counts = (1, 4, 2)[:world_size]
    engine = zerocore.Engine(Branches(), settings(stage))
    with engine.join():
        for step in range(counts[rank()]):
            engine.backward(engine(micro_batch(step, rank()), "left_first"))
            engine.step()
    steps = [[(micro_batch(s, r), "left_first") for r in range(world_size) if s < counts[r]] for s in range(4)]
    assert equal(engine.module.parameters(), of_one_rank(steps))
    assert engine.global_steps == 4


# --- Jobs whose ranks fail


# Takes mpirun's eyes off a rank, as the launcher's shim does: it outlives the script until all scripts have ended. One
# that is still there 3 s after all others is killed.
SHIM = """
import os, subprocess, sys, time
rank = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
size = int(os.environ.get("PMI_SIZE") or os.environ["OMPI_COMM_WORLD_SIZE"])
end = lambda r: f"{sys.argv[2]}/{r}.end"
with open(f"{sys.argv[2]}/{rank}.out", "wb") as output:
    child = subprocess.Popen([sys.executable, sys.argv[1]], stdout=output, stderr=output, close_fds=False)
alone_since = None
while True:
    code = child.poll()
    if code is not None and not os.path.exists(end(rank)):
        open(end(rank), "w").write(str(code))
    if all(os.path.exists(end(r)) for r in range(size) if str(r) != rank):
        if code is not None:
            os._exit(0)
        alone_since = alone_since or time.monotonic()
        if time.monotonic() > alone_since + 3:
            child.kill()
    time.sleep(0.02)
"""

START = """
import ctypes, os, signal, sys, threading, time
import zerocore
from zerocore import _comm, _core
from zerocore.errors import CommError
rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])

def crash():
    threading.Thread(target=ctypes.string_at, args=(0,)).start()
    time.sleep(60)

def train(steps):
    for _ in range(steps):
        before_step()
        start = time.monotonic()
        try:
            step()
        except CommError as error:
            print(f"{time.monotonic() - start:.2f} s: {error}")
            raise
"""

ENGINE = """
import torch
from zerocore.config import CommConfig, OptimizerConfig, ZeroConfig

def make_engine():
    global engine
    config = zerocore.Config(
        micro_batch_size=1, optimizer=OptimizerConfig(type="sgd"), comm=CommConfig(timeout_ms=TIMEOUT_MS)
    )
    engine = zerocore.Engine(torch.nn.Linear(4, 4), config)

def before_step():
    engine.backward(engine(torch.ones(1, 4)).sum())

def step():
    engine.step()
"""

# What an engine does as far as the guard sees it, in a tenth of the time: torch is not imported.
COLLECTIVES = """
def make_engine():
    global comm, steps_made
    comm, steps_made = _comm.world(timeout_ms=TIMEOUT_MS), 0

def before_step():
    comm.set_activity(f"step {steps_made}")

def step():
    global steps_made
    comm.all_reduce([1], _core.ReduceOp.sum, "reduce bucket 0 (bias and others)")
    steps_made += 1
"""


@dataclass
class Rank:
    code: int
    text: str

    @property
    def seconds(self):
        """How long its failed step took."""
        found = re.search(r"^([0-9.]+) s: ", self.text, re.M)
        assert found, self.text
        return float(found[1])


@pytest.fixture
def job(mpirun, tmp_path):
    """job(n, script, engine=True, timeout_ms=...): what became of each rank of the script, after START and ENGINE."""

    def run(n, script, *, engine=True, timeout_ms=600_000):
        path = tmp_path / "train.py"
        path.write_text(f"TIMEOUT_MS = {timeout_ms}" + START + (ENGINE if engine else COLLECTIVES) + script)
        run.lines = path.read_text().splitlines()
        mpirun(n, "-c", SHIM, str(path), str(tmp_path), timeout=90, OMP_NUM_THREADS="1")
        return [
            Rank(int((tmp_path / f"{r}.end").read_text()), (tmp_path / f"{r}.out").read_text().replace("\n", " \n"))
            for r in range(n)
        ]

    run.line = lambda text: next(i for i, line in enumerate(run.lines, 1) if line.strip() == text)
    return run


# --- 2. An error in stage 3 only

BRANCH = """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, x):
        return (self.left if rank == 0 else self.right)(x).sum()

zero = ZeroConfig(stage=STAGE, persistent_param_numel=0, unit_numel=1)
engine = zerocore.Engine(
    Model(), zerocore.Config(micro_batch_size=1, optimizer=OptimizerConfig(type="sgd"), zero=zero)
)
for _ in range(2):
    engine.backward(engine(torch.ones(1, 64)))
    engine.step()
print("trained")
"""


def test_modules_run_on_some_ranks_only_are_an_error_in_stage_3(job):
    ranks = job(2, BRANCH.replace("STAGE", "3"))
    line = job.line("return (self.left if rank == 0 else self.right)(x).sum()")
    for r in ranks:
        assert r.code == 1
        assert "CommError: [comm] ranks are in different collectives: rank 0 is in step 0, gather bucket" in r.text
        assert "left.bias" in r.text and "right.bias" in r.text
        for each in (0, 1):
            assert re.search(rf"In Python: .*rank {each} at \S*train.py:{line} in forward", r.text)


def test_they_are_none_in_stage_2(job):
    for r in job(2, BRANCH.replace("STAGE", "2")):
        assert (r.code, r.text) == (0, "trained \n")


# --- 3. Always an error, named on all others

DEAD = "rank 1 has died (its process is gone: killed or crashed) while others need it: "
ENDED = "rank 1 has left (ended its script) while others need it: "
FAULTS = {
    "fewer steps": ("pass", ENDED, 1),
    "raising": ("raise ValueError('bad sample')", "rank 1 has left (raised ValueError: bad sample) while others ", 1),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", DEAD, -9),
    "sys.exit(0)": ("sys.exit(0)", ENDED, 1),
    "sys.exit(3)": ("sys.exit(3)", ENDED, 1),
    "os._exit(0)": ("os._exit(0)", DEAD, 0),
    "os._exit(3)": ("os._exit(3)", DEAD, 3),
    "a crash": ("crash()", DEAD, -11),
    "SIGKILL with a forked worker that lives on": (
        "os.fork() or (time.sleep(15), os._exit(0)); os.kill(os.getpid(), signal.SIGKILL)",
        DEAD,
        -9,
    ),
}
AFTER_TWO_STEPS = """
make_engine()
train(2)
if rank == 1:
    FAULT
else:
    train(3)
"""


@pytest.mark.parametrize("fault", FAULTS)
def test_it_is_named_on_all_others(job, fault):
    action, expected, code = FAULTS[fault]
    ranks = job(3, AFTER_TWO_STEPS.replace("FAULT", action), engine=fault in ("fewer steps", "raising", "SIGKILL"))
    assert ranks.pop(1).code == code
    for own, r in zip((0, 2), ranks, strict=True):
        assert r.code == 1
        assert r.seconds < SECONDS
        assert f"CommError: [comm] {expected}" in r.text
        assert f"rank {own} is in step 2, reduce bucket 0 (bias and others) (this rank)" in r.text
        assert "Look at the output of rank 1 first." in r.text
        assert re.search(rf"In Python: .*rank {own} at \S*train.py:\d+ in step \(this rank\)", r.text), r.text
        if fault == "raising":
            assert re.search(rf"rank 1 at \S*train.py:{job.line(action)}[;.]", r.text), r.text


def test_rank_0_may_be_the_one_that_dies(job):
    script = AFTER_TWO_STEPS.replace("rank == 1", "rank == 0").replace("FAULT", FAULTS["SIGKILL"][0])
    for r in job(3, script, engine=False)[1:]:
        assert r.seconds < SECONDS
        assert f"CommError: [comm] {DEAD.replace('rank 1', 'rank 0')}" in r.text


def test_a_rank_that_dies_while_the_others_compute(job):
    script = """
make_engine()
train(1)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(2)
train(1)
"""
    for r in (ranks := job(3, script, engine=False))[::2]:
        assert r.seconds < SECONDS, ranks
        assert f"CommError: [comm] {DEAD}" in r.text


def test_a_stopped_rank_is_named_after_the_timeout(job):
    script = AFTER_TWO_STEPS.replace("FAULT", "os.kill(os.getpid(), signal.SIGSTOP)")
    ranks = job(3, script, timeout_ms=2000)
    assert ranks.pop(1).code == -9  # the shim's
    for r in ranks:
        assert 2 <= r.seconds < 2 + SECONDS
        timed_out = "[comm] timed out after 2 s in step 2, reduce bucket 0 (bias and others): rank 1 did not arrive."
        assert timed_out in r.text  # also where the other was first and told
        assert "rank 1 has not arrived (it was last in step 1, " in r.text


def test_a_checkpoint_on_rank_0_only_is_named(job, tmp_path):
    script = AFTER_TWO_STEPS.replace("rank == 1", "rank == 0")
    save = f"engine.save_checkpoint({str(tmp_path / 'run')!r})"
    ranks = job(3, script.replace("FAULT", save))
    for r in ranks[1:]:
        assert r.seconds < SECONDS
        assert "CommError: [comm] ranks are in different collectives: rank 0 is in step 2, save_checkpoint [" in r.text
        assert re.search(rf"rank 0 at \S*train.py:{job.line(save)}[;. ]", r.text)
    assert not (tmp_path / "run").exists()


def test_one_more_call_on_one_rank_is_named(job):
    ranks = job(3, AFTER_TWO_STEPS.replace("FAULT", "engine.load_state_dict(engine.module.state_dict())"))
    for r in ranks:
        assert "CommError: [comm] ranks are in different collectives: rank 0 is in step 2, reduce bucket 0" in r.text
        assert "rank 1 is in step 2, load parameter weight [broadcast" in r.text
    assert all(r.seconds < SECONDS for r in ranks[::2])


def test_a_mean_on_one_rank_is_named_after_the_timeout(job):
    """It has a communicator of its own, since ranks may take it at other points of their reductions."""
    script = AFTER_TWO_STEPS.replace("FAULT", "engine.all_reduce_mean(1.0)")
    ranks = job(3, script, timeout_ms=2000)
    # Its own wait ends first, or that of the others for it.
    assert re.search(
        r"CommError: \[comm\] (timed out after 2 s in step 2, mean over ranks: rank 0, rank 2 did not arrive"
        r"|rank [02] (has failed|reports a failure) "
        r"\(\[comm\] timed out after 2 s in step 2, reduce bucket 0 .*: rank 1 did not arrive)",
        ranks[1].text,
    )
    assert "mean over ranks" in ranks[1].text
    for r in ranks[::2]:
        assert r.seconds < 2 + SECONDS
        assert "CommError: [comm]" in r.text and "rank 1" in r.text


@pytest.mark.ranks(2)
def test_ranks_with_different_configs():
    with pytest.raises(
        ConfigError,
        match=r"ranks differ in config or model: rank 0 has config gradient_clipping = 0.0; "
        r"rank 1 has config gradient_clipping = 1.0",
    ):
        zerocore.Engine(one_weight(8.0), config(gradient_clipping=float(rank())))


@pytest.mark.ranks(2)
def test_ranks_with_different_models():
    with pytest.raises(
        ConfigError,
        match=r"rank 0 has parameter weight: \(1, 3\) .*; rank 1 has parameter weight: \(1, 4\)",
    ):
        zerocore.Engine(torch.nn.Linear(3 + rank(), 1), config())


@pytest.mark.ranks(2)
def test_ranks_with_different_buffers_or_frozen_parameters():
    model = one_weight(1.0)
    model.register_buffer("table", torch.zeros(3 + rank()))
    with pytest.raises(
        ConfigError, match=r"rank 0 has buffer table: \(3,\) torch.float32; rank 1 has buffer table: \(4,\)"
    ):
        zerocore.Engine(model, config())
    model = torch.nn.ModuleList([one_weight(1.0), one_weight(1.0)])
    model[rank()].weight.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"rank 0 has parameter 0.weight: \(1, 1\) torch.float32 frozen, strides"):
        zerocore.Engine(model, config())


@pytest.mark.ranks(2)
def test_ranks_with_other_orders_of_elements():
    model = one_weight(1.0)
    model.weight = torch.nn.Parameter(torch.ones(2, 3) if rank() else torch.ones(3, 2).t())
    with pytest.raises(ConfigError, match=r"strides \(1, 2\); rank 1 has parameter weight: .* strides \(3, 1\)"):
        zerocore.Engine(model, config())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 2])
def test_a_learning_rate_or_a_write_on_one_rank_only(stage):
    engine = zerocore.Engine(one_weight(8.0), config(zero_optimization={"stage": stage}))
    train(engine, 1)
    engine.optimizer.param_groups[0]["lr"] = 0.5 + 0.1 * rank()
    with pytest.raises(ConfigError, match=r"\[engine\] ranks step with different settings"):
        train(engine, 1)
    engine = zerocore.Engine(one_weight(8.0), config(zero_optimization={"stage": stage}))
    if rank() == 1:
        torch.nn.init.zeros_(engine.module.weight)
    with pytest.raises(ConfigError, match="parameters written by hand on some rank"):
        train(engine, 1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_a_write_of_other_values_on_each_rank(stage, dtype):
    """Stage 3 keeps a parameter as small as this one whole on each rank."""
    engine = zerocore.Engine(one_weight(8.0), config(zero_optimization={"stage": stage}, **dtype))
    weight = engine.module.weight
    for value, expected in ((2.0, 1.5), (4.0, 3.5)):
        torch.nn.init.constant_(weight, value)
        engine.backward(engine(torch.ones(1, 1, dtype=weight.dtype)).sum())
        engine.step()
        assert weight.item() == expected
    torch.nn.init.constant_(weight, rank() + 1.0)
    engine.backward(engine(torch.ones(1, 1, dtype=weight.dtype)).sum())
    with pytest.raises(ConfigError, match=r"other learning rates, .* or parameters written by hand on some rank"):
        engine.step()

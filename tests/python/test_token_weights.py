"""backward(loss_sum, weight=tokens): the mean over all tokens, whoever has how many of them, with the same bits."""

from __future__ import annotations

import pytest
import torch
import zerocore
from one_weight import config, one_weight
from reference import Reference
from torch.nn import functional as F
from zerocore import _comm
from zerocore.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_thread")

HYPER = {"type": "adamw", "lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
LENGTHS = [[5, 0, 31, 2, 17, 1], [1, 1, 64, 3, 0, 7]]  # tokens of the micro-batches of each step
MAX_NORM = 0.05


def rank():
    return _comm.world().rank


class Tokens(torch.nn.Module):
    """A language model of sorts; returns the sum of the losses of its tokens."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(50, 33)
        self.head = torch.nn.Linear(33, 50)

    def forward(self, tokens):
        return F.cross_entropy(self.head(self.table(tokens)).float(), tokens.roll(1), reduction="sum")


def model():
    torch.manual_seed(3)
    return Tokens()


def tokens(step, j):
    return torch.randint(50, (LENGTHS[step][j],), generator=torch.Generator().manual_seed(100 * step + j))


def settings(stage, dtype="fp32", **changes):
    fp16 = {"enabled": dtype == "fp16", "loss_scale": 8.0}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": len(LENGTHS[0]),
        "optimizer": {"type": "AdamW", "params": {k: v for k, v in HYPER.items() if k != "type"}},
        "gradient_clipping": MAX_NORM,
        "fp16": fp16,
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000, "stage3_param_persistence_threshold": 0},
    } | changes


def reference(dtype=torch.float32, scale=1.0, weights=LENGTHS):
    plain = model()
    masters = [p.detach().clone() for p in plain.parameters()]
    plain.to(dtype)
    loop = Reference(plain, masters, hyper=HYPER, max_norm=MAX_NORM, scale=scale)
    for step, lengths in enumerate(LENGTHS):
        loop.step([lambda j=j, step=step: plain(tokens(step, j)) for j in range(len(lengths))], weights[step])
    return [p.detach() for p in plain.parameters()]


def check(engine, expected):
    with engine.unsharded():
        for i, (a, b) in enumerate(zip(engine.module.parameters(), expected, strict=True)):
            assert torch.equal(a, b), f"parameter {i} differs"


def steps(engine, weight=lambda length: length):
    """Every micro-batch goes to some rank, in some micro-step; a rank without one runs the last again."""
    for step, lengths in enumerate(LENGTHS):
        for k in range(engine.gradient_accumulation_steps()):
            j = min(k * engine.world_size + engine.rank, len(lengths) - 1)
            engine.backward(engine(tokens(step, j)), weight=weight(lengths[j]))
            engine.step()


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_the_bits_do_not_depend_on_how_micro_batches_are_split(dtype, world_size):
    of = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    expected = reference(of, scale=8.0 if dtype == "fp16" else 1.0)
    for stage in (0, 1, 2, 3):
        engine = zerocore.Engine(model(), settings(stage, dtype))
        steps(engine)
        check(engine, expected)


@pytest.mark.ranks(2)
def test_weights_are_added_up_exactly():
    """1e17 + 1 + 1 is not 1e17; nor does the order of micro-batches or ranks matter."""
    lengths = [1e17, 1.0, 1.0, 2.5, 0.0, 7.0]
    expected = reference(weights=[lengths, lengths])
    engine = zerocore.Engine(model(), settings(2))
    it = iter([lengths[k * 2 + rank()] for _ in LENGTHS for k in range(3)])
    steps(engine, lambda _: torch.tensor(next(it), dtype=torch.float64))
    check(engine, expected)


@pytest.mark.ranks(1, 2)
def test_it_is_the_gradient_of_one_big_batch(world_size):
    """All tokens of a step in one micro-batch, its loss their mean; to rounding."""
    engine = zerocore.Engine(model(), settings(2))
    steps(engine)
    big = model()
    optimizer = torch.optim.AdamW(big.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    for step, lengths in enumerate(LENGTHS):
        losses = torch.stack([big(tokens(step, j)) for j in range(len(lengths))])
        (losses.sum() / sum(lengths)).backward()
        torch.nn.utils.clip_grad_norm_(big.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    for p, q in zip(engine.module.parameters(), big.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(2)
def test_uneven_batches_weigh_what_there_was():
    expected = reference()
    engine = zerocore.Engine(model(), settings(2, train_batch_size=None))
    engine.set_gradient_accumulation_boundary(False)
    for step in range(2):
        count = 4 if rank() == 0 else 2  # 0 2 4 5 and 1 3, in turns of both ranks while both have some
        mine = {0: [0, 2, 4, 5], 1: [1, 3]}[rank()]
        with engine.join():
            for k in range(count):
                engine.set_gradient_accumulation_boundary(k == count - 1 and rank() == 0)
                engine.backward(engine(tokens(step, mine[k])), weight=LENGTHS[step][mine[k]])
                engine.step()
    check(engine, expected)


def test_a_read_gradient_is_the_mean_over_tokens():
    engine = zerocore.Engine(one_weight(), config())
    engine.backward(engine(torch.full((4, 1), 3.0)).sum(), weight=4)
    assert zerocore.utils.safe_get_full_grad(engine.module.weight).item() == 3.0
    engine.step()
    assert engine.module.weight.item() == 8.0 - 0.5 * 3.0
    assert engine.get_global_grad_norm() == 3.0


def test_two_losses_of_a_micro_batch_share_its_weight():
    engine = zerocore.Engine(one_weight(), config())
    engine.backward(engine(torch.full((4, 1), 3.0)).sum(), weight=4)
    engine.backward(engine(torch.full((4, 1), 1.0)).sum(), weight=0)
    engine.step()
    assert engine.module.weight.item() == 8.0 - 0.5 * 4.0


def test_what_backward_returns():
    engine = zerocore.Engine(one_weight(), config())
    assert engine.backward(engine(torch.full((4, 1), 3.0)).sum(), weight=4).item() == 24.0
    assert engine.backward(engine(torch.full((4, 1), 3.0)).sum() * 0, weight=0).item() == 0.0


def test_a_weight_and_a_loss_that_is_divided_already():
    engine = zerocore.Engine(one_weight(), config())
    with pytest.raises(ConfigError, match="got a weight and scale_wrt_gas=False"):
        engine.backward(engine(torch.ones(1, 1)).sum(), scale_wrt_gas=False, weight=1)


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), 10**400, "many", torch.ones(2)])
def test_no_weight(weight):
    engine = zerocore.Engine(one_weight(), config())
    with pytest.raises(ConfigError, match=r"\[engine\] backward: got weight=.*expected a finite number of 0 or more"):
        engine.backward(engine(torch.ones(1, 1)).sum(), weight=weight)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("who", ["one rank", "one micro-step"])
def test_a_weight_for_some_only(who):
    engine = zerocore.Engine(one_weight(), config(gradient_accumulation_steps=2))
    with pytest.raises(ConfigError, match="got a weight for some micro-batches of this step and none for others"):
        for k in range(2):
            weighted = rank() == 1 if who == "one rank" else k == 1
            engine.backward(engine(torch.ones(1, 1)).sum(), weight=1 if weighted else None)
            engine.step()
    with engine.unsharded():
        assert engine.module.weight.item() == 8.0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("who", ["one rank", "one micro-step"])
def test_gradients_of_loss_backward_have_no_weight(who):
    engine = zerocore.Engine(one_weight(), config(gradient_accumulation_steps=2))
    with pytest.raises(ConfigError, match="got a weight for some micro-batches of this step and none for others"):
        for k in range(2):
            loss = engine(torch.ones(1, 1)).sum()
            if rank() == 1 if who == "one rank" else k == 1:
                engine.backward(loss, weight=1)
            else:
                loss.backward()
            engine.step()


@pytest.mark.ranks(1, 2)
def test_a_loss_through_two_engines_has_its_weight_in_both(world_size):
    first, second = (zerocore.Engine(one_weight(2.0), config()) for _ in range(2))
    for _ in range(2):
        loss = second(first(torch.full((4, 1), 3.0))).sum()
        first.backward(loss, weight=4)
        first.step()
        second.step()
    assert first.get_global_grad_norm() == second.get_global_grad_norm()
    loss = second(torch.full((4, 1), 3.0)).sum()
    loss.backward()
    second.step()
    assert second.get_global_grad_norm() == 12.0


@pytest.mark.ranks(1, 2)
def test_all_losses_of_a_micro_batch_have_their_weights_in_the_engines_they_reach(world_size):
    """And a loss without a weight, after one that has one, is noticed in all of them."""
    trunk, head = (zerocore.Engine(one_weight(2.0), config()) for _ in range(2))
    for x, weight in ((1.0, 10), (2.0, 30)):
        head.backward(head(trunk(torch.full((weight, 1), x))).sum(), weight=weight)
    trunk.step()
    head.step()
    mean = 2 * (10 * 1.0 + 30 * 2.0) / 40  # of d(loss)/d(weight), through the other's weight of 2
    assert trunk.get_global_grad_norm() == head.get_global_grad_norm() == mean
    head.backward(head(trunk(torch.ones(1, 1))).sum(), weight=1)
    head.backward(head(trunk(torch.ones(1, 1))).sum())
    with pytest.raises(ConfigError, match="got a weight for some micro-batches of this step and none for others"):
        trunk.step()


class Fails(torch.autograd.Function):
    """Passes values on; its backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise MemoryError("too long a sequence")


@pytest.mark.parametrize("loop", ["step() each", "one step()", "flag"])
def test_a_backward_that_failed_before_anything_came_weighs_and_counts_nothing(loop):
    def run(weight, *, fails):
        settings = config(gradient_accumulation_steps=3, managed_gradient_accumulation=loop != "one step()")
        engine = zerocore.Engine(one_weight(2.0), settings)
        for k in range(3):
            if loop == "flag":
                engine.set_gradient_accumulation_boundary(k == 2)
            if fails:
                with pytest.raises(MemoryError):
                    engine.backward(Fails.apply(engine(torch.ones(1, 1))).sum(), **weight(100))
                with pytest.raises(ConfigError, match=r"no gradients, expected a backward\(\).*the last one failed"):
                    engine.step()
            engine.backward(engine(torch.full((1, 1), k + 1.0)).sum(), **weight(k))
            if loop == "step() each":
                engine.step()
        if loop != "step() each":
            engine.step()
        assert engine.was_step_applied()
        return engine.module.weight.item(), engine.get_global_grad_norm()

    for weight in (lambda k: {"weight": k}, lambda k: {}):
        assert run(weight, fails=True) == run(weight, fails=False)


def test_a_backward_that_failed_after_something_came_breaks_all_engines_it_reached():
    first, second = (zerocore.Engine(one_weight(2.0), config()) for _ in range(2))
    with pytest.raises(MemoryError):
        second.backward(second(first(Fails.apply(torch.ones(1, 1, requires_grad=True)))).sum(), weight=1)
    for engine in (first, second):
        with pytest.raises(zerocore.errors.Error, match=r"state is not whole: an earlier backward\(\) failed"):
            engine.step()
        engine.zero_grad()
        engine.backward(engine(torch.ones(1, 1)).sum(), weight=1)
        engine.step()
        assert engine.get_global_grad_norm() == 1.0


@pytest.mark.ranks(1, 2)
def test_what_a_failed_step_has_left_can_be_dropped(world_size):
    engine = zerocore.Engine(one_weight(2.0), config(gradient_accumulation_steps=2))
    for k in range(2):
        engine.backward(engine(torch.full((1, 1), 1000.0)).sum(), weight=0)
        if k == 0:
            engine.step()
    with pytest.raises(ConfigError, match="add up to 0 on all ranks"):
        engine.step()
    engine.zero_grad()
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 1)).sum(), weight=1)
        engine.step()
    assert engine.get_global_grad_norm() == 1.0


@pytest.mark.ranks(2)
def test_nothing_weighs_anything():
    engine = zerocore.Engine(one_weight(), config())
    engine.backward(engine(torch.ones(1, 1)).sum(), weight=0)
    with pytest.raises(ConfigError, match="add up to 0 on all ranks"):
        engine.step()


@pytest.mark.ranks(2)
def test_dropped_gradients_weigh_nothing():
    engine = zerocore.Engine(one_weight(), config())
    engine.backward(engine(torch.full((4, 1), 3.0)).sum(), weight=4)
    engine.zero_grad()
    engine.backward(engine(torch.full((2, 1), 3.0)).sum(), weight=2)
    engine.step()
    with engine.unsharded():
        assert engine.module.weight.item() == 8.0 - 0.5 * 3.0

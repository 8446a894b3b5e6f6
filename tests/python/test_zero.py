"""Stage 3 beyond bits: what a released parameter allows, graphs of all kinds, Init, reading and writing, traffic."""

from __future__ import annotations

import copy
import gc
import os
import threading

import pytest
import torch
import zerocore
from torch import nn
from toy_models import SHARD_ALL, batch, make
from zerocore import _comm, utils, zero
from zerocore.config import OptimizerConfig, PrecisionConfig, ZeroConfig
from zerocore.errors import ConfigError, Error


class Blocks(nn.Module):
    """Equal blocks of 8 * 1024 elements between an embedding and a head."""

    def __init__(self, num_blocks=4, width=64):
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh(), nn.Linear(width, width, bias=False))
            for _ in range(num_blocks)
        )
        self.head = nn.Linear(width, 16, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().mean()


TOKENS = torch.arange(16).view(2, 8)


def config(*, stage=3, precision=None, micro_batches=None, **zero_keys):
    return zerocore.Config(
        micro_batch_size=1,
        train_batch_size=micro_batches or _comm.world().size,
        optimizer=OptimizerConfig(type="adamw", lr=0.01, weight_decay=0.1),
        precision=PrecisionConfig(**(precision or {})),
        zero=ZeroConfig(stage=stage, **(SHARD_ALL | zero_keys)),
    )


def build(model=None, **keys):
    torch.manual_seed(0)
    return zerocore.Engine(Blocks() if model is None else model, config(**keys))


def train(engine, steps=1, tokens=TOKENS):
    for _ in range(steps):
        engine.backward(engine(tokens))
        engine.step()


# A released parameter


def test_shape_and_the_like_stay_true_and_training_state_can_be_set():
    engine = build(precision={"dtype": "bf16"})
    for param, whole in zip(engine.module.parameters(), Blocks().parameters(), strict=True):
        assert param.shape == whole.shape and param.numel() == whole.numel() and param.dtype == torch.bfloat16
        assert isinstance(param, nn.Parameter) and param.requires_grad and param.grad is None and len(param)
        assert torch.zeros_like(param).shape == whole.shape
        assert "released parameter" in repr(param) and str(tuple(whole.shape)) in f"{param}"
    assert sum(p.numel() for p in engine.module.parameters()) == 4 * 2 * 64 * 64 + 2 * 16 * 64
    engine.module.head.weight.requires_grad_(False)
    engine.module.head.weight.requires_grad_(True)
    train(engine)


USES = {
    "read": (lambda p: p + 1, "got add()"),
    "read through data": (lambda p: p.data, "got .data"),
    "compared": (lambda p: torch.equal(p, p), "got equal()"),
    "used by a function": (lambda p: nn.functional.linear(torch.ones(1, 64), p), "got linear()"),
    "written": (lambda p: nn.init.zeros_(p), "got zero_()"),
    "given other data": (lambda p: setattr(p, "data", torch.ones(1)), "got .data"),
    "moved": (lambda p: p.to(torch.float64), "got to()"),
    "copied": (copy.deepcopy, "got copy.deepcopy()"),
    "an argument in a list": (lambda p: torch.stack([p, p]), "got stack()"),
}


@pytest.mark.parametrize("use", USES)
def test_any_other_use_names_the_parameter_and_the_way_out(use):
    engine = build()
    act, operation = USES[use]
    with pytest.raises(Error) as caught:
        act(engine.module.blocks[1][2].weight)
    text = str(caught.value)
    assert text.startswith(
        "[zero] released parameter blocks.1.2.weight of shape (64, 64), torch.float32: its values are"
    )
    assert operation in text and "register_external_parameter" in text and "engine.unsharded()" in text


def test_saving_a_released_model_is_an_error(tmp_path):
    engine = build()
    with pytest.raises(Error, match=r"released parameter embed\.weight.*got detach\(\).*save engine\.state_dict\(\)"):
        engine.module.state_dict()
    with pytest.raises(Error, match=r"got pickling, as torch\.save\(\) does,"):
        torch.save(engine.module, tmp_path / "model.pt")


def test_a_gathered_model_can_be_copied_and_saved(tmp_path):
    engine = build()
    with engine.unsharded():
        clone = copy.deepcopy(engine.module)
        torch.save(engine.module, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for free in (clone, loaded):
        assert utils.params_sha256(free) == utils.params_sha256(engine.module)
        free(TOKENS).backward()
        assert free.head.weight.grad is not None
    assert engine._params.core.live_numel() == 0


def test_a_parameter_that_another_module_uses_must_be_registered():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(16, 64)
            self.body = nn.Linear(64, 64)

        def forward(self, tokens):
            return (self.body(self.embed(tokens)) @ self.embed.weight.t()).square().mean()

    engine = build(Tied())
    with pytest.raises(Error, match=r"released parameter embed\.weight.*register_external_parameter"):
        engine(TOKENS)
    plain, model = build(Tied(), stage=2), Tied()
    zero.register_external_parameter(model, model.embed.weight)
    model.load_state_dict({k: v.clone() for k, v in plain.module.state_dict().items()})
    engine = build(model)
    for each in (plain, engine):
        train(each, 3)
    assert utils.params_sha256(engine.module) == utils.params_sha256(plain.module)


def test_writing_to_a_gathered_parameter_is_found():
    class Clamps(Blocks):
        def forward(self, tokens):
            with torch.no_grad():
                self.clamped.clamp_(-1, 1)
            return super().forward(tokens)

    model = Clamps()
    model.clamped = nn.Parameter(torch.ones(4))
    engine = build(model)
    with pytest.raises(Error, match="parameter clamped was written to while it was gathered"), torch.no_grad():
        engine(TOKENS)


def test_a_write_to_a_parameter_that_is_kept_is_found_at_the_latest_in_the_step():
    engine = build(max_reuse_numel=1 << 30)
    loss = engine(TOKENS)
    with torch.no_grad():
        engine.module.head.weight.add_(1)
    engine.eval()
    with torch.no_grad():
        engine(TOKENS)  # brings the unit once more, which is no reason to forget
    engine.train()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(loss)
    with pytest.raises(Error, match=r"parameter head\.weight was written to while it was gathered"):
        engine._params.gatherer.invalidate()


# Modules and graphs of all kinds


def check_against_stage_2(make_model, step=None, steps=3, **keys):
    hashes = []
    for stage in (2, 3):
        torch.manual_seed(0)
        engine = zerocore.Engine(make_model(), config(stage=stage, **keys))
        for index in range(steps):
            (step or (lambda engine, index: engine.backward(engine(TOKENS))))(engine, index)
            engine.step()
        hashes.append(utils.params_sha256(engine.module))
        engine.close()
    assert hashes[0] == hashes[1]


@pytest.mark.ranks(1, 2)
def test_outputs_on_the_side_gather_in_the_backward(world_size):
    """Tensors that leave a module by other ways than its output reach its parameters in the backward all the same."""

    class Opaque:
        def __init__(self, value):
            self.value = value

    class Side(Blocks):
        def forward(self, tokens):
            self.blocks[0].aux = None
            x = self.embed(tokens)
            for block in self.blocks:
                x = x + block(x).value
            return self.head(x).square().mean() + self.blocks[0][0].aux.mean()

    class Wrapped(nn.Sequential):
        def forward(self, x):
            return Opaque(super().forward(x))

    class Noting(nn.Linear):
        def forward(self, x):
            self.aux = super().forward(x).square()
            return self.aux

    def make_model():
        model = Side()
        model.blocks = nn.ModuleList(Wrapped(Noting(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(3))
        return model

    check_against_stage_2(make_model)


@pytest.mark.ranks(1, 2)
def test_a_view_of_a_parameter_as_output(world_size):
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(32, 64))

        def forward(self, n):
            return {"first": self.table[:n], "rest": (self.table[n:].t(), n)}

    class Model(Blocks):
        def __init__(self):
            super().__init__()
            self.positions = Positions()

        def forward(self, tokens):
            found = self.positions(8)
            return super().forward(tokens) + (found["first"].sum() * found["rest"][0].square()).mean()

    check_against_stage_2(Model)


@pytest.mark.ranks(1, 2)
def test_modules_used_twice_not_at_all_and_forward_only(world_size):
    class Model(Blocks):
        def forward(self, tokens):
            x = self.embed(tokens)
            for block in (self.blocks[0], self.blocks[1], self.blocks[0], self.blocks[2]):
                x = x + block(x)
            with torch.no_grad():
                forward_only = self.blocks[3](x)
            return (x + forward_only).square().mean()  # the head is never used

    check_against_stage_2(Model)


@pytest.mark.ranks(1, 2)
def test_several_forwards_before_one_backward_and_backwards_of_one_graph(world_size):
    def step(engine, index):
        if index == 0:
            engine.backward(engine(TOKENS) + engine(TOKENS.flip(0)))
        elif index == 1:
            loss = engine(TOKENS)
            engine.backward(loss, retain_graph=True)
            engine.backward(loss)
        else:
            first, second = engine(TOKENS), engine(TOKENS.flip(1))
            engine.backward(first)
            engine.backward(second)

    check_against_stage_2(Blocks, step, steps=6)


@pytest.mark.ranks(1, 2)
def test_modules_called_outside_of_the_models_forward(world_size):
    """Their parameters are the model's own unit's, since another module uses them too."""

    class Tied(Blocks):
        def __init__(self):
            super().__init__()
            self.head.weight = self.embed.weight
            self.norm = nn.LayerNorm(64)

        def encode(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = x + block(x)
            return self.norm(x)

        def forward(self, tokens):
            return self.head(self.encode(tokens)).square().mean()

    def step(engine, index):
        model = engine.module
        with torch.no_grad():
            assert torch.equal(model.head(model.encode(TOKENS)).square().mean(), engine(TOKENS))
        loss = model.encode(TOKENS).square().mean() if index % 2 else model.head(model.encode(TOKENS)).square().mean()
        engine.backward(loss)

    check_against_stage_2(Tied, step)
    check_against_stage_2(Tied, step, prefetch_numel=1 << 30)


@pytest.mark.ranks(1, 2)
def test_evaluation_between_forward_and_backward(world_size):
    def step(engine, index):
        loss = engine(TOKENS)
        engine.eval()
        with torch.no_grad():
            assert torch.isfinite(engine(TOKENS.flip(0)))
        engine.train()
        engine.backward(loss)

    check_against_stage_2(Blocks, step)


@pytest.mark.ranks(1, 2)
def test_plain_loss_backward_and_a_parameter_modified_behind_the_graph(world_size):
    def step(engine, index):
        engine(TOKENS).backward()

    check_against_stage_2(Blocks, step)
    engine = build()
    first, second = engine(TOKENS), engine(TOKENS)
    engine.backward(second)
    engine.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(first)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.ranks(1, 2)
def test_the_users_own_checkpointing(reentrant, world_size):
    from torch.utils.checkpoint import checkpoint

    class Model(Blocks):
        def forward(self, tokens):
            x = self.embed(tokens)
            for i, block in enumerate(self.blocks):
                if i == 2:  # inside a unit's call, two units at once
                    x = checkpoint(lambda x: self.blocks[3](self.blocks[2](x)), x, use_reentrant=reentrant)
                elif i < 2:
                    x = x + checkpoint(block, x, use_reentrant=reentrant)
            return self.head(x).square().mean()

    check_against_stage_2(Model)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.ranks(1, 2)
def test_tensors_that_pass_through_checkpointed_units(reentrant):
    """T5's blocks hand on what the first has computed: its gradient is complete in the first one's backward."""
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):
        def __init__(self, first):
            super().__init__()
            self.bias = nn.Linear(64, 64) if first else None
            self.layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

        def forward(self, x, bias):  # hooks of the module are outside, as with Hugging Face
            return checkpoint(self.inner, x, bias, use_reentrant=reentrant)

        def inner(self, x, bias):
            bias = bias if self.bias is None else self.bias(x)
            return x + self.layers(x + bias), bias

    class Model(Blocks):
        def __init__(self):
            super().__init__(num_blocks=0)
            self.blocks = nn.ModuleList(Block(i == 0) for i in range(3))

        def forward(self, tokens):
            x, bias = self.embed(tokens), None
            for block in self.blocks:
                x, bias = block(x, bias)
            return self.head(x).square().mean()

    check_against_stage_2(Model)


class Scaled(nn.Module):
    """Reads its scale elementwise, so in place, where autograd saved it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.scale = nn.Parameter(torch.linspace(1, 2, 64))

    def forward(self, x):
        return torch.tanh(self.linear(x)) * self.scale


@pytest.mark.parametrize("hooks", ["checkpoint", "reentrant checkpoint", "save_on_cpu"])
@pytest.mark.ranks(1, 2)
def test_one_output_of_several_units_under_saved_tensor_hooks_of_the_users(hooks, world_size):
    from torch.utils.checkpoint import checkpoint

    class Model(Blocks):
        def __init__(self):
            super().__init__(num_blocks=0)
            self.blocks = nn.Sequential(
                *[nn.Sequential(Scaled(), nn.Sequential(Scaled(), Scaled()), Scaled()) for _ in range(2)]
            )
            for block in self.blocks:
                block.scale = nn.Parameter(torch.ones(64))

        def forward(self, tokens):
            x = self.embed(tokens)
            if hooks == "save_on_cpu":
                with torch.autograd.graph.save_on_cpu():
                    x = self.blocks(x)
            else:
                x = checkpoint(self.blocks, x, use_reentrant=hooks == "reentrant checkpoint")
            return self.head(x).square().mean()

    check_against_stage_2(Model)


@pytest.mark.ranks(1, 2)
def test_a_backward_gathers_each_unit_once(world_size):
    """The last block's output is the model's, too."""
    engine = build(nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)]))

    def gathered():
        return engine.comm_report()["all_gather"]["elements"]

    before = gathered()
    loss = engine(torch.ones(1, 64)).mean()
    in_forward = gathered() - before
    engine.backward(loss)
    assert gathered() - before == 2 * in_forward > 0


@pytest.mark.ranks(1, 2)
def test_a_gradient_penalty(world_size):
    """A backward through a backward, whose graph refers to parameters that no hook has seen."""

    def make_model():
        return nn.Sequential(*[nn.Sequential(Scaled(), Scaled()) for _ in range(3)])

    def step(engine, index):
        x = torch.linspace(-1, 1, 64).requires_grad_()
        out = engine(x).mean()
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        engine.backward(out + grad.square().sum())
        assert engine.memory_report()["gathered_parameters"] == 0

    check_against_stage_2(make_model, step)
    engine = build(make_model(), max_live_numel=16_000)  # three of the six
    with pytest.raises(ConfigError, match=r"needs \d+ elements beside the \d+ in use: got a bound of max_live_numel"):
        step(engine, 0)


@pytest.mark.parametrize("how", ["torch.compile(block)", "block.compile()", "torch.compile(model)"])
def test_compiled_models(how):
    def make_model():
        model = Blocks()
        if how == "torch.compile(block)":
            for i, block in enumerate(model.blocks):
                model.blocks[i] = torch.compile(block, backend="aot_eager")
        elif how == "block.compile()":
            for block in model.blocks:
                block.compile(backend="aot_eager")
        else:
            model = torch.compile(model, backend="aot_eager")
        return model

    check_against_stage_2(make_model)


def test_an_exception_in_the_forward_leaves_the_engine_usable():
    engine, plain = build(), build(stage=2)
    with pytest.raises(IndexError):
        engine(TOKENS + 100)
    for each in (engine, plain):
        train(each, 2)
    assert utils.params_sha256(engine.module) == utils.params_sha256(plain.module)


# Traffic and memory


class CallsItself(Blocks):
    """Calls itself once from inside its third block, where it can be interrupted."""

    inside, interrupt = False, False

    def __init__(self):
        super().__init__()
        self.blocks[2][1].register_forward_hook(self.in_third_block)

    def in_third_block(self, module, args, output):
        if self.inside:
            if self.interrupt:
                raise KeyboardInterrupt
            return output
        self.inside = True
        try:
            return output + self(TOKENS)
        finally:
            self.inside = False


@pytest.mark.parametrize("then", ["a step", "a forward", "a forward under other hooks"])
@pytest.mark.ranks(1, 2)
def test_training_goes_on_after_a_keyboard_interrupt(then, world_size):
    """Torch ends such a call without a word; calls that the model makes of itself are no remains of one."""

    def step(engine, index):
        if then == "a step":
            engine.backward(engine(TOKENS))
        engine.module.interrupt = True
        with pytest.raises(KeyboardInterrupt):
            engine(TOKENS)
        engine.module.interrupt = False
        if then == "a forward":
            engine.backward(engine(TOKENS))
        elif then == "a forward under other hooks":
            engine.module.inside = True  # it does not call itself
            with torch.autograd.graph.save_on_cpu():
                loss = engine(TOKENS)
            engine.module.inside = False
            engine.backward(loss)
            engine.backward(engine(TOKENS))
        assert then == "a step" or engine.memory_report()["gathered_parameters"] == 0

    check_against_stage_2(CallsItself, step)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.ranks(2, 4)
def test_traffic_is_three_psi(world_size):
    torch.manual_seed(0)
    engine = zerocore.Engine(Blocks(num_blocks=6, width=256), config())
    psi = sum(p.numel() for p in engine.module.parameters())
    train(engine, 2)
    before = engine.comm_report()
    train(engine, 4)
    after = engine.comm_report()
    moved = sum(after[op]["elements"] - before[op]["elements"] for op in ("all_gather", "reduce_scatter_add"))
    assert moved == pytest.approx(4 * 3 * psi, rel=0.01)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("prefetch", [0, 10_000, 1 << 30])
@pytest.mark.parametrize("reuse", [0, 10_000, 1 << 30])
def test_gathered_parameters_stay_within_the_bound(prefetch, reuse, world_size):
    bound = 3 * 8192 + 1024
    engine = build(max_live_numel=bound, prefetch_numel=prefetch, max_reuse_numel=reuse)
    plain = build(stage=2)
    for each in (engine, plain):
        train(each, 4)
    core = engine._params.core
    assert 8192 <= core.peak_live_numel() <= bound
    if prefetch > 0:
        assert core.peak_live_numel() > 8192
    assert engine.memory_report()["gathered_parameters"] == 4 * core.live_numel() == 0
    assert utils.params_sha256(engine.module) == utils.params_sha256(plain.module)


def test_a_bound_below_one_unit_is_an_error():
    with pytest.raises(ConfigError, match=r'unit "blocks\.0" has 8192 elements.*got a bound of max_live_numel = 8000'):
        build(max_live_numel=8000)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("dtype", "width"), [("fp32", 4), ("bf16", 2), ("fp16", 2)])
def test_states_follow_the_formula(dtype, width, world_size):
    torch.manual_seed(0)
    engine = zerocore.Engine(Blocks(num_blocks=6, width=256), config(precision={"dtype": dtype}))
    psi = sum(p.numel() for p in engine.module.parameters())
    report = engine.memory_report()
    states = sum(report[k] for k in ("parameters", "gradient_accumulator", "master_weights", "optimizer_state"))
    master = 0 if dtype == "fp32" else 4
    assert states == pytest.approx(psi * (width + master + 12) / world_size, rel=0.01)
    assert report["gathered_parameters"] == 0


def test_many_engines_leave_nothing_behind():
    def live():
        gc.collect()
        return len(gc.get_objects()), threading.active_count()

    def once():
        with zero.Init():
            model = Blocks()
        engine = zerocore.Engine(model, config())
        train(engine)
        engine.close()

    for _ in range(3):
        once()
    objects, threads = live()
    for _ in range(30):
        once()
    now, threads_now = live()
    assert now - objects < 300 and threads_now == threads


# Reading and writing parameters


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("precision", [{}, {"dtype": "bf16"}, {"compute_dtype": "bf16"}])
def test_state_dict_equals_the_plain_one_and_can_be_loaded(precision, world_size):
    engines = []
    for stage in (2, 3):
        torch.manual_seed(3)
        engines.append(zerocore.Engine(make("odd"), config(stage=stage, precision=precision)))
        dtype = torch.bfloat16 if precision else torch.float32
        for j in range(2):
            engines[-1].backward(engines[-1](*batch("odd", j, dtype)))
            engines[-1].step()
    states = [engine.state_dict() for engine in engines]
    assert list(states[0]) == list(states[1]) == list(make("odd").state_dict())
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]) and value.dtype == states[1][name].dtype, name
        assert type(states[1][name]) is torch.Tensor and not states[1][name].requires_grad
    assert states[1]["head.weight"] is states[1]["table.weight"]
    streamed = dict(engines[1].iter_state_dict())
    assert streamed.keys() == states[1].keys() and all(torch.equal(streamed[n], v) for n, v in states[1].items())
    only = engines[1].state_dict(rank0_only=True)
    assert len(only) == (len(states[1]) if engines[1].rank == 0 else 0)
    fresh = zerocore.Engine(make("odd"), config(precision=precision))
    fresh.load_state_dict(states[1])
    assert utils.params_sha256(fresh.module) == utils.params_sha256(engines[1].module)
    with pytest.raises(ConfigError, match=r"no value for 1 \(first \['scale'\]\)"):
        fresh.load_state_dict({k: v for k, v in states[1].items() if k != "scale"})
    with pytest.raises(ConfigError, match=r"scale: got shape \(2,\), expected \(\)"):
        fresh.load_state_dict(states[1] | {"scale": torch.ones(2)})


def write_through_data(param, value):
    """As Hugging Face's _init_weights() does; torch's version counters do not show it."""
    param.data.fill_(value)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("stage", "share"), [(0, False), (1, False), (1, True), (2, False), (2, True), (3, False)])
@pytest.mark.parametrize("root", [0, -1])
@pytest.mark.parametrize("write", [nn.init.constant_, write_through_data])
def test_gathered_parameters_takes_over_the_modifier_ranks_values(stage, share, root, write, world_size):
    engine = build(stage=stage, share_parameters=share, precision={"dtype": "bf16"})
    root %= world_size
    weight = engine.module.head.weight
    before = utils.safe_get_full_fp32_param(engine.module.embed.weight)
    engine.comm.barrier("built").wait()
    with zero.GatheredParameters(engine.module, modifier_rank=root):
        if engine.rank == root:
            write(weight, root + 0.5)
    for whole in (engine.unsharded(), zero.GatheredParameters(weight)):
        with whole:
            assert torch.equal(weight, torch.full_like(weight, root + 0.5))
    assert torch.equal(utils.safe_get_full_fp32_param(weight), torch.full((16, 64), root + 0.5))
    assert torch.equal(utils.safe_get_full_fp32_param(engine.module.embed.weight), before)  # unrounded still
    train(engine)
    digests = engine.comm.gather_bytes(bytes.fromhex(utils.params_sha256(engine.module)), "compare")
    assert len(set(digests)) == 1


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("stage", [2, 3])
def test_gathered_parameters_takes_over_all_parameters_of_a_unit(stage, world_size):
    """Taking over one of them must not touch the others, which are still to be taken over."""
    engine = build(stage=stage)
    twice = {name: 2 * value for name, value in engine.state_dict().items()}
    with engine.unsharded(modifier_rank=0):
        engine.module.load_state_dict(twice)
    assert all(torch.equal(value, twice[name]) for name, value in engine.state_dict().items())
    first, second = list(engine.module.parameters())[:2]
    with engine.unsharded(modifier_rank=0):
        if engine.rank == 0:
            nn.init.constant_(first, 3.0)
        utils.safe_set_full_fp32_param(second, torch.full_like(second, 4.0))
        assert second.eq(4).all()
    with engine.unsharded():
        assert first.eq(3).all() and second.eq(4).all()


@pytest.mark.ranks(2)
def test_gathered_parameters_with_other_lists_or_changes_elsewhere(world_size):
    engine = build()
    module, rank = engine.module, engine.rank
    other = zero.GatheredParameters([module.head.weight if rank else module.embed.weight])
    with pytest.raises(ConfigError, match="ranks name different parameters"), other:
        pass
    elsewhere = zero.GatheredParameters(module.head.weight, modifier_rank=0)
    with pytest.raises(Error, match=r"head\.weight was changed on a rank other than modifier_rank=0"), elsewhere:
        if rank == 1:
            nn.init.zeros_(module.head.weight)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_gathered_parameters_finds_writes_through_data_elsewhere(stage, world_size):
    engine = build(stage=stage)
    weight = engine.module.head.weight
    elsewhere = zero.GatheredParameters(weight, modifier_rank=0)
    with pytest.raises(Error, match=r"head\.weight was changed on a rank other than modifier_rank=0"), elsewhere:
        if engine.rank == 1:
            weight.data.zero_()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("root", [0, 1])
def test_gathered_parameters_takes_over_writes_through_data_after_init(root, world_size):
    with zero.Init():
        model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1))
        for param in (model[0].weight, model[0].bias):  # sharded since the second module was made
            with zero.GatheredParameters(param, modifier_rank=root):
                if _comm.world().rank == root:
                    param.data.fill_(root + 0.5)
    with zero.GatheredParameters(model[1].bias, modifier_rank=root):
        if _comm.world().rank == root:
            model[1].bias.data.fill_(2.5)
    with zero.GatheredParameters(model):
        assert model[0].weight.eq(root + 0.5).all() and model[0].bias.eq(root + 0.5).all()
        assert model[1].bias.eq(2.5).all()


def test_gathered_parameters_without_a_modifier_may_not_be_changed():
    engine = build()
    gathered = zero.GatheredParameters(engine.module.head.weight)
    with pytest.raises(Error, match=r"head\.weight was changed: got no modifier_rank"), gathered:
        nn.init.zeros_(engine.module.head.weight)


@pytest.mark.parametrize("failure", ["no modifier", "an exception inside"])
@pytest.mark.parametrize("max_reuse_numel", [0, 1 << 30])
@pytest.mark.ranks(1, 2)
def test_a_gathered_parameters_block_that_fails_lets_go(failure, max_reuse_numel, world_size):
    engine, plain = build(max_reuse_numel=max_reuse_numel), build(stage=2)
    gathered = zero.GatheredParameters(engine.module, modifier_rank=None if failure == "no modifier" else 0)
    with pytest.raises(Error if failure == "no modifier" else ValueError, match=r"got no modifier_rank|mine"), gathered:
        nn.init.zeros_(engine.module.embed.weight)
        nn.init.zeros_(engine.module.head.weight)
        if failure != "no modifier":
            raise ValueError("mine")
    if max_reuse_numel > 0:  # what was changed is still in memory
        with pytest.raises(Error, match=r"embed\.weight was written to while it was gathered: got a change that would"):
            engine._params.gatherer.invalidate()
    for each in (engine, plain):
        train(each, 2)
    assert utils.params_sha256(engine.module) == utils.params_sha256(plain.module)


def test_a_step_inside_unsharded_is_an_error():
    engine = build()
    engine.backward(engine(TOKENS))
    with engine.unsharded(), pytest.raises(ConfigError, match="is in use while its parameters are updated"):
        engine.step()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("set_grad", [utils.safe_set_full_grad, utils.safe_set_local_grad])
def test_a_gradient_that_is_set_counts_though_no_micro_batch_has_brought_one(stage, set_grad, world_size):
    engine = build(stage=stage)
    used, unused = engine.module.blocks[0][0].weight, engine.module.blocks[1][0].weight
    before = utils.safe_get_full_fp32_param(unused)
    with zero.GatheredParameters(used):
        loss = used.sum()
    engine.backward(loss)
    grad = (
        utils.safe_get_full_grad(unused) if set_grad is utils.safe_set_full_grad else utils.safe_get_local_grad(unused)
    )
    assert not grad.any()
    set_grad(unused, torch.ones_like(grad))
    engine.step()
    assert (utils.safe_get_full_fp32_param(unused) < before).all()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(("stage", "share"), [(0, False), (1, False), (1, True), (3, False)])
def test_states_can_be_read_and_written_whole_and_in_parts(stage, share, world_size):
    engine = build(stage=stage, share_parameters=share, precision={"dtype": "bf16"})
    weight = engine.module.blocks[0][0].weight
    engine.backward(engine(TOKENS))
    grad = utils.safe_get_full_grad(weight)
    assert grad.shape == weight.shape and grad.any()
    utils.safe_set_full_grad(weight, torch.full_like(grad, 0.25))
    assert torch.equal(utils.safe_get_full_grad(weight), torch.full_like(grad, 0.25))
    assert (utils.safe_get_local_grad(weight) == 0.25).all()
    with pytest.raises(ConfigError, match="after the gradient was read"):
        engine.backward(engine(TOKENS))
    engine.step()
    first = utils.safe_get_full_optimizer_state(weight, "exp_avg")
    assert torch.allclose(first, torch.full_like(first, 0.025))
    utils.safe_set_full_optimizer_state(weight, torch.full_like(first, 2.0), "exp_avg")
    assert (utils.safe_get_local_optimizer_state(weight, "exp_avg") == 2).all()
    with pytest.raises(ConfigError, match=r'"momentum_buffer": got a name that adamw does not have'):
        utils.safe_get_full_optimizer_state(weight, "momentum_buffer")
    value = torch.arange(64 * 64.0).view(64, 64) / 1000
    utils.safe_set_full_fp32_param(weight, value)
    assert torch.equal(utils.safe_get_full_fp32_param(weight), value)
    with zero.GatheredParameters(weight):
        assert torch.equal(weight, value.bfloat16())
    own = utils.safe_get_local_fp32_param(weight)
    engine.comm.barrier("all have compared").wait()  # shared parameters change for all as one rank writes
    utils.safe_set_local_fp32_param(weight, own + 1)
    assert torch.equal(utils.safe_get_full_fp32_param(weight), value + 1)
    with zero.GatheredParameters(weight):
        assert torch.equal(weight, (value + 1).bfloat16())
    with pytest.raises(ConfigError, match="no open engine trains"):
        utils.safe_get_full_fp32_param(nn.Parameter(torch.ones(1)))
    with pytest.raises(ConfigError, match="there is no gradient"):
        utils.safe_get_full_grad(weight)


# Parameters that exist once


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_are_shared_in_stages_1_and_2_only(stage):
    with pytest.raises(ConfigError, match=rf"share_parameters: got stage {stage}, expected 1 or 2"):
        build(stage=stage, share_parameters=True)


@pytest.mark.ranks(2, 3)
def test_what_one_rank_writes_to_shared_parameters_all_see(world_size):
    engine = build(stage=2, share_parameters=True)
    weight = engine.module.head.weight
    engine.comm.barrier("built").wait()
    if engine.rank == world_size - 1:
        with torch.no_grad():
            weight.fill_(0.5)
    engine.comm.barrier("written").wait()
    assert weight.eq(0.5).all()
    numel = sum(p.numel() for p in engine.module.parameters())
    assert engine.memory_report()["parameters"] == pytest.approx(4 * numel / world_size, rel=0.1)


# Building models already sharded


class Custom(nn.Module):
    """Initialisers of every kind: in reset_parameters, by apply, of another module's values, on slices, of norms."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))
        self.stack = nn.Sequential(nn.Linear(40, 50), nn.LayerNorm(50), nn.Linear(50, 40), nn.Embedding(7, 40))
        self.rnn = nn.LSTM(40, 20)
        self.twin = nn.Linear(40, 50)
        self.apply(self._init)
        self.twin.load_state_dict(self.stack[0].state_dict())
        with torch.no_grad():
            self.stack[2].weight[:, :25] = self.stack[0].weight[:25].t() * 2
            self.stack[2].weight.data[0].fill_(7)
            self.scale.copy_(
                torch.stack([p.norm() for p in (self.twin.weight, self.stack[3].weight, self.rnn.weight_hh_l0)])
            )
        nn.init.orthogonal_(self.rnn.weight_ih_l0)
        self.stack[3].weight.data.normal_(std=0.02)
        self.twin.bias = self.stack[0].bias

    @staticmethod
    def _init(module):
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.3)
            nn.init.zeros_(module.bias)


@pytest.mark.ranks(1, 2, 3)
def test_init_gives_the_bits_of_construction_without_it(world_size):
    torch.manual_seed(1 + _comm.world().rank)  # rank 0's values count
    with zero.Init():
        model = Custom()
        after = torch.rand(3)
    torch.manual_seed(1)
    plain = Custom()
    if _comm.world().rank == 0:
        assert torch.equal(after, torch.rand(3))  # the same random numbers were drawn
    assert "released parameter Linear.weight" in repr(model.twin.weight)
    assert model.twin.bias is model.stack[0].bias
    with zero.GatheredParameters(model):
        for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(param, expected), name


@pytest.mark.ranks(2)
def test_gathered_parameters_after_init_and_an_engine_below_stage_3(world_size):
    with zero.Init():
        model = Blocks()
    with pytest.raises(Error, match=r"released parameter Embedding\.weight.*hand the model to an engine"):
        model.embed.weight.sum()
    with zero.GatheredParameters(model.head.weight, modifier_rank=1):
        if _comm.world().rank == 1:
            nn.init.constant_(model.head.weight, 3)
    engine = zerocore.Engine(model, config(stage=1))
    assert (model.head.weight == 3).all()
    train(engine)


def test_init_is_off_below_stage_3_and_refuses_misuse():
    with zero.Init(config_dict_or_path={"train_batch_size": 1, "zero_optimization": {"stage": 2}}):
        assert nn.Linear(2, 2).weight.sum().isfinite()
    with zero.Init(enabled=False):
        assert nn.Linear(2, 2).weight.sum().isfinite()
    with zero.Init():
        model = Blocks()
        with pytest.raises(ConfigError, match=r"built inside `with zerocore\.zero\.Init"):
            zerocore.Engine(model, config())
        with pytest.raises(ConfigError, match="Init inside another Init"), zero.Init():
            pass
    with pytest.raises(ZeroDivisionError), zero.Init():
        raise ZeroDivisionError
    assert nn.Linear(2, 2).weight.sum().isfinite()  # nothing is patched any more


def test_init_of_an_existing_module_and_another_dtype():
    model, plain = Blocks(), Blocks()
    model.load_state_dict(plain.state_dict())
    zero.Init(module=model, dtype=torch.bfloat16)
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    with zero.GatheredParameters(model):
        assert torch.equal(model.head.weight, plain.head.weight.bfloat16())


class Tying(nn.Module):
    """Ties a parameter that is whole at that time."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 64)
        self.head = nn.Linear(64, 16, bias=False)
        nn.init.normal_(self.embed.weight)
        self.head.weight = self.embed.weight


@pytest.mark.ranks(1, 2)
def test_init_of_a_parameter_tied_right_after_it_was_written(world_size):
    torch.manual_seed(0)
    plain = Tying()
    torch.manual_seed(0)
    with zero.Init():
        model = Tying()
    assert model.head.weight is model.embed.weight
    assert utils.params_sha256(model) == utils.params_sha256(plain)


@pytest.mark.ranks(2)
def test_init_of_parameters_that_ranks_make_in_different_orders(world_size):
    """As Hugging Face does with those that a checkpoint lacks, in place of meta parameters."""
    rank = _comm.world().rank
    with zero.Init():
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(8, 3), nn.Linear(8, 5), nn.Linear(8, 3))
        for layer in (model[0], model[1], model[2]) if rank == 0 else (model[2], model[0], model[1]):
            layer.weight = nn.Parameter(torch.empty(layer.weight.shape))
            layer.bias = nn.Parameter(torch.empty(layer.bias.shape))
        for index, layer in enumerate(model):
            nn.init.constant_(layer.weight, index + 10 * rank)
            nn.init.constant_(layer.bias, index + 0.5)
    with zero.GatheredParameters(model):
        for index, layer in enumerate(model):
            assert (layer.weight == index).all() and (layer.bias == index + 0.5).all()


@pytest.mark.ranks(2)
def test_init_does_not_write_to_memory_that_is_not_torchs_own(world_size):
    """Weights from a mapped file: what is written there would stay in memory until the file is closed."""
    rank = _comm.world().rank
    memory = bytearray([rank]) * 256
    with zero.Init():
        layer = nn.Linear(8, 8)
        layer.weight = nn.Parameter(torch.frombuffer(memory, dtype=torch.float32).view(8, 8))
    assert memory == bytearray([rank]) * 256
    with zero.GatheredParameters(layer):
        assert (layer.weight == 0).all()


def test_init_serves_one_thread():
    def elsewhere(act):
        caught = []

        def run():
            try:
                act()
            except ConfigError as error:
                caught.append(str(error))

        thread = threading.Thread(target=run, name="loader")
        thread.start()
        thread.join()
        return caught[0]

    with zero.Init():
        model = Blocks()
        built = elsewhere(lambda: nn.Linear(2, 2))
        used = elsewhere(lambda: model.blocks[0][0].weight.sum())
    assert "got parameter weight of a Linear in thread loader, expected all of them in MainThread" in built
    assert "got sum() of released parameter Linear.weight" in used and "in thread loader" in used


@pytest.mark.parametrize("value", [None, "0"])
def test_init_lets_weights_be_read_one_by_one(value, monkeypatch):
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    monkeypatch.delenv(name, raising=False)
    if value is not None:
        monkeypatch.setenv(name, value)
    with zero.Init():
        assert os.environ[name] == (value or "1")
    assert os.environ.get(name) == value


@pytest.mark.ranks(2)
def test_a_model_can_be_wrapped_again_after_close(world_size):
    first = build()
    train(first, 2)
    expected = utils.params_sha256(first.module)
    with pytest.raises(ConfigError, match="belongs to another engine"):
        zerocore.Engine(first.module, config())
    first.close()
    assert utils.params_sha256(first.module) == expected
    with zero.GatheredParameters(first.module):
        assert first.module.head.weight.isfinite().all()
    second = zerocore.Engine(first.module, config(stage=3, unit_numel=1 << 30))
    assert utils.params_sha256(second.module) == expected
    third_model = second.module
    second.close()
    third = zerocore.Engine(third_model, config(stage=0))
    assert utils.params_sha256(third.module) == expected


LARGER_THAN_MEMORY = """
import resource, sys, torch, zerocore
from torch import nn
from zerocore.config import OptimizerConfig, ZeroConfig

torch.set_num_threads(1)
zerocore.zero, zerocore.Engine  # loaded
from zerocore import _comm
rank = _comm.world().rank
def data():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmData")).split()[1]) * 1024

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(512, 512, bias=False)
    def forward(self, x):
        return x + self.inner(x).tanh()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

NUM_BLOCKS = 96
psi = NUM_BLOCKS * 512 * 512
warm = nn.Linear(64, 64)
warm(torch.ones(1, 64)).sum().backward()
torch.optim.SGD(warm.parameters())  # imports torch's compiler
limit = int(data() + 16 * psi / 1.5)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
if sys.argv[1] == "whole":
    model = Model()
    master = [torch.zeros(4 * p.numel()) for p in model.parameters()]
    print("it fits")
else:
    with zerocore.zero.Init():
        model = Model()
    config = zerocore.Config(
        micro_batch_size=1,
        optimizer=OptimizerConfig(type="adamw", lr=1e-5),
        zero=ZeroConfig(stage=3, bucket_numel=1 << 18, persistent_param_numel=0, unit_numel=1,
                        max_live_numel=3 << 18, max_reuse_numel=0, prefetch_numel=1 << 18),
    )
    engine = zerocore.Engine(model, config)
    x = torch.full((4, 512), 0.5)
    losses = []
    for _ in range(3):
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.eval()
    with torch.no_grad():
        losses.append(engine(x).item())
    assert losses[0] > losses[1] > losses[2] > losses[3], losses
    numel = sum(value.numel() for name, value in engine.iter_state_dict())
    assert numel == psi
    print("trained")
"""


def test_a_model_whose_states_exceed_a_ranks_memory(mpirun):
    job = mpirun(2, "-c", LARGER_THAN_MEMORY, "sharded", timeout=120)
    assert job.stdout.count("trained") == 2, job.stdout
    job = mpirun(1, "-c", LARGER_THAN_MEMORY, "whole", timeout=60)
    assert job.returncode != 0 and "it fits" not in job.stdout  # the limit is one

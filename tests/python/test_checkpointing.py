"""Activation checkpointing: the same gradients, less memory, any arguments."""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
import types
import weakref

import pytest
import torch
import toy_models
import zerocore
from torch import nn
from zerocore import checkpointing
from zerocore._units import choose_units
from zerocore.checkpointing import checkpoint
from zerocore.config import ActivationCheckpointingConfig, Config, OptimizerConfig, ZeroConfig
from zerocore.errors import ConfigError, UnsupportedError
from zerocore.utils import params_sha256

MODES = [False, True]  # reentrant


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Nothing configured, and nothing said."""
    monkeypatch.setattr(checkpointing, "_settings", None)
    monkeypatch.setattr(checkpointing, "_told", set())


class Block(nn.Module):
    """What a transformer block has: normalisation, dropout, a wide middle and a residual. Counts its calls."""

    def __init__(self, size=16):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, 8 * size)
        self.down = nn.Linear(8 * size, size)
        self.calls = 0

    def forward(self, x, *, scale=None):
        self.calls += 1
        hidden = nn.functional.dropout(nn.functional.gelu(self.up(self.norm(x))), 0.25, self.training)
        return x + self.down(hidden if scale is None else hidden * scale)


class Stack(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(16, 50)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def made(cls, *args):
    torch.manual_seed(3)
    return cls(*args)


def tokens(rows=4):
    return torch.randint(0, 50, (rows, 10), generator=torch.Generator().manual_seed(1))


def apply(model, **settings):
    return checkpointing.apply(choose_units(model, min_numel=100), ActivationCheckpointingConfig(**settings))


def gradients(model, loss):
    """Of a backward after which the user's random numbers go on as they would have."""
    state = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), state)
    found = [param.grad for param in model.parameters()]
    model.zero_grad()
    return found


def same(one, other):
    return all((a is None and b is None) or torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Saved:
    """Bytes that autograd keeps of a forward: of the storages of all saved tensors that are no parameter's."""

    def __init__(self, model):
        self._parameters = {param.untyped_storage().data_ptr() for param in model.parameters()}
        self._storages = {}

    def __enter__(self):
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error):
        self._hooks.__exit__(*error)

    def _pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._parameters:
            self._storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def num_bytes(self):
        return sum(self._storages.values())


# The same bits


@pytest.mark.parametrize("reentrant", MODES)
def test_gradients_are_the_same_bits_with_dropout_in_the_function(reentrant):
    model = made(Stack)
    torch.manual_seed(7)
    expected = gradients(model, model(tokens()))
    undo = apply(model, reentrant=reentrant)
    torch.manual_seed(7)
    assert same(gradients(model, model(tokens())), expected)
    assert [block.calls for block in model.blocks] == [3, 3, 3]
    undo()
    torch.manual_seed(7)
    assert same(gradients(model, model(tokens())), expected)
    assert [block.calls for block in model.blocks] == [4, 4, 4]


@pytest.mark.parametrize("reentrant", MODES)
@pytest.mark.parametrize(
    ("name", "units"), [("wide", ["net"]), ("cnn", ["net"]), ("lstm", ["rnn"]), ("t5", ["encoder", "decoder"])]
)
def test_gradients_and_buffers_of_whole_models_are_the_same_bits(name, units, reentrant):
    model = toy_models.make(name)
    batch = toy_models.batch(name, 0, torch.float32)
    other = copy.deepcopy(model)
    torch.manual_seed(7)
    expected = gradients(model, model(*batch))
    checkpointing.apply(
        choose_units(other, min_numel=10**9, names=units), ActivationCheckpointingConfig(reentrant=reentrant)
    )
    torch.manual_seed(7)
    assert same(gradients(other, other(*batch)), expected)
    assert same(other.buffers(), model.buffers())


@pytest.mark.parametrize("reentrant", MODES)
def test_the_gradient_of_an_input_too(reentrant):
    block, x = made(Block), torch.randn(4, 16, requires_grad=True)

    def gradient(call):
        torch.manual_seed(7)
        call().square().sum().backward()
        found, x.grad = x.grad, None
        return found

    expected = gradient(lambda: block(x))
    assert torch.equal(gradient(lambda: checkpoint(block, x, use_reentrant=reentrant)), expected)


@pytest.mark.parametrize("reentrant", MODES)
def test_nested(reentrant):
    model = made(Stack)
    torch.manual_seed(7)
    expected = gradients(model, model(tokens()))
    apply(model, reentrant=reentrant)
    for outer in MODES:
        torch.manual_seed(7)
        assert same(gradients(model, checkpoint(model, tokens(), use_reentrant=outer)), expected)


@pytest.mark.parametrize("reentrant", MODES)
def test_two_forwards_before_one_backward_and_two_backwards(reentrant):
    block, x = made(Block), torch.randn(4, 16)

    def run(call):
        torch.manual_seed(7)
        first, second = call(), call()
        second.sum().backward(retain_graph=True)
        (first * 3).sum().backward()
        second.sum().backward()
        return gradients(block, call().sum())

    assert same(run(lambda: checkpoint(block, x, use_reentrant=reentrant)), run(lambda: block(x)))


@pytest.mark.parametrize("reentrant", MODES)
def test_running_statistics_are_counted_once(reentrant):
    norm, x = nn.BatchNorm1d(5), torch.randn(6, 5)
    seen = []
    norm.register_forward_pre_hook(lambda *_: seen.append(checkpointing.is_recomputing()))
    loss = checkpoint(lambda y: norm(y).square().sum(), x, use_reentrant=reentrant)
    assert not checkpointing.is_recomputing()
    statistics = [buffer.clone() for buffer in norm.buffers()]
    loss.backward()
    assert not same(norm.buffers(), statistics)  # a function does not say which modules it calls
    checkpoint(norm, x, use_reentrant=reentrant).square().sum().backward()
    assert norm.num_batches_tracked == 3
    assert seen == [False, True, False, True]


# Arguments and results


@pytest.mark.parametrize("reentrant", MODES)
def test_arguments_of_any_kind(reentrant):
    weight, x = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    seen = []

    def fn(a, none, number, flag, text, pair, *rest, mask=None, options):
        seen.append((none, number, flag, text, len(rest), options["name"], type(options["nested"])))
        assert pair[1].dtype == torch.long
        return (a * pair[0][pair[1]] * number + rest[0].sum() + options["x"]).masked_fill(mask, 0.0)

    arguments = (weight, None, 3, True, "text", (x, torch.tensor([2, 0, 1])), torch.ones(2), object)
    keywords = {"mask": torch.tensor([True, False, False]), "options": {"x": x, "name": "n", "nested": [x, None]}}

    def run(call):
        call().sum().backward()
        found = weight.grad, x.grad
        weight.grad = x.grad = None
        return found

    expected = run(lambda: fn(*arguments, **keywords))
    assert same(run(lambda: checkpoint(fn, *arguments, use_reentrant=reentrant, **keywords)), expected)
    assert seen == 3 * [(None, 3, True, "text", 2, "n", list)]


@pytest.mark.parametrize("reentrant", MODES)
def test_results_of_any_kind(reentrant):
    x = torch.randn(3, requires_grad=True)

    def fn(y):
        doubled = y * 2
        return {"a": (doubled, None), "twice": [doubled, y], "index": y.argmax(), "n": 5}

    result = checkpoint(fn, x, use_reentrant=reentrant)
    assert list(result) == ["a", "twice", "index", "n"]
    assert (result["a"][1], result["n"], result["index"].item()) == (None, 5, x.argmax().item())
    (result["a"][0].sum() + (result["twice"][0] * result["twice"][1]).sum()).backward()
    assert torch.equal(x.grad, 2 + 4 * x)
    assert checkpoint(lambda y: None, x, use_reentrant=reentrant) is None
    assert checkpoint(lambda: 3, use_reentrant=reentrant) == 3


@pytest.mark.parametrize("reentrant", MODES)
def test_no_input_need_require_a_gradient(reentrant):
    table = nn.Embedding(5, 3)
    checkpoint(table, torch.tensor([1, 1]), use_reentrant=reentrant).sum().backward()
    assert torch.equal(table.weight.grad[1], torch.full((3,), 2.0))
    frozen = nn.Linear(3, 3).requires_grad_(False)
    weight = torch.randn(3, requires_grad=True)
    (checkpoint(frozen, torch.ones(3), use_reentrant=reentrant) * weight).sum().backward()
    assert torch.equal(weight.grad, frozen(torch.ones(3)))


def test_the_users_exception_comes_through():
    def fn(x):
        raise ValueError("mine")

    for reentrant in MODES:
        with pytest.raises(ValueError, match="mine"):
            checkpoint(fn, torch.ones(1, requires_grad=True), use_reentrant=reentrant)
    assert not checkpointing.is_recomputing()


def test_gradients_inside_the_function():
    def fn(x):
        y = x.exp()
        return y + torch.autograd.grad(y.sum(), x, create_graph=True)[0]

    x = torch.ones(2, requires_grad=True)
    checkpoint(fn, x, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad, 2 * x.exp())
    with pytest.raises(UnsupportedError, match=r"got reentrant mode, expected the other\. Pass use_reentrant=False"):
        checkpoint(fn, x, use_reentrant=True)


@pytest.mark.parametrize("reentrant", MODES)
def test_evaluation_and_no_grad_are_plain_calls_as_often_as_one_likes(reentrant):
    model = made(Stack)
    apply(model, reentrant=reentrant)
    loss = model(tokens())
    with torch.no_grad():
        model(tokens())
        checkpoint(model.blocks[0], torch.randn(2, 16))
    model.eval()
    for _ in range(2):
        model(tokens()).backward()  # of eval mode
        assert checkpoint(model.blocks[0], torch.randn(2, 16), use_reentrant=reentrant).grad_fn is not None
    assert model.blocks[1].calls == 4
    model.train()
    loss.backward()
    assert model.blocks[1].calls == 5


# Memory


@pytest.mark.parametrize("reentrant", MODES)
def test_only_inputs_are_kept(reentrant):
    model, batch = made(Stack, 6), tokens(rows=16)
    with Saved(model) as plain:
        loss = model(batch)
    del loss
    apply(model, reentrant=reentrant)
    with Saved(model) as checkpointed:
        loss = model(batch)
    hidden, logits = 16 * 10 * 16 * 4, 16 * 10 * 50 * 4
    # Six inputs of blocks, and what the root keeps: the head's input, the logits' softmax, and the tokens.
    assert checkpointed.num_bytes == pytest.approx(7 * hidden + logits + batch.nbytes, rel=0.02)
    assert plain.num_bytes > 6 * 20 * hidden
    loss.backward()


def test_arguments_are_not_kept_alive_by_the_call_itself():
    freed = []
    for reentrant in MODES:
        x = torch.randn(3) * 2
        reference = weakref.ref(x)
        result = checkpoint(lambda a, *, b: a * 2 + b[0], x, b=[x], use_reentrant=reentrant)
        del x, result
        freed.append(reference() is None)
    assert freed == [True, True]


class FakeDevice:
    """The streams of a device, whose calls are written down."""

    def __init__(self):
        self.calls = []

    def Stream(self, device):  # noqa: N802
        return self._stream("copies")

    def current_stream(self, device):
        return self._stream("main")

    def stream(self, stream):
        self.calls.append(f"enter {stream.name}")
        return torch.no_grad()

    def _stream(self, name):
        return types.SimpleNamespace(
            name=name,
            wait_stream=lambda other: self.calls.append(f"{name} waits for {other.name}"),
            wait_event=lambda event: self.calls.append(f"{name} waits for {event}"),
            record_event=lambda: "the copy",
        )


@pytest.mark.parametrize("reentrant", MODES)
def test_inputs_wait_in_host_memory(monkeypatch, reentrant):
    """On this machine the device is a stand-in, so that order and bits are checked, not speed."""
    model = made(Stack, 2)
    torch.manual_seed(7)
    expected = gradients(model, model(tokens()))
    device = FakeDevice()
    checkpointing._copy_stream.cache_clear()
    monkeypatch.setattr(checkpointing, "_on_host", lambda tensor: not tensor.numel())
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, stream: device.calls.append(f"held by {stream.name}"))
    apply(model, reentrant=reentrant, cpu_checkpointing=True)
    torch.manual_seed(7)
    loss = model(tokens())
    out = ["copies waits for main", "enter copies", "held by copies"]
    assert device.calls == 2 * out
    assert same(gradients(model, loss), expected)
    assert device.calls == 2 * out + 2 * ["main waits for the copy"]
    checkpointing._copy_stream.cache_clear()


def test_inputs_in_host_memory_are_not_copied(monkeypatch):
    monkeypatch.setattr(checkpointing, "_to_host", lambda tensor: pytest.fail("a copy"))
    model = made(Stack)
    apply(model, cpu_checkpointing=True)
    model(tokens()).backward()


# Units


def test_forwards_are_replaced_and_put_back():
    model = made(Stack)
    model.blocks[2].forward = types.MethodType(lambda self, x: Block.forward(self, x), model.blocks[2])
    patched = model.blocks[2].forward
    undo = apply(model)
    own = {name for name, module in model.named_modules() if "forward" in module.__dict__}
    assert own == {"blocks.0", "blocks.1", "blocks.2"}
    assert list(inspect.signature(model.blocks[0].forward).parameters) == ["x", "scale"]
    undo()
    undo()
    assert [name for name, module in model.named_modules() if "forward" in module.__dict__] == ["blocks.2"]
    assert model.blocks[2].forward is patched


def test_a_forward_replaced_since_stays():
    model = made(Stack)
    undo = apply(model)
    ours = model.blocks[0].forward
    model.blocks[0].forward = lambda x: ours(x)
    undo()
    model(tokens()).backward()
    assert [block.calls for block in model.blocks] == [1, 1, 1]


def test_checkpointed_models_are_copied_and_pickled():
    model = made(Stack)
    apply(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(tokens()).backward()
        assert [block.calls for block in twin.blocks] == [2, 2, 2]
    assert model.blocks[0].calls == 0


def test_compiled_blocks_are_checkpointed():
    model = made(Stack)
    torch.manual_seed(7)
    expected = gradients(model, model(tokens()))
    compiled = copy.deepcopy(model)
    for i in (0, 1):
        compiled.blocks[i] = torch.compile(compiled.blocks[i], backend="eager")
    compiled.blocks[2].compile(backend="eager")
    forward = compiled.blocks[0].forward
    with Saved(compiled) as plain:
        compiled(tokens())
    undo = apply(compiled)
    assert "forward" not in compiled.blocks[0]._orig_mod.__dict__
    torch.manual_seed(7)
    with Saved(compiled) as checkpointed:
        loss = compiled(tokens())
    assert same(gradients(compiled, loss), expected)
    assert checkpointed.num_bytes < plain.num_bytes / 5
    undo()
    assert compiled.blocks[0].forward is forward


def test_a_model_without_units_is_told(caplog):
    for _ in range(2):
        checkpointing.apply(choose_units(nn.Linear(9, 9), min_numel=1), ActivationCheckpointingConfig())
    assert [record.message for record in caplog.records] == [
        "[checkpointing] activation_checkpointing is enabled but the model has no unit to recompute: got none among "
        "its modules but for the root and single layers. Lower zero.unit_numel, or name modules in zero.unit_classes "
        "or zero.unit_names."
    ]


# Settings


def test_configure_as_in_deepspeed(caplog):
    assert not checkpointing.is_configured()
    checkpointing.configure(types.SimpleNamespace(get_model_parallel_world_size=lambda: 1))
    assert checkpointing.is_configured()
    assert checkpointing._settings == ActivationCheckpointingConfig()
    block = {"partition_activations": True, "cpu_checkpointing": True, "number_checkpoints": 4}
    source = {"train_batch_size": 8, "activation_checkpointing": block}
    for _ in range(2):
        checkpointing.configure(None, deepspeed_config=source, checkpoint_in_cpu=False, profile=False)
        checkpointing.configure(None, source, True, True, 2, synchronize=True, profile=True)
    assert checkpointing._settings == ActivationCheckpointingConfig(
        enabled=True, partition_activations=True, cpu_checkpointing=True
    )
    checkpointing.reset()
    assert checkpointing.is_configured()
    assert [record.message.partition(": ")[2] for record in caplog.records] == [
        "there is nothing to partition, since the model-parallel group has one rank. Every rank keeps the inputs of "
        "its own micro-batch.",
        "contiguous_checkpointing=True has no effect here and can be left out.",
        "num_checkpoints=2 has no effect here and can be left out.",
        "synchronize=True has no effect here and can be left out.",
        "profile=True has no effect here and can be left out.",
    ]
    x = torch.ones(2, requires_grad=True)
    checkpoint(torch.exp, x).sum().backward()
    assert torch.equal(x.grad, x.exp())


def test_only_the_first_rank_speaks(caplog, monkeypatch):
    monkeypatch.setenv("PMI_RANK", "1")
    checkpointing.configure(None, partition_activations=True)
    assert not caplog.records


def test_configured_wrongly():
    with pytest.raises(UnsupportedError, match="got a model-parallel group of 2 ranks, expected 1"):
        checkpointing.configure(types.SimpleNamespace(get_model_parallel_world_size=lambda: 2))
    with pytest.raises(ConfigError, match="partition_activations: got 'yes', expected true or false"):
        checkpointing.configure(None, partition_activations="yes")
    assert not checkpointing.is_configured()


# The engine


def trained(steps=3, **settings):
    model = made(Stack)
    config = Config(
        micro_batch_size=4,
        optimizer=OptimizerConfig(lr=1e-2),
        zero=ZeroConfig(stage=2, unit_numel=100),
        activation_checkpointing=ActivationCheckpointingConfig(**settings),
    )
    engine = zerocore.Engine(model, config)
    for _ in range(steps):
        engine.backward(engine(tokens()))
        engine.step()
    engine.close()
    return model


def test_the_engine_checkpoints_units_and_the_bits_are_the_same(caplog):
    with caplog.at_level(logging.WARNING):
        plain = trained()
        for settings in ({}, {"reentrant": True}, {"cpu_checkpointing": True}):
            model = trained(enabled=True, **settings)
            assert [block.calls for block in model.blocks] == [6, 6, 6]
            assert params_sha256(model) == params_sha256(plain)
            assert not any("forward" in module.__dict__ for module in model.modules())
    assert not caplog.records


def test_the_engine_says_once_that_there_is_nothing_to_partition(caplog):
    for _ in range(2):
        trained(steps=1, enabled=True, partition_activations=True)
    assert ["nothing to partition" in record.message for record in caplog.records] == [True]

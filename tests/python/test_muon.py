"""What Muon orthogonalises, by rule and by flags, and what it keeps."""

from __future__ import annotations

import pytest
import torch
import zerocore
from toy_models import SHARD_ALL, batch, make
from zerocore.config import Config, OptimizerConfig, ZeroConfig
from zerocore.errors import ConfigError, UnsupportedError

pytestmark = pytest.mark.usefixtures("one_thread")


class Model(torch.nn.Module):
    """Of each kind one: the names of those that are orthogonalised end in _m."""

    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(10, 6)
        self.bag = torch.nn.EmbeddingBag(10, 6)
        self.position_embeddings = torch.nn.Parameter(torch.randn(4, 6))
        self.conv_m = torch.nn.Conv2d(2, 3, 3)
        self.linear_m = torch.nn.Linear(6, 5)
        self.norm = torch.nn.LayerNorm(5)
        self.tied = torch.nn.Linear(6, 10, bias=False)
        self.tied.weight = self.tokens.weight
        self.lm_head = torch.nn.Linear(5, 3)
        self.empty = torch.nn.Parameter(torch.zeros(0, 2))


def build(model, *, model_parameters=None, stage=2, **hyper):
    config = Config(
        micro_batch_size=1,
        zero=ZeroConfig(stage=stage, **SHARD_ALL),
        optimizer=OptimizerConfig(type="muon", **hyper),
    )
    return zerocore.Engine(model, config, model_parameters=model_parameters)


def orthogonalised(engine):
    names = {id(p): name for name, p in engine.module.named_parameters()}
    return {names[id(p)] for group in engine.optimizer.param_groups if group["use_muon"] for p in group["params"]}


def test_matrices_are_what_is_neither_vector_nor_embedding_nor_head():
    engine = build(Model(), lr=1e-3, muon_lr=0.5, muon_momentum=0.9, weight_decay=0.1)
    assert orthogonalised(engine) == {"conv_m.weight", "linear_m.weight"}
    muon, adam = engine.optimizer.param_groups
    assert {key: muon[key] for key in ("lr", "momentum", "nesterov", "ns_steps", "weight_decay")} == {
        "lr": 0.5,
        "momentum": 0.9,
        "nesterov": True,
        "ns_steps": 5,
        "weight_decay": 0.1,
    }
    assert (adam["lr"], adam["betas"], adam["weight_decay"]) == (1e-3, (0.9, 0.999), 0.1)
    assert engine.get_lr() == [0.5, 1e-3]


def test_parameters_and_groups_may_say_what_they_want():
    model = Model()
    model.lm_head.weight.use_muon = True
    model.linear_m.weight.use_muon = False
    assert orthogonalised(build(model)) == {"conv_m.weight", "lm_head.weight"}
    model = Model()
    matrices = [model.linear_m.weight, model.lm_head.weight]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    groups = [
        {"params": matrices, "use_muon": True, "lr": 0.25},
        {"params": others, "use_muon": False, "lr": 0.125, "weight_decay": 0.5},
    ]
    engine = build(model, model_parameters=groups)
    assert orthogonalised(engine) == {"linear_m.weight", "lm_head.weight"}
    assert [(group["lr"], group["weight_decay"]) for group in engine.optimizer.param_groups] == [
        (0.25, 0.0),
        (0.125, 0.5),
    ]


def test_a_group_is_split_and_both_halves_keep_what_it_sets():
    model = Model()
    params = list(model.parameters())
    groups = [{"params": params[:5], "lr": 0.5, "weight_decay": 0.25}, {"params": params[5:]}]
    made = build(model, model_parameters=groups, muon_lr=0.1, lr=0.2).optimizer.param_groups
    assert [(group["use_muon"], group["lr"], group["weight_decay"]) for group in made] == [
        (True, 0.5, 0.25),
        (False, 0.5, 0.25),
        (True, 0.1, 0.0),
        (False, 0.2, 0.0),
    ]


def test_parameters_may_come_in_every_way_that_torch_takes():
    model = Model()
    expected = {"conv_m.weight", "linear_m.weight"}
    assert orthogonalised(build(model, model_parameters=model.named_parameters())) == expected
    model = Model()
    others = [p for name, p in model.named_parameters() if name != "linear_m.weight"]
    groups = [{"params": model.linear_m.weight, "name": "one"}, {"params": iter(others), "name": "others"}]
    engine = build(model, model_parameters=groups)
    assert orthogonalised(engine) == expected
    made = [(group["name"], group["use_muon"], len(group["params"])) for group in engine.optimizer.param_groups]
    assert made == [("one", True, 1), ("others", True, 1), ("others", False, len(others) - 1)]


def test_what_is_no_matrix_is_refused_by_name():
    model = Model()
    model.norm.weight.use_muon = True
    with pytest.raises(ConfigError, match=r"use_muon: norm.weight has the shape \(5,\), expected a matrix"):
        build(model)
    model = torch.nn.Conv2d(2, 3, 3)
    model.weight = torch.nn.Parameter(model.weight.detach().permute(1, 0, 2, 3))
    with pytest.raises(UnsupportedError, match=r"Muon: weight has the strides .*expected its first dimension"):
        build(model)


@pytest.mark.ranks(1, 2)
def test_each_keeps_its_own_state_and_no_more(world_size):
    engine = build(make("wide"), stage=1)
    weight, bias = engine.module.net[0].weight, engine.module.net[0].bias
    engine.backward(engine(*batch("wide", engine.rank, torch.float32)))
    engine.step()
    read = zerocore.utils.safe_get_full_optimizer_state
    assert read(weight, "momentum_buffer").abs().max() > 0
    assert read(bias, "exp_avg_sq").abs().max() > 0
    with pytest.raises(ConfigError, match=r'"exp_avg": got a name that muon does not have, .* \[.momentum_buffer.\]'):
        read(weight, "exp_avg")
    with pytest.raises(ConfigError, match='"momentum_buffer": got a name that muon does not have'):
        read(bias, "momentum_buffer")
    # 2 matrices of 5200 elements and 250 others, each kind in whole blocks of 1024 a rank
    blocks = {1: (12, 1), 2: (6, 1)}[world_size]
    assert engine.memory_report()["optimizer_state"] == 4 * 1024 * (blocks[0] + 2 * blocks[1])
    engine.close()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_matrix_that_lies_transposed_has_the_same_update(stage, world_size):
    """Its memory holds the transpose, whose products are the same but for the order of sums."""
    updated = []
    for transpose in (False, True):
        torch.manual_seed(2)
        model = torch.nn.Linear(30, 50, bias=False)
        if transpose:
            model.weight = torch.nn.Parameter(model.weight.detach().t().contiguous().t())
        engine = build(model, stage=stage, muon_lr=0.5)
        assert orthogonalised(engine) == {"weight"}
        for step in range(2):
            random = torch.Generator().manual_seed(step * world_size + engine.rank)
            engine.backward(engine(torch.randn(7, 30, generator=random)).square().mean())
            engine.step()
        with engine.unsharded():
            updated.append(model.weight.detach().clone())
        engine.close()
    torch.testing.assert_close(updated[1].contiguous(), updated[0], rtol=0, atol=1e-4)
    assert (updated[0] - torch.nn.Linear(30, 50).weight).abs().max() > 0.01


@pytest.mark.ranks(2)
def test_groups_may_have_other_numbers_of_iterations_and_change_between_steps():
    model = make("wide")
    engine = build(model)
    assert engine.optimizer.type == "muon"
    engine.optimizer.param_groups[0].update(lr=0.0, ns_steps=1)
    before = model.net[0].weight.detach().clone()
    engine.backward(engine(*batch("wide", engine.rank, torch.float32)))
    engine.step()
    assert torch.equal(model.net[0].weight, before)
    engine.close()

"""Which modules of a model become units, and which parameters they own."""

from __future__ import annotations

import pytest
import torch
import toy_models
from torch import nn
from zerocore._units import choose_units
from zerocore.errors import ConfigError


class Block(nn.Module):
    """A block with a list of plain layers in it, as most are."""

    def __init__(self, size=8):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.attention = nn.MultiheadAttention(size, 2)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))


class Gpt(nn.Module):
    def __init__(self, *, tied=False):
        super().__init__()
        self.tokens = nn.Embedding(50, 8)
        self.places = nn.Parameter(torch.zeros(16, 8))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 50, bias=False)
        if tied:
            self.head.weight = self.tokens.weight


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.down = nn.Linear(8, 8)


class Swin(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Stage() for _ in range(2))


class Holder(nn.Module):
    """Takes submodules and parameters by name."""

    def __init__(self, **members):
        super().__init__()
        for name, member in members.items():
            setattr(self, name, member)


class Called(Holder):
    def forward(self, x):
        return x


for _class in (Block, Gpt, Stage, Swin):
    _class.forward = Called.forward


def chosen(model, min_numel=100, **kwargs):
    """{unit: (its parameters' names, the name of the unit around it)}; checks what holds of all choices."""
    units = choose_units(model, min_numel=min_numel, **kwargs)
    names = {param: name for name, param in model.named_parameters()}
    modules = dict(model.named_modules(remove_duplicate=False))
    assert units[0].module is model
    assert (units[0].name, units[0].parent) == ("", None)
    assert all(modules[unit.name] is unit.module for unit in units)
    assert all(unit.parent < i and unit.params for i, unit in enumerate(units) if i)
    owned = [param for unit in units for param in unit.params]
    assert len(owned) == len(names) == len(set(owned))
    order = {name: i for i, name in enumerate(modules)}
    assert [unit.name for unit in units] == sorted((unit.name for unit in units), key=order.get)
    registered = {param: i for i, param in enumerate(model.parameters())}
    assert all([registered[p] for p in u.params] == sorted(registered[p] for p in u.params) for u in units)
    return {
        unit.name: (
            [names[param] for param in unit.params],
            None if unit.parent is None else units[unit.parent].name,
        )
        for unit in units
    }


def own(model, name):
    """What chosen() gives for a unit that takes everything below it and lies in the root."""
    module = model.get_submodule(name)
    return [f"{name}.{each}" for each, _ in module.named_parameters()], ""


def test_blocks_and_embeddings_are_units_and_the_root_takes_the_rest():
    model = Gpt()
    assert chosen(model) == {
        "": (["places", "norm.weight", "norm.bias"], None),
        **{name: own(model, name) for name in ("tokens", "blocks.0", "blocks.1", "blocks.2", "head")},
    }


def test_what_is_too_small_is_left_to_the_unit_around_it():
    model = Gpt()
    block = sum(p.numel() for p in model.blocks[0].parameters())
    assert list(chosen(model, min_numel=401)) == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert list(chosen(model, min_numel=block)) == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert list(chosen(model, min_numel=block + 1)) == [""]


def test_tied_parameters_belong_to_what_encloses_all_their_holders():
    model = Gpt(tied=True)
    units = chosen(model)
    assert units[""][0] == ["places", "tokens.weight", "norm.weight", "norm.bias"]
    assert list(units) == ["", "blocks.0", "blocks.1", "blocks.2"]

    pair = nn.ModuleList([nn.Linear(20, 20), nn.Linear(20, 20)])
    pair[1].weight = pair[0].weight
    inner = Called(pair=pair)
    model = Called(parts=nn.ModuleList([inner, nn.Linear(20, 20)]))
    assert chosen(model, classes=["Called", "Linear"]) == {"": (list(dict(model.named_parameters())), None)}
    assert chosen(model, names=["parts.*"])["parts.0"] == own(model, "parts.0")


def test_t5_keeps_its_shared_embedding_at_the_root():
    model = toy_models.make("t5")
    assert chosen(model) == {
        "": (["shared.weight"], None),
        "encoder": own(model, "encoder"),
        "decoder": own(model, "decoder"),
    }


def test_an_lstm_is_taken_whole():
    model = toy_models.make("lstm")
    assert chosen(model) == {"": ([], None), **{name: own(model, name) for name in ("embed", "rnn", "out")}}


def test_stages_hold_their_blocks_as_nested_units():
    model = Swin()
    units = chosen(model)
    assert list(units) == ["", *(f"layers.{i}{b}" for i in (0, 1) for b in ("", ".blocks.0", ".blocks.1"))]
    for i in (0, 1):
        assert units[f"layers.{i}"] == ([f"layers.{i}.down.weight", f"layers.{i}.down.bias"], "")
        assert units[f"layers.{i}.blocks.1"] == (own(model, f"layers.{i}.blocks.1")[0], f"layers.{i}")


def test_a_stage_without_parameters_of_its_own_is_no_unit():
    model = Swin()
    for stage in model.layers:
        del stage.down
    units = chosen(model)
    assert list(units) == ["", *(f"layers.{i}.blocks.{j}" for i in (0, 1) for j in (0, 1))]
    assert {parent for _, parent in units.values()} == {None, ""}


def test_members_of_a_sequential_are_units():
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 10), nn.Linear(10, 3))
    assert chosen(model) == {"": (["3.weight", "3.bias"], None), "0": own(model, "0"), "2": own(model, "2")}


def test_lists_without_a_forward_are_passed_through():
    blocks = nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleDict({"a": Block()})])
    weights = nn.ParameterList([torch.zeros(500), torch.zeros(500)])
    model = Called(blocks=blocks, weights=weights)
    assert list(chosen(model)) == ["", "blocks.0.0", "blocks.0.1", "blocks.1.a"]
    assert chosen(model)[""][0] == ["weights.0", "weights.1"]


def test_a_block_registered_twice_owns_its_parameters():
    block = Block()
    model = Called(first=nn.ModuleList([block, Block()]), second=nn.ModuleList([block]))
    assert chosen(model) == {"": ([], None), "first.0": own(model, "first.0"), "first.1": own(model, "first.1")}


def test_a_layer_shared_by_two_blocks_belongs_to_what_encloses_both():
    shared = nn.Linear(20, 20)
    blocks = nn.ModuleList(Called(own=nn.Linear(20, 20), shared=shared) for _ in range(2))
    units = chosen(Called(blocks=blocks))
    assert units[""][0] == ["blocks.0.shared.weight", "blocks.0.shared.bias"]
    assert units["blocks.1"] == (["blocks.1.own.weight", "blocks.1.own.bias"], "")


def test_a_parameter_used_outside_its_module_belongs_to_what_encloses_its_uses():
    model = Gpt()
    other = nn.Linear(3, 3)
    external = {model.head: [model.tokens.weight], model.blocks[1]: [model.blocks[1].norm.bias], other: [other.weight]}
    units = chosen(model, external={**external, model.norm: [other.weight]})
    assert "tokens.weight" in units[""][0]
    assert list(units) == ["", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert units["blocks.1"] == own(model, "blocks.1")

    swin = Swin()
    external = {swin.layers[0].blocks[0]: [swin.layers[0].blocks[1].norm.weight]}
    assert "layers.0.blocks.1.norm.weight" in chosen(swin, external=external)["layers.0"][0]


def test_a_model_of_one_layer_is_one_unit():
    for model in (nn.Linear(50, 50), nn.LSTM(8, 8), Called(weight=nn.Parameter(torch.zeros(1000)))):
        assert list(chosen(model)) == [""]
    assert chosen(nn.Identity()) == {"": ([], None)}


def test_a_wrapper_stands_for_the_model_in_it():
    model = Called(wrapped=Called(embed=nn.Embedding(50, 8), body=nn.LSTM(8, 8)))
    assert list(chosen(model)) == ["", "wrapped.embed", "wrapped.body"]


def test_named_classes_are_units_whole_whatever_their_size():
    model = Swin()
    for classes in (["Stage"], [f"{Stage.__module__}.Stage"]):
        assert list(chosen(model, min_numel=10**9, classes=classes)) == ["", "layers.0", "layers.1"]
    assert chosen(model, min_numel=10**9, classes=["LayerNorm"])["layers.0.blocks.1.norm"] == own(
        model, "layers.0.blocks.1.norm"
    )
    assert list(chosen(model, classes=["Swin"])) == [""]


def test_named_modules_are_units_whole():
    model = Gpt()
    assert list(chosen(model, min_numel=10**9, names=["blocks.1", "n*m"])) == ["", "blocks.1", "norm"]
    units = chosen(model, names=["blocks.*.mlp"])
    assert units["blocks.2.mlp"] == (own(model, "blocks.2.mlp")[0], "blocks.2")
    assert "blocks.2.attention.out_proj.weight" in units["blocks.2"][0]
    assert list(chosen(model, names=["*"])) == ["", "tokens", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]
    assert list(chosen(model, names=[""])) == [""]


def test_a_hugging_face_models_own_word_is_taken():
    model = Swin()
    model._no_split_modules = {"Stage", "NotThere"}
    assert list(chosen(model)) == ["", "layers.0", "layers.1"]
    assert list(chosen(Called(inner=model, other=nn.Linear(1, 1)))) == ["", "inner.layers.0", "inner.layers.1"]
    assert len(chosen(model, classes=["Block"])) == 1 + 2 + 4
    model._no_split_modules = None
    assert len(chosen(model)) == 1 + 2 + 4


def test_modules_wrapped_by_torch_compile_are_seen_through():
    model = Gpt()
    model.blocks[1] = torch.compile(model.blocks[1])
    expected = ["", "blocks.0", "blocks.1", "blocks.2"]
    assert list(chosen(model, min_numel=500)) == expected
    assert list(chosen(model, min_numel=10**9, classes=["Block"])) == expected
    compiled = torch.compile(model)
    assert list(chosen(compiled, min_numel=500)) == ["", *(f"_orig_mod.{name}" for name in expected[1:])]
    assert list(chosen(compiled, min_numel=10**9, names=["blocks.?"])) == list(chosen(compiled, min_numel=500))


def test_parametrizations_stay_with_their_module():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(20, 20))
    model = Called(
        blocks=nn.ModuleList([Called(layer=layer)]), out=nn.utils.parametrizations.weight_norm(nn.Linear(20, 9))
    )
    assert list(chosen(model)) == ["", "blocks.0", "out"]


def test_the_choice_is_the_same_each_time():
    model = Swin()
    assert chosen(model) == chosen(model)


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        (
            {"classes": ["Blok"]},
            "[zero] unit_classes: got 'Blok', which is in no module of the model, expected the class of one, such as "
            "Block. Correct or remove it.",
        ),
        (
            {"classes": ["Block", "Qqq"]},
            "[zero] unit_classes: got 'Qqq', which is in no module of the model, expected the class of one, such as "
            "Gpt, Embedding, Block. Correct or remove it.",
        ),
        (
            {"names": ["layers.*"]},
            "[zero] unit_names: got 'layers.*', which is in no module of the model, expected the name of one, such as "
            "tokens, blocks.0, blocks.0.norm. Correct or remove it.",
        ),
        (
            {"names": ["blocks"]},
            "[zero] unit_names: got 'blocks', which is a ModuleList without a forward, expected the name of a module "
            "that is called. Name its members.",
        ),
        (
            {"classes": ["ModuleList"]},
            "[zero] unit_classes: got 'ModuleList', which is a ModuleList without a forward, expected the class of a "
            "module that is called. Name its members.",
        ),
    ],
)
def test_a_class_or_name_that_matches_nothing_is_an_error(kwargs, text):
    with pytest.raises(ConfigError) as caught:
        choose_units(Gpt(), min_numel=100, **kwargs)
    assert str(caught.value) == text

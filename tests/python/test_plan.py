"""`zerocore plan`: the bytes of an engine that is there, without building one."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch
import toy_models
import zerocore
from zerocore import utils
from zerocore._cli import main
from zerocore._plan import build_model, plan
from zerocore.config import Config, OptimizerConfig, PrecisionConfig, ZeroConfig
from zerocore.errors import ConfigError

WHILE_RUNNING = {"gradient_buckets", "gathered_parameters"}


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(200, 300), torch.nn.GELU(), torch.nn.Linear(300, 200))

    def forward(self, x):
        return x + self.net(x)


class Blocks(torch.nn.Module):
    """Units, a frozen one, a tied weight, small parameters, and buffers of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(50, 200)
        self.blocks = torch.nn.Sequential(Block(), Block(), Block())
        self.blocks[1].requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(200)
        self.head = torch.nn.Linear(200, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.table(x)))).float().square().mean()


def no_model():
    return "no model"


def broken_model():
    raise TypeError("no such width")


def settings(stage, dtype, optimizer):
    zero = ZeroConfig(
        stage=stage, unit_numel=10_000, persistent_param_numel=400, bucket_numel=100_000, max_live_numel=200_000
    )
    return Config(
        micro_batch_size=4, zero=zero, precision=PrecisionConfig(**dtype), optimizer=OptimizerConfig(**optimizer)
    )


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("dtype", "optimizer"),
    [
        ({}, {}),
        ({"dtype": "bf16"}, {"type": "sgd", "lr": 0.1, "momentum": 0.9}),
        ({"compute_dtype": "bf16", "reduce_dtype": "fp32"}, {"type": "sgd", "lr": 0.1}),
        ({"dtype": "bf16", "accumulate_dtype": "bf16"}, {}),
    ],
)
def test_it_equals_the_memory_report(stage, dtype, optimizer, world_size):
    config = settings(stage, dtype, optimizer)
    with torch.device("meta"):
        planned = plan(Blocks(), config, world_size)
    engine = zerocore.Engine(Blocks(), config)
    for _ in range(2):
        engine.backward(engine(torch.arange(4)))
        engine.step()
    report = engine.memory_report()
    for name in WHILE_RUNNING:
        assert report.pop(name) <= planned.most[name]
    assert report.pop("checkpoint_snapshot") == 0
    report.pop("messages")  # how ranks are connected decides
    assert planned.kept == report
    assert set(planned.most) == WHILE_RUNNING
    engine.close()


@pytest.mark.ranks(2)
def test_a_plan_holds_for_each_rank():
    """The matrix that costs Muon most is not the one that takes most memory, and they are different ranks'."""
    config = settings(2, {}, {"type": "muon"})

    def model():
        return torch.nn.Sequential(torch.nn.Linear(100, 100, bias=False), torch.nn.Linear(3000, 10, bias=False))

    with torch.device("meta"):
        planned = plan(model(), config, 2)
    engine = zerocore.Engine(model(), config)
    report = engine.memory_report()
    assert {name: report[name] for name in planned.kept} == planned.kept
    engine.close()


@pytest.mark.ranks(2)
def test_what_comes_to_it_is_reached(one_thread):
    """The bounds are no larger than they need be."""
    config = settings(3, {}, {})
    planned = plan(Blocks(), config, 2)
    engine = zerocore.Engine(Blocks(), config)
    loss = engine(torch.arange(4))
    assert engine.memory_report()["gathered_parameters"] > planned.most["gathered_parameters"] / 2
    engine.backward(loss)
    engine.step()
    assert engine.memory_report()["gradient_buckets"] == planned.most["gradient_buckets"]
    engine.close()


def test_a_model_that_no_machine_holds():
    """A trillion parameters on 1024 ranks: neither parameters nor states are ever allocated."""
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(100_000, 100_000, bias=False) for _ in range(100)))
    planned = plan(model, Config(micro_batch_size=1, zero=ZeroConfig(stage=1, bucket_numel=1)), 1024)
    shard = -(-(10**10) // (1024 * 1024)) * 1024 * 100  # norm blocks are not cut
    assert planned.kept["parameters"] == 4 * 1024 * shard
    assert planned.kept["optimizer_state"] == 8 * shard


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeeds_estimates_are_what_an_engine_holds(stage, capsys):
    """And the model stays as it is: a second answer, and its training, are those of the first."""
    model = Blocks()
    before = {name: (value.dtype, value.clone()) for name, value in model.state_dict().items()}
    for _ in range(2):
        getattr(utils, f"estimate_zero{stage}_model_states_mem_needs_all_live")(model, num_gpus_per_node=1, num_nodes=1)
        lines, table = lines_of(capsys)
        assert lines[0] == "Blocks: 371,900 parameters; 1 nodes of 1 ranks; bf16, AdamW"
    for name, value in model.state_dict().items():
        assert value.dtype == before[name][0] and torch.equal(value, before[name][1])
    precision, zero = PrecisionConfig(dtype="bf16"), ZeroConfig(stage=stage)
    engine = zerocore.Engine(model, Config(micro_batch_size=1, precision=precision, zero=zero))
    report = engine.memory_report()
    named = {name: count for name, (count,) in table.items() if name in report}
    assert {"parameters", "master_weights", "optimizer_state", "buffers"} <= named.keys()
    assert named == {name: report[name] for name in named}
    assert table["between steps"] == [sum(named.values())]
    engine.close()


def test_deepspeeds_estimates_of_a_model_that_is_nowhere(capsys):
    """4 billion parameters on 64 ranks: 2 bytes of the model whole or sharded, 16 of the states sharded."""
    total, largest, ranks = 2**32, 2**26, 64
    utils.estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node=8, num_nodes=8)
    _, table = lines_of(capsys)
    assert table["parameters"] == [2 * total] and table["optimizer_state"] == [8 * total // ranks]
    utils.estimate_zero3_model_states_mem_needs_all_cold(total, largest, num_gpus_per_node=8, num_nodes=8)
    lines, table = lines_of(capsys)
    assert lines[0] == f"Sequential: {total:,} parameters; 8 nodes of 8 ranks; bf16, AdamW"
    assert table["between steps"] == [18 * total // ranks]
    assert table["gathered_parameters, at most"][0] >= 2 * largest
    with pytest.raises(ConfigError, match=r"got 5 parameters, 6 of them in the largest layer"):
        utils.estimate_zero3_model_states_mem_needs_all_cold(5, 6)


# The command

UNITS = {  # as in settings()
    "reduce_bucket_size": 1e5,
    "stage3_module_granularity_threshold": 1e4,
    "stage3_param_persistence_threshold": 400,
    "stage3_max_live_parameters": 2e5,
}


@pytest.fixture
def config_file(tmp_path):
    def write(**blocks):
        path = tmp_path / "ds.json"
        path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, **blocks}))
        return str(path)

    return write


def lines_of(capsys):
    lines = capsys.readouterr().out.splitlines()
    return lines, {
        match[1]: [int(value.replace(",", "")) for value in match[2].split()]
        for line in lines
        if (match := re.fullmatch(r"([a-z_ ,]+?)\s{2,}([\d,]+(\s+[\d,]+)*)", line))
    }


def test_the_command(config_file, capsys):
    zero = {"stage": 3, "overlap_comm": True, "offload_param": {"device": "auto"}}
    path = config_file(zero_optimization=zero | UNITS, gradient_clipping=1)
    assert main(["plan", path, "--model", "test_plan:Blocks", "--ranks", "4", "--gpu-mem", "2.7MB"]) == 0
    lines, table = lines_of(capsys)
    assert "  zero_optimization.stage 3: sets zero.stage" in lines
    assert "  gradient_clipping 1.0: sets gradient_clipping" in lines
    assert "  zero_optimization.overlap_comm: reduction always overlaps the backward" in lines
    assert lines[lines.index('"auto", counts as not given:') + 1] == "  zero_optimization.offload_param.device"
    assert "Blocks: 371,900 parameters, 251,400 of them trained; 4 ranks" in lines
    assert "no optimizer in the configuration: AdamW" in lines
    for stage in range(4):
        planned = plan(Blocks(), dataclasses.replace(settings(stage, {}, {}), optimizer=None), 4)
        assert {name: table[name][stage] for name in planned.kept} == planned.kept
        assert table["between steps"][stage] == sum(planned.kept.values())
        assert table["in a step, at most"][stage] == planned.bytes
    total = table["in a step, at most"]
    assert total[0] > total[1] == total[2] > total[3]

    def what_fits(size):
        code = main(["plan", path, "--model", "test_plan:Blocks", "--ranks", "4", "--gpu-mem", str(size)])
        return code, "\n".join(lines_of(capsys)[0])

    for stage in (0, 1, 3):
        code, text = what_fits(total[stage])
        assert code == 0
        assert f'first that fits into {total[stage]:,} bytes: "zero_optimization": {{"stage": {stage}}}' in text
        assert "the configuration's own stage 3 fits" in text
    code, text = what_fits(total[3] - 1)
    assert code == 1 and "on 4 ranks; on 8 ranks a stage does" in text
    code, text = what_fits(1000)
    assert code == 1 and "nothing fits into 1,000 bytes, whatever the number of ranks" in text


def test_a_configuration_for_trainer(config_file, capsys):
    """ "auto" is as good as a number where the number decides nothing."""
    path = config_file(
        train_batch_size="auto",
        train_micro_batch_size_per_gpu="auto",
        gradient_accumulation_steps="auto",
        bf16={"enabled": "auto"},
        optimizer={"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}},
        zero_optimization={"stage": 2, "reduce_bucket_size": "auto"},
    )
    assert main(["plan", path, "--model", "toy_models:Wide", "--ranks", "64"]) == 0
    lines, table = lines_of(capsys)
    assert len(table["parameters"]) == 4 and "first that fits" not in "\n".join(lines)


def test_refused_keys_are_listed(config_file, capsys):
    path = config_file(elasticity={"enabled": True}, gradient_clipping=1)
    assert main(["plan", path, "--model", "toy_models:Wide"]) == 1
    printed = capsys.readouterr()
    assert "  gradient_clipping 1.0: sets gradient_clipping" in printed.out
    assert "refused:\n  elasticity: got" in printed.out
    assert "keys are refused. Mend those first." in printed.err


def test_a_stage_that_the_model_does_not_fit_says_so(config_file, capsys):
    path = config_file(zero_optimization=UNITS | {"stage": 3, "stage3_max_live_parameters": 5000})
    assert main(["plan", path, "--model", "test_plan:Blocks", "--gpu-mem", "1G"]) == 0
    lines, table = lines_of(capsys)
    assert len(table["parameters"]) == 3
    assert any(line.startswith('stage 3: [zero] unit "') for line in lines)
    assert lines[-1] == "the configuration's own stage 3 does not fit"


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("no_such_module:f", "got No module named 'no_such_module', expected module:function, which returns a model"),
        ("toy_models:no_such", "no_such"),
        ("test_plan:no_model", "got str, expected a torch.nn.Module"),
        ("test_plan:broken_model", "got TypeError: no such width, expected it to be built on the meta device"),
        ("/no/such/folder", "expected module:function"),
    ],
)
def test_what_is_no_model_says_so(config_file, capsys, spec, text):
    assert main(["plan", config_file(), "--model", spec]) == 2
    assert text in capsys.readouterr().err


def test_a_hugging_face_model(tmp_path):
    transformers = pytest.importorskip("transformers", "5", reason="needs Hugging Face: pip install 'transformers>=5'")
    transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path)
    model = build_model(str(tmp_path))
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert {p.device.type for p in model.parameters()} == {"meta"}
    transformers.BertConfig(hidden_size=32, num_attention_heads=2, intermediate_size=8).save_pretrained(tmp_path)
    assert type(build_model(str(tmp_path))).__name__ == "BertModel"


def test_toy_models_can_be_planned():
    for name in ("Odd", "Wide", "Cnn", "Lstm"):
        planned = plan(build_model(f"toy_models:{name}"), Config(micro_batch_size=1), 3)
        numel = sum(p.numel() for p in getattr(toy_models, name)().parameters())
        assert planned.kept["parameters"] + planned.kept["frozen_parameters"] >= 4 * numel

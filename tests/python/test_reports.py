"""Monitors, times, FLOPs and collectives: what they write and print, on rank 0 only."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import sys
import types
from pathlib import Path

import pytest
import torch
import zerocore
from torch import nn
from zerocore import _comm, _exchange, utils
from zerocore.errors import ConfigError, IoError

NAMES = ("train_loss", "lr", "loss_scale")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 16)
        self.blocks = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16, bias=False))
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(self.blocks(self.table(x))).float().square().mean() + self.table.weight.float().sum()


def make_engine(**blocks):
    torch.manual_seed(1)
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.25}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}},
    }
    return zerocore.Engine(Model(), config | blocks)


def train(engine, steps):
    """The mean loss of this rank's micro-batches, and the learning rate after it, of each step."""
    seen = []
    for step in range(steps):
        losses = []
        for micro_step in range(2):
            loss = engine(torch.arange(3) + step + micro_step + engine.rank)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        seen.append((sum(losses) / 2, engine.get_lr()[0]))
    return seen


@pytest.fixture
def folder(tmp_path):
    """The same on all ranks."""
    return Path(_exchange.broadcast_json(_comm.world(), str(tmp_path), "path"))


def rows(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


# Monitors


@pytest.mark.ranks(1, 2)
def test_csv_has_what_rank_0_saw(folder, world_size):
    block = {"enabled": True, "output_path": str(folder / "logs"), "job_name": "run"}
    engine = make_engine(csv_monitor=block, fp16={"enabled": True, "loss_scale": 8}, zero_optimization={"stage": 2})
    seen = train(engine, 3)
    engine.close()
    if engine.rank == 0:
        found = {name: rows(folder / "logs" / "run" / f"Train_Samples_{name}.csv") for name in NAMES}
        assert [each[0] for each in found.values()] == [["step", name] for name in NAMES]
        samples = [str(6 * world_size * step) for step in (1, 2, 3)]
        assert [[row[0] for row in each[1:]] for each in found.values()] == [samples] * 3
        assert [float(row[1]) for row in found["train_loss"][1:]] == [loss for loss, _ in seen]
        assert [float(row[1]) for row in found["lr"][1:]] == [lr for _, lr in seen]
        assert [float(row[1]) for row in found["loss_scale"][1:]] == [8.0] * 3
        assert len(list((folder / "logs" / "run").iterdir())) == 3


def test_csv_without_fp16_has_no_loss_scale_and_a_run_that_goes_on_appends(folder):
    for _ in range(2):
        engine = make_engine(csv_monitor={"enabled": True, "output_path": str(folder), "job_name": "run"})
        train(engine, 1)
        engine.close()
    assert not (folder / "run" / "Train_Samples_loss_scale.csv").exists()
    assert [row[0] for row in rows(folder / "run" / "Train_Samples_lr.csv")] == ["step", "6", "6"]


def test_the_loss_is_the_mean_however_it_was_divided(folder):
    """Summed over tokens, divided by the user, or neither: what is told is the mean of the step."""
    found = []
    for weight, scale_wrt_gas in ((None, True), (None, False), (3, True)):
        name = str(len(found))
        engine = make_engine(csv_monitor={"enabled": True, "output_path": str(folder), "job_name": name})
        for micro_step in range(2):
            loss = engine(torch.arange(3) + micro_step)
            loss = loss * weight if weight else loss if scale_wrt_gas else loss / 2
            engine.backward(loss, scale_wrt_gas=scale_wrt_gas, weight=weight)
            engine.step()
        engine.close()
        found.append(float(rows(folder / name / "Train_Samples_train_loss.csv")[1][1]))
    assert found[1:] == [pytest.approx(found[0], rel=1e-6)] * 2


def test_a_folder_that_cannot_be_made_is_named(folder):
    (folder / "file").write_text("")
    with pytest.raises(IoError, match=re.escape(str(folder / "file"))):
        make_engine(csv_monitor={"enabled": True, "output_path": str(folder / "file"), "job_name": "run"})


def test_what_is_disabled_writes_nothing(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    off = {"enabled": False, "output_path": "logs"}
    blocks = {name: off for name in ("tensorboard", "csv_monitor")} | {"wandb": {"enabled": False}}
    engine = make_engine(**blocks, flops_profiler={"enabled": False}, comms_logger={"enabled": False})
    train(engine, 2)
    engine.close()
    assert list(folder.iterdir()) == [] and capsys.readouterr().out == ""


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("block", ["tensorboard", "wandb"])
def test_a_library_that_is_missing_is_named_on_every_rank(block, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == block else find(name))
    with pytest.raises(ConfigError, match=f"the package {block}, which is not installed. pip install {block}, or"):
        make_engine(**{block: {"enabled": True}})


def test_tensorboard_has_the_events(folder):
    pytest.importorskip("tensorboard", reason="needs TensorBoard: pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    engine = make_engine(tensorboard={"enabled": True, "output_path": str(folder), "job_name": "run"})
    seen = train(engine, 2)
    engine.close()
    events = EventAccumulator(str(folder / "run"))
    events.Reload()
    assert events.Tags()["scalars"] == ["Train/Samples/train_loss", "Train/Samples/lr"]
    losses = [(event.step, event.value) for event in events.Scalars("Train/Samples/train_loss")]
    assert losses == [(6 * (i + 1), torch.tensor(loss).item()) for i, (loss, _) in enumerate(seen)]


def test_wandb_is_told_the_events(monkeypatch):
    """Of a stand-in: its project, and one log a step; offline unless the environment says otherwise."""
    told = []
    run = types.SimpleNamespace(log=lambda values, step: told.append((step, values)), finish=lambda: told.append("end"))
    stand_in = types.ModuleType("wandb")
    stand_in.__spec__ = importlib.util.spec_from_loader("wandb", None)
    stand_in.init = lambda **settings: told.append(settings) or run
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    engine = make_engine(wandb={"enabled": True, "project": "p", "team": "t"})
    ((loss, lr),) = train(engine, 1)
    engine.close()
    assert told == [
        {"project": "p", "group": None, "entity": "t", "mode": "offline"},
        (6, {"Train/Samples/train_loss": loss, "Train/Samples/lr": lr}),
        "end",
    ]
    monkeypatch.setenv("WANDB_MODE", "disabled")
    make_engine(wandb={"enabled": True}).close()
    assert told[3] == {"project": "deepspeed", "group": None, "entity": None, "mode": "disabled"}


def test_wandb_writes_a_run_offline(folder, monkeypatch):
    pytest.importorskip("wandb", reason="needs Weights & Biases: pip install wandb")
    monkeypatch.chdir(folder)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    engine = make_engine(wandb={"enabled": True, "project": "p"})
    train(engine, 1)
    engine.close()
    assert list(folder.glob("wandb/offline-run-*/run-*.wandb"))


# Times


LINE = r"\[engine\] step (\d+): forward [\d.]+ ms, backward [\d.]+ ms, step [\d.]+ ms; mean of (\d+) steps, rank 0"


@pytest.mark.ranks(1, 2)
def test_wall_clock_breakdown_prints_every_so_many_steps(capsys):
    engine = make_engine(wall_clock_breakdown=True, steps_per_print=2)
    train(engine, 5)
    lines = capsys.readouterr().out.splitlines()
    found = [re.fullmatch(LINE, line) for line in lines]
    assert [match.groups() for match in found] == ([("2", "2"), ("4", "2")] if engine.rank == 0 else [])
    engine.close()


def test_wall_clock_breakdown_prints_each_step_without_a_number(capsys):
    engine = make_engine(wall_clock_breakdown=True)
    train(engine, 2)
    assert [re.fullmatch(LINE, line).groups() for line in capsys.readouterr().out.splitlines()] == [
        ("1", "1"),
        ("2", "1"),
    ]
    engine.close()


def test_wall_clock_breakdown_has_the_time_of_all_micro_batches(capsys, monkeypatch):
    """By a clock that a call takes one millisecond of."""
    ticks = iter(range(10**6))
    monkeypatch.setattr(zerocore._profile.time, "perf_counter_ns", lambda: next(ticks) * 10**6)
    engine = make_engine(wall_clock_breakdown=True)
    train(engine, 1)
    assert "forward 2.00 ms, backward 2.00 ms, step 2.00 ms; mean of 1 steps" in capsys.readouterr().out
    engine.close()


# FLOPs


def numbers(text):
    return [int(number.replace(",", "")) for number in re.findall(r"(?<=\s)[\d,]+(?=\s|$)", text)]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 3])
def test_the_flops_profiler_prints_one_forward(stage, capsys):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_module_granularity_threshold": 100}
    engine = make_engine(flops_profiler={"enabled": True, "profile_step": 1}, zero_optimization=zero)
    train(engine, 1)
    assert capsys.readouterr().out == ""
    train(engine, 2)
    lines = capsys.readouterr().out.splitlines()
    if engine.rank == 0:
        assert lines[0] == "[flops profiler] step 1, rank 0: the forward of a micro-batch"
        flops = 2 * 3 * 16 * 32 * 2  # two matrices times three rows, a multiplication and an addition each
        assert lines[1] == "  parameters              1,248"
        assert lines[2] == f"  forward, FLOPs          {flops:,}"
        assert re.fullmatch(r"  forward, latency        [\d.]+ ms, with the counting", lines[3])
        assert f"{3 * flops:,} FLOPs" in lines[5]
        assert "    1: params   blocks (Sequential) 1,056" in lines
        assert f"    2: flops    blocks.0 (Linear) {flops // 2:,}" in lines
        tree = {line.split("(")[0].strip(): numbers(line.partition(")")[2])[:2] for line in lines[-7:]}
        assert tree == {
            "model": [1248, flops],
            "table": [160, 0],
            "blocks": [1056, flops],
            "0": [544, flops // 2],
            "1": [0, 0],
            "2": [512, flops // 2],
            "norm": [32, 0],
        }
    else:
        assert lines == []
    engine.close()


def test_the_flops_profiler_as_it_is_asked_for(folder, capsys):
    block = {"enabled": True, "profile_step": 0, "module_depth": 1, "top_modules": 2, "detailed": False}
    engine = make_engine(flops_profiler=block | {"output_file": str(folder / "flops.txt"), "recompute_fwd_factor": 1})
    train(engine, 1)
    lines = (folder / "flops.txt").read_text().splitlines()
    assert capsys.readouterr().out == ""
    assert len(lines) == 10 and f"{4 * 6144:,} FLOPs" in lines[5]
    assert lines[7] == "    1: params   blocks (Sequential) 1,056, table (Embedding) 160"
    engine.close()
    engine = make_engine(flops_profiler={"enabled": True, "profile_step": -1})
    train(engine, 2)
    assert capsys.readouterr().out == ""
    engine.close()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_reports_change_no_bit(folder, checkpointing):
    blocks = {"activation_checkpointing": {"number_checkpoints": 1}} if checkpointing else {}
    plain = make_engine(**blocks)
    train(plain, 3)
    told = make_engine(
        flops_profiler={"enabled": True},
        csv_monitor={"enabled": True, "output_path": str(folder)},
        wall_clock_breakdown=True,
        comms_logger={"enabled": True},
        **blocks,
    )
    train(told, 3)
    assert utils.params_sha256(plain.module) == utils.params_sha256(told.module)
    assert not any(module._forward_pre_hooks for module in told.module.blocks)


# Collectives


@pytest.mark.ranks(1, 2)
def test_log_summary_counts_from_the_communicators(capsys, world_size):
    engine = make_engine(comms_logger={"enabled": True}, zero_optimization={"stage": 2})
    train(engine, 2)
    report = engine.comm_report()
    engine.log_summary()
    lines = capsys.readouterr().out.splitlines()
    if engine.rank == 0:
        assert lines[0] == "[engine] collectives of rank 0 in 2 steps"
        assert lines[1].split() == ["collective", "calls", "bytes", "total", "ms", "mean", "ms", "GB/s"]
        table = {line.split()[0]: line.split()[1:] for line in lines[2:]}
        assert {op: int(row[0]) for op, row in table.items()} == {
            op: count["calls"] for op, count in report.items() if count["calls"]
        }
        buckets = engine._params.core.num_buckets()
        if world_size > 1:
            sums = table["reduce_scatter_add"]
            assert int(sums[0]) == 4 * buckets
            assert int(sums[1].replace(",", "")) == 4 * report["reduce_scatter_add"]["elements"]  # fp32
            assert float(sums[2]) > 0 and float(table["all_gather"][2]) > 0
    else:
        assert lines == []
    engine.close()


def test_log_summary_without_times_says_how():
    engine = make_engine()
    with pytest.raises(ConfigError, match=re.escape('Set "comms_logger": {"enabled": true}.')):
        engine.log_summary()
    engine.close()


@pytest.mark.ranks(2)
def test_a_collective_takes_until_its_peers_have_come():
    """The time is that from the call to the end: here the other rank comes a tenth of a second later."""
    import time

    comm = _comm.world().split(0, _comm.world().rank)
    comm.time_calls()
    child = comm.split(0, comm.rank)
    if comm.rank == 1:
        time.sleep(0.1)
    child.barrier("meet").wait()
    calls, size, nanoseconds = child.traffic()["barrier"]
    assert (calls, size) == (1, 0)
    if comm.rank == 0:
        assert 0.05e9 < nanoseconds < 30e9
    assert json.dumps(comm.traffic()["barrier"]) == "[0, 0, 0]"

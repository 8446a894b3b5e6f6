"""The step benchmark: it runs every engine that is installed, verifies their losses, and writes what it prints."""

from __future__ import annotations

import json
import sys
from argparse import Namespace

import bench_step
import pytest

# Not DeepSpeed, which may be installed: it would compile for minutes.
ENGINES = [*(f"zerocore stage {stage}" for stage in range(4)), "DDP", "FSDP2"]
TINY = "--layers=1 --hidden=32 --heads=2 --seq=16 --vocab=64 --micro-batch=2 --steps=2 --blocks=3"


def run(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["bench_step.py", *TINY.split(), *flags])
    return bench_step.main()


def test_all_engines_train_the_same_and_the_figures_are_written(monkeypatch, tmp_path, capsys):
    file = tmp_path / "figures.json"
    assert run(monkeypatch, "--no-memory", "--json", str(file), "--engines", *ENGINES) == 0
    rows = {row["engine"]: row for row in json.loads(file.read_text())["rows"]}
    assert list(rows) == ["bare torch", *ENGINES]
    for row in rows.values():
        assert len(row["ratios"]) == 3
        assert 0 < row["ratio_lowest"] <= row["ratio_to_bare"] <= row["ratio_highest"]
        assert row["tokens_per_s"] == pytest.approx(2 * 2 * 16 / row["step_ms"] * 1e3)
        assert 3 < row["loss"] < 5
    assert "zerocore stage 2" in capsys.readouterr().out


def test_memory_is_measured_in_jobs_of_their_own(monkeypatch, tmp_path):
    file = tmp_path / "figures.json"
    assert run(monkeypatch, "--json", str(file), "--engines", "zerocore stage 1") == 0
    for row in json.loads(file.read_text())["rows"]:
        assert 50e6 < row["libraries_pss_bytes"] < row["peak_pss_bytes"] < 2e9


def test_one_step_of_one_engine_is_profiled(monkeypatch, tmp_path):
    file = tmp_path / "trace.json"
    engines = ["zerocore stage 3", "DDP"]
    assert run(monkeypatch, "--no-memory", "--blocks=1", "--profile", str(file), "--engines", *engines) == 0
    events = json.loads(file.read_text())["traceEvents"]
    assert [event["name"] for event in events].count("forward") == 2  # one a rank
    assert any(event["name"] == "wait for unit blocks.0" for event in events)
    with pytest.raises(SystemExit):
        run(monkeypatch, "--profile", str(file), "--engines", "zerocore stage 0", "zerocore stage 3")


@pytest.mark.parametrize(("loss", "code"), [(4.001, 0), (4.01, 1), (float("nan"), 1)])
def test_losses_that_differ_fail(capsys, loss, code):
    args = Namespace(
        ranks=2, threads=1, layers=1, hidden=1, seq=1, micro_batch=1, vocab=1, steps=1, blocks=1, json=None
    )
    losses = {"bare torch": 9.0, "DDP": 4.0, "FSDP2": loss}
    times = {name: {"seconds": [1.0], "ratios": [1.0], "loss": value} for name, value in losses.items()}
    assert bench_step.report(args, times, memory={}) == code
    assert ("NOT as expected" in capsys.readouterr().out) == (code == 1)

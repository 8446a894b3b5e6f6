"""The benchmark of collectives: on several ranks, its figures, and that a wrong result is found."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import bench_collectives
import pytest
import torch


@pytest.mark.parametrize("ranks", [2, 3])
def test_it_verifies_and_times_every_library(monkeypatch, tmp_path, capsys, ranks):
    file = tmp_path / "figures.json"
    flags = f"--ranks {ranks} --sizes 96 12288 --rounds 2 --json {file}"
    monkeypatch.setattr(sys, "argv", ["bench_collectives.py", *flags.split()])
    assert bench_collectives.main() == 0
    rows = {(row["operation"], row["library"], row.get("bytes")): row for row in json.loads(file.read_text())["rows"]}
    libraries = ["zerocore", "gloo", "MPI", "floor"]
    buffers = ["reduce_scatter", "all_gather", "all_reduce"]
    expected = [(operation, library, size) for operation in buffers for library in libraries for size in (96, 12288)]
    assert list(rows) == [*expected, *(("barrier", library, None) for library in libraries[:3])]
    for (operation, library, size), row in rows.items():
        assert len(row["seconds"]) == 2 and min(row["seconds"]) > 0
        if size is None:
            continue
        assert row["algbw_GBps"] == pytest.approx(size / row["time_us"] / 1e3)
        links = {"all_reduce": 2}.get(operation, 1) * (ranks - 1) / ranks
        assert row["busbw_GBps"] == pytest.approx(links * row["algbw_GBps"])
        assert library != "floor" or row["of_floor"] == 1
    assert "zerocore" in capsys.readouterr().out


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_gather", "all_reduce"])
def test_a_call_that_leaves_one_element_wrong_is_found(operation):
    world = SimpleNamespace(rank=1, size=2, Barrier=lambda: None)
    buffers = bench_collectives.Buffers(torch.empty(600), world)
    pattern = torch.arange(600).remainder(251).float()

    def right():
        buffers.full.copy_(pattern * 2 + 1 if operation == "all_reduce" else pattern + (torch.arange(600) >= 300))
        buffers.shard.copy_(pattern[300:] * 2 + 1)

    def wrong():
        right()
        buffers.full[-1] += 1
        buffers.shard[-1] += 1

    assert buffers.is_right(operation, right)
    assert not buffers.is_right(operation, wrong)

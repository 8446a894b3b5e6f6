"""`zerocore inspect` shows what a checkpoint holds and finds what is damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
import zerocore
from toy_models import make
from zerocore._cli import main
from zerocore.config import Config, OptimizerConfig, ZeroConfig

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def run(folder):
    """A folder with two checkpoints, of which the older one is the latest."""
    engine = zerocore.Engine(
        make("odd"),
        Config(train_batch_size=2, micro_batch_size=1, optimizer=OptimizerConfig(), zero=ZeroConfig(stage=2)),
    )
    engine.save_checkpoint(folder, tag="second", client_state={"epoch": 3, "table": torch.arange(3)})
    engine.save_checkpoint(folder, tag="first")
    if engine.rank == 0:
        (folder / "latest").write_text("second\n")
    engine.close()
    return folder


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.ranks(1, 2)
def test_one_checkpoint(run, capsys, world_size):
    if zerocore._comm.world().rank:
        return
    assert main(["inspect", str(run / "second"), "--verify"]) == 0
    text = capsys.readouterr().out
    assert "step 0" in text and f"{world_size} ranks, stage 2, fp32, 1 threads" in text
    assert "client state  epoch, table" in text
    assert "rank_00000.safetensors" in text and "bytes read and checked" in text
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith("  ")}
    assert lines["table.weight"].split()[:3] == ["trained", "F32", "65x65"]
    assert lines["table.weight"].endswith("step 0, group 0  = head.weight")
    assert "master, exp_avg, exp_avg_sq" in lines["inner.weight"]
    assert lines["frozen.weight"].split()[:4] == ["frozen", "F32", "65x65", "value"]
    assert lines["scale"].split()[2] == "scalar"

    assert main(["inspect", str(run / "second"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    entries = {entry["name"]: entry for entry in found["entries"]}
    assert entries["table.weight"]["ties"] == ["head.weight"]
    assert entries["inner.weight"]["parts"]["exp_avg"]["dtype"] == "F32"
    assert found["client_state"] == ["epoch", "table"] and len(found["files"]) == world_size
    assert found["bytes"] == sum(path.stat().st_size for path in (run / "second").glob("*.safetensors"))


def test_a_folder_of_checkpoints(run, capsys):
    assert main(["inspect", str(run), "--verify"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.split()[0] for line in lines) == ["first", "second"]
    assert all("whole" in line for line in lines)
    assert [line.split()[0] for line in lines if line.endswith("<- latest")] == ["second"]
    (run / "latest").write_text("gone\n")
    assert main(["inspect", str(run)]) == 1
    assert "names gone" in capsys.readouterr().err


def damaged_file(checkpoint):
    flip(checkpoint / "rank_00000.safetensors")
    return "rank_00000.safetensors"


def missing_file(checkpoint):
    (checkpoint / "rank_00000.safetensors").unlink()
    return "rank_00000.safetensors"


def damaged_manifest(checkpoint):
    flip(checkpoint / "manifest.json")
    return "manifest.json"


@pytest.mark.parametrize("damage", [damaged_file, missing_file, damaged_manifest])
@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
def test_damage_is_named(run, capsys, damage, form):
    name = damage(run / "first")
    for path in (run, run / "first"):
        assert main(["inspect", str(path), "--verify", *form]) == 1
        said = capsys.readouterr()
        assert f"first/{name}" in said.err
        if form:
            json.loads(said.out)
    assert main(["inspect", str(run / "second"), "--verify"]) == 0


def test_all_damaged_files_are_named(run, capsys):
    checkpoint = run / "first"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    copy = dict(manifest["files"][0], name="rank_00001.safetensors")
    manifest["files"].append(copy)
    (checkpoint / "rank_00001.safetensors").write_bytes((checkpoint / "rank_00000.safetensors").read_bytes())
    data = json.dumps(manifest).encode()
    (checkpoint / "manifest.json").write_bytes(data)
    (checkpoint / "manifest.xxh3").write_bytes(zerocore._load.checksum_line(data))
    assert main(["inspect", str(checkpoint), "--verify"]) == 0
    for file in checkpoint.glob("*.safetensors"):
        flip(file)
    capsys.readouterr()
    assert main(["inspect", str(checkpoint), "--verify"]) == 1
    errors = capsys.readouterr().err
    assert "rank_00000.safetensors" in errors and "rank_00001.safetensors" in errors


def test_an_entry_that_is_not_where_it_says(run, capsys):
    checkpoint = run / "first"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    entry = next(entry for entry in manifest["entries"] if entry["name"] == "inner.weight")
    entry["parts"][0]["pieces"][0]["key"] = "master/elsewhere"
    data = json.dumps(manifest).encode()
    (checkpoint / "manifest.json").write_bytes(data)
    (checkpoint / "manifest.xxh3").write_bytes(zerocore._load.checksum_line(data))
    assert main(["inspect", str(checkpoint)]) == 0
    assert main(["inspect", str(checkpoint), "--verify"]) == 1
    assert "master/elsewhere" in capsys.readouterr().err


def test_nothing_there(folder, capsys):
    assert main(["inspect", str(folder)]) == 2
    assert "got no checkpoint" in capsys.readouterr().err


def test_a_reader_that_leaves(run):
    """As in `zerocore inspect RUN | head`."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "zerocore", "inspect", str(run / "first")]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    job = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=env)
    os.close(write)
    assert (job.returncode, job.stderr) == (0, "")

"""Checkpoints: what is saved comes back, on any number of ranks and in any stage; what is damaged is found."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import safetensors.torch
import torch
import zerocore
from toy_models import SHARD_ALL, batch, make
from zerocore._generators import generator_states
from zerocore._load import Checkpoint
from zerocore.config import (
    CheckpointConfig,
    Config,
    LossScaleConfig,
    OptimizerConfig,
    PrecisionConfig,
    SchedulerConfig,
    ZeroConfig,
)
from zerocore.errors import CheckpointError, ConfigError, IoError

pytestmark = pytest.mark.usefixtures("one_thread")

MICRO_BATCHES = 6
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ADAMW = {"type": "adamw", "lr": 0.01, "weight_decay": 0.1}
MOMENTUM = {"type": "sgd", "lr": 0.05, "momentum": 0.9}
LION = {"type": "lion", "lr": 0.003, "weight_decay": 0.1}
MUON = {"type": "muon", "lr": 0.01, "muon_lr": 0.02, "weight_decay": 0.1}
ADAGRAD = {"type": "adagrad", "lr": 0.05, "initial_accumulator_value": 0.1}


def build(name="odd", *, stage=0, dtype="fp32", optimizer=ADAMW, bucket=3000, groups=False, scheduler=False, **config):
    model = make(name)
    params = None
    if groups:
        trained = [p for p in model.parameters() if p.requires_grad]
        params = [{"params": trained[::2], "lr": 0.02}, {"params": trained[1::2]}]
    return zerocore.Engine(
        model,
        Config(
            train_batch_size=MICRO_BATCHES,
            micro_batch_size=1,
            gradient_clipping=1.0,
            optimizer=OptimizerConfig(**optimizer),
            precision=PrecisionConfig(dtype=dtype, loss_scale=LossScaleConfig(initial_scale_power=6, window=2)),
            zero=ZeroConfig(stage=stage, bucket_numel=bucket, **SHARD_ALL),
            scheduler=SchedulerConfig(type="WarmupLR", warmup_num_steps=5) if scheduler else None,
            **config,
        ),
        model_parameters=params,
    )


def train(engine, name, steps, *, dtype="fp32"):
    """Goes on from the engine's own step."""
    for _ in range(steps):
        first = engine.global_steps * MICRO_BATCHES
        for k in range(engine.gradient_accumulation_steps()):
            j = min(k * engine.world_size + engine.rank, MICRO_BATCHES - 1)
            engine.backward(engine(*batch(name, first + j, DTYPES[dtype])))
            engine.step()


def state(engine):
    """Everything that training goes on from, as bits."""
    utils = zerocore.utils
    out = {name: value for name, value in engine.state_dict().items()}
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            out[name + " master"] = utils.safe_get_full_fp32_param(param)
            for key in engine._params.state_parts(engine._params.index_of(param))[1:]:
                out[f"{name} {key}"] = utils.safe_get_full_optimizer_state(param, key)
    return out


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def twin(name, steps, **settings):
    """The state of a run that never stopped."""
    engine = build(name, **settings)
    train(engine, name, steps, dtype=settings.get("dtype", "fp32"))
    result = state(engine), engine.get_lr(), engine.loss_scale
    engine.close()
    return result


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_resume_equals_never_stopped(folder, stage, dtype, world_size):
    settings = {"dtype": dtype, "groups": True, "scheduler": True}
    engine = build("odd", stage=stage, **settings)
    train(engine, "odd", 2, dtype=dtype)
    path = engine.save_checkpoint(folder, client_state={"epoch": 3})
    before = state(engine)
    engine.close()
    assert path == str(folder / "global_step2")
    assert (folder / "latest").read_text() == "global_step2\n"

    other = (stage + 2) % 4
    engine = build("odd", stage=other, bucket=700, **settings)
    train(engine, "odd", 1, dtype=dtype)  # something to overwrite
    assert engine.load_checkpoint(folder) == (path, {"epoch": 3})
    assert_same(state(engine), before)
    assert engine.global_steps == 2
    train(engine, "odd", 2, dtype=dtype)
    expected, lr, loss_scale = twin("odd", 4, stage=stage, **settings)
    assert_same(state(engine), expected)
    assert (engine.get_lr(), engine.loss_scale) == (lr, loss_scale)
    engine.close()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", ["t5", "cnn", "lstm", "wide"])
@pytest.mark.parametrize("optimizer", [ADAMW, MOMENTUM, LION, ADAGRAD, MUON], ids=lambda each: each["type"])
def test_other_models_and_optimizers(folder, name, optimizer, world_size):
    engine = build(name, stage=3, optimizer=optimizer)
    train(engine, name, 2)
    engine.save_checkpoint(folder)
    engine.close()
    engine = build(name, stage=1, optimizer=optimizer)
    engine.resume(folder)
    train(engine, name, 1)
    expected, _, _ = twin(name, 3, stage=2, optimizer=optimizer)
    assert_same(state(engine), expected)
    engine.close()


@pytest.mark.ranks(1, 2)
def test_background_saves(folder, world_size):
    """The state is that of the call, whatever training does meanwhile."""
    engine = build(stage=2, checkpoint=CheckpointConfig(async_save=True, keep_last=2))
    states = {}
    for step in range(1, 6):
        train(engine, "odd", 1)
        engine.save_checkpoint(folder)
        states[step] = state(engine)
    engine.wait_for_checkpoint()
    assert sorted(p.name for p in folder.iterdir()) == ["global_step4", "global_step5", "latest"]
    for step in (4, 5):
        engine.load_checkpoint(folder, tag=f"global_step{step}")
        assert_same(state(engine), states[step])
    assert engine.memory_report()["checkpoint_snapshot"] > 0
    engine.close()


@pytest.mark.ranks(1, 2)
def test_safetensors_reads_the_files(folder, world_size):
    engine = build(stage=2)
    train(engine, "odd", 1)
    path = Path(engine.save_checkpoint(folder))
    full = state(engine)
    manifest = json.loads((path / "manifest.json").read_text())
    entries = {entry["name"]: entry for entry in manifest["entries"]}
    assert entries["table.weight"]["ties"] == ["head.weight"]
    assert entries["frozen.weight"]["role"] == "frozen"
    assert entries["unused.weight"]["step"] == 0
    assert entries["scale"]["shape"] == []
    files = [safetensors.torch.load_file(path / file["name"]) for file in manifest["files"]]
    for name in ("inner.weight", "shift", "scale", "empty"):
        for part in entries[name]["parts"]:
            pieces = [files[p["file"]][p["key"]].flatten() for p in part["pieces"]]
            key = {"master": "master"}.get(part["name"], part["name"])
            assert torch.equal(torch.cat([torch.empty(0), *pieces]), full[f"{name} {key}"].flatten()), name
    for file in manifest["files"]:
        assert file["header_bytes"] % 4096 == 0
    engine.close()


@pytest.mark.ranks(1, 2)
def test_channels_last(folder, world_size):
    """Elements are counted as they lie in memory; another model may have them in another order."""

    def make_engine(layout, stage):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 40, 3), torch.nn.Flatten(), torch.nn.Linear(40 * 36, 1))
        model = model.to(memory_format=layout)
        config = Config(train_batch_size=2, gradient_accumulation_steps=2 // world_size, zero=ZeroConfig(stage=stage))
        return zerocore.Engine(model, config, optimizer=torch.optim.AdamW(model.parameters()))

    engine = make_engine(torch.channels_last, 2)
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.randn(1, 3, 8, 8)).mean())
        engine.step()
    engine.save_checkpoint(folder)
    saved = state(engine)
    engine.close()
    for layout, stage in ((torch.contiguous_format, 1), (torch.channels_last, 0), (torch.contiguous_format, 3)):
        engine = make_engine(layout, stage)
        engine.load_checkpoint(folder)
        assert_same(state(engine), saved)
        engine.close()


@pytest.mark.ranks(1, 2)
def test_client_state(folder, world_size):
    engine = build()
    value = {"a": [1, 2.5, None, True, "x"], "b": {"t": torch.arange(3), "e": torch.zeros(0, 2)}, "nan": float("inf")}
    engine.save_checkpoint(folder, tag="mine", client_state=value)
    _, back = engine.load_checkpoint(folder, tag="mine")
    assert back["a"] == value["a"] and back["nan"] == value["nan"]
    assert torch.equal(back["b"]["t"], value["b"]["t"]) and back["b"]["e"].shape == (0, 2)
    for bad, name in ((object(), "client_state['x']"), ((1, 2), "client_state['x']"), ({1: 2}, "the key 1")):
        with pytest.raises(ConfigError, match=r"\[ckpt\]") as error:
            engine.save_checkpoint(folder, client_state={"x": bad})
        assert name in str(error.value)
    engine.close()


def test_generators(folder):
    """The user's own random numbers go on where they were."""
    engine = build()
    torch.manual_seed(1)
    random.seed(2)
    torch.rand(3), random.random()
    engine.save_checkpoint(folder)
    expected = torch.rand(5), random.random()
    torch.manual_seed(9)
    random.seed(9)
    engine.load_checkpoint(folder)
    assert torch.equal(torch.rand(5), expected[0]) and random.random() == expected[1]
    engine.close()


@pytest.mark.ranks(1, 2)
def test_data_goes_on(folder, world_size):
    """The loader's position is the checkpoint's."""
    samples = list(range(40))

    def loader_engine():
        model = torch.nn.Linear(1, 1)
        config = Config(train_batch_size=4, micro_batch_size=1, optimizer=OptimizerConfig(lr=0.01))
        return zerocore.Engine(model, config, training_data=samples)

    def steps(engine, batches, count):
        seen = []
        for _ in range(count * engine.gradient_accumulation_steps()):
            sample = next(batches)
            seen.append(sample.item())
            engine.backward(engine(sample.float().reshape(1, 1)).sum())
            engine.step()
        return seen

    engine = loader_engine()
    batches = iter(engine.training_dataloader)
    steps(engine, batches, 3)
    engine.save_checkpoint(folder)
    expected = steps(engine, batches, 4)
    engine.close()
    engine = loader_engine()
    engine.resume(folder)
    assert steps(engine, iter(engine.training_dataloader), 4) == expected
    engine.close()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("stage", [1, 3])
def test_each_rank_reads_what_it_keeps(folder, stage, world_size, monkeypatch):
    """Straight into its place: no byte of a parameter more, whatever ranks and buckets it was saved from."""
    engine = build("wide", stage=0, bucket=10**6)
    train(engine, "wide", 1)
    engine.save_checkpoint(folder)
    engine.close()
    engine = build("wide", stage=stage, bucket=2000)
    core = engine._params.core
    kept = sum(end - begin for begin, end in map(core.loaded_range, range(len(engine._params.params))))
    read = []
    original = zerocore._core.read_ranges

    def read_ranges(path, file_bytes, hashes, ranges, **options):
        read.extend(size for offset, size, _ in ranges if offset > 0)  # headers are at 0
        return original(path, file_bytes, hashes, ranges, **options)

    monkeypatch.setattr(zerocore._core, "read_ranges", read_ranges)
    engine.load_checkpoint(folder)
    generators = sum(state.numel() for state in generator_states().values())
    assert sum(read) == 3 * 4 * kept + generators
    assert engine.comm.all_reduce([kept], zerocore._core.ReduceOp.sum, "all")[0] == sum(
        p.numel() for p in engine.module.parameters()
    )
    engine.close()


# What does not fit, and what is damaged


@pytest.mark.ranks(1, 2)
def test_what_does_not_fit_is_named(folder, world_size, caplog):
    engine = build("wide")
    train(engine, "wide", 1)
    engine.save_checkpoint(folder)
    engine.close()
    model = make("wide")
    model.net[0] = torch.nn.Linear(40, 131)
    model.extra = torch.nn.Linear(3, 3)
    config = Config(train_batch_size=6, micro_batch_size=1, optimizer=OptimizerConfig(**MOMENTUM))
    engine = zerocore.Engine(model, config)
    before = state(engine)
    with pytest.raises(ConfigError) as error:
        engine.load_checkpoint(folder)
    text = str(error.value)
    assert "not in the checkpoint: extra.weight, extra.bias" in text
    assert "net.0.weight: (130, 40), in the model (131, 40)" in text
    assert_same(state(engine), before)
    path, _ = engine.load_checkpoint(folder, load_module_strict=False)
    assert path is not None
    if engine.rank == 0:
        assert "optimizer state (saved with adamw, this engine has sgd): net.3.weight" in caplog.text
    engine.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("then", "now"), [(MOMENTUM, MUON), (MUON, MOMENTUM), (ADAMW, MUON)], ids=["sgd-muon", "muon-sgd", "adamw-muon"]
)
def test_states_of_one_name_of_another_optimizer_are_not_loaded(folder, caplog, then, now):
    """SGD's momentum is a sum of gradients, Muon's a mean: another size."""
    engine = build("wide", stage=2, optimizer=then)
    train(engine, "wide", 1)
    engine.save_checkpoint(folder)
    engine.close()
    engine = build("wide", stage=2, optimizer=now)
    engine.load_checkpoint(folder)
    assert set(engine._params.core.param_steps()) == {0}
    if engine.rank == 0:
        assert f"optimizer state (saved with {then['type']}, this engine has {now['type']})" in caplog.text
    engine.close()


@pytest.mark.ranks(1, 2)
def test_module_only(folder, world_size):
    engine = build("wide")
    train(engine, "wide", 2)
    engine.save_checkpoint(folder)
    saved = engine.state_dict()
    engine.close()
    engine = build("wide", stage=3, optimizer=MOMENTUM)
    engine.load_checkpoint(folder, load_module_only=True)
    assert_same(engine.state_dict(), saved)
    assert engine.global_steps == 0
    engine.close()


@pytest.mark.ranks(1, 2)
def test_frozen_parameters_left_out(folder, world_size, caplog):
    engine = build(stage=3)
    train(engine, "odd", 1)
    path = engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    saved = state(engine)
    assert "frozen.weight" not in Checkpoint(Path(path)).entries()
    engine.close()
    engine = build(stage=2)
    engine.load_checkpoint(folder)
    assert_same(state(engine), saved)
    assert engine.rank or "frozen parameters were left out when it was saved: frozen.weight" in caplog.text
    engine.close()


@pytest.mark.ranks(2)
def test_custom_load_fn(folder):
    engine = build("wide")
    train(engine, "wide", 1)
    engine.save_checkpoint(folder)
    saved = engine.state_dict()
    engine.close()
    engine = build("wide", stage=3)

    def load(src, dst):
        dst.load_state_dict({name: value * 2 for name, value in src.items()})

    engine.load_checkpoint(folder, custom_load_fn=load)
    assert_same(engine.state_dict(), {name: value * 2 for name, value in saved.items()})
    engine.close()


def damage(path, how):
    file = path / "rank_00000.safetensors"
    data = bytearray(file.read_bytes())
    if how == "flipped":
        data[len(data) // 2] ^= 1
    elif how == "cut":
        data = data[:-1]
    file.write_bytes(data)
    if how == "gone":
        file.unlink()
    elif how == "manifest":
        (path / "manifest.json").write_bytes((path / "manifest.json").read_bytes().replace(b'"adamw"', b'"adamv"'))
    elif how == "link":
        (path / "elsewhere").write_bytes(data)
        file.unlink()
        file.symlink_to(path / "elsewhere")


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("how", ["flipped", "cut", "gone", "manifest", "link"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(folder, how, world_size, caplog):
    engine = build("wide", stage=2)
    train(engine, "wide", 1)
    engine.save_checkpoint(folder)
    saved = state(engine)
    train(engine, "wide", 1)
    engine.save_checkpoint(folder)
    if engine.rank == 0:
        damage(folder / "global_step2", how)
    engine.comm.barrier("damaged").wait()
    with pytest.raises(CheckpointError, match="global_step2"):
        engine.load_checkpoint(folder, strict=True)
    with pytest.raises(CheckpointError, match="global_step2"):
        engine.load_checkpoint(folder, tag="global_step2")
    path, _ = engine.load_checkpoint(folder)
    assert path == str(folder / "global_step1")
    assert_same(state(engine), saved)
    assert engine.rank or "global_step2" in caplog.text
    train(engine, "wide", 1)
    if engine.rank == 0:
        damage(folder / "global_step1", how)
    engine.comm.barrier("damaged").wait()
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        engine.resume(folder)
    engine.close()


@pytest.mark.ranks(1, 2)
def test_nothing_there(folder, world_size, caplog):
    engine = build("wide")
    assert engine.load_checkpoint(folder / "none") == (None, None)
    assert engine.rank or "no checkpoint" in caplog.text
    assert engine.resume(folder) == (None, None)
    with pytest.raises(CheckpointError, match="missing"):
        engine.load_checkpoint(folder, tag="global_step7")
    with pytest.raises(ConfigError, match="tag"):
        engine.load_checkpoint(folder, tag="../x")
    engine.close()


# Calls that are wrong, and disks that fail


@pytest.mark.ranks(2)
def test_calls_that_differ_by_rank(folder):
    engine = build("wide")
    with pytest.raises(ConfigError, match=r"'tag0'.* on rank 0 and .*'tag1'.* on rank 1"):
        engine.save_checkpoint(folder, tag=f"tag{engine.rank}")
    assert not list(folder.iterdir())
    engine.close()


def test_off_a_boundary(folder):
    engine = build("wide")
    engine.backward(engine(*batch("wide", 0, torch.float32)))
    with pytest.raises(ConfigError, match="pending"):
        engine.save_checkpoint(folder)
    engine.step()
    with pytest.raises(ConfigError, match="gradients of 1 micro-steps pending"):
        engine.save_checkpoint(folder)
    engine.close()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("background", [False, True])
def test_a_disk_that_fails(folder, background, world_size):
    """An error on every rank; the old checkpoint stands, and training and saving go on."""
    engine = build("wide", stage=2, checkpoint=CheckpointConfig(async_save=background))
    train(engine, "wide", 1)
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    train(engine, "wide", 1)
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if engine.rank == engine.world_size - 1:  # one rank's disk is full
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(IoError, match=f"rank {engine.world_size - 1} could not write a checkpoint") as error:
            engine.save_checkpoint(folder)
            engine.wait_for_checkpoint()
        assert error.value.errno in (27, 28)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (folder / "latest").read_text() == "global_step1\n"
    train(engine, "wide", 1)
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    assert sorted(p.name for p in folder.iterdir()) == ["global_step1", "global_step3", "latest"]
    engine.close()


@pytest.mark.ranks(1, 2)
def test_a_fault_that_is_no_disks(folder, monkeypatch, world_size):
    """The other ranks learn of it, too, and do not wait."""
    engine = build("wide", stage=2)
    train(engine, "wide", 1)
    if engine.rank == engine.world_size - 1:

        def fail(*args, **kwargs):
            raise RuntimeError("no such luck")

        monkeypatch.setattr("zerocore._save._write_file", fail)
    with pytest.raises(IoError, match=f"rank {engine.world_size - 1} could not .*RuntimeError: no such luck"):
        engine.save_checkpoint(folder)
    monkeypatch.undo()
    engine.save_checkpoint(folder)
    assert (folder / "latest").read_text() == "global_step1\n"
    engine.close()


def test_a_folder_that_cannot_be_made(folder):
    engine = build("wide")
    (folder / "file").write_text("")
    with pytest.raises(IoError, match=r"file/inside.*errno 20") as error:
        engine.save_checkpoint(folder / "file" / "inside")
    assert error.value.errno == 20
    engine.close()


@pytest.mark.ranks(1, 2)
def test_the_same_tag_again(folder, world_size):
    engine = build("wide", stage=1)
    engine.save_checkpoint(folder, tag="best")
    train(engine, "wide", 1)
    engine.save_checkpoint(folder, tag="best")
    saved = state(engine)
    train(engine, "wide", 1)
    engine.load_checkpoint(folder)
    assert_same(state(engine), saved)
    assert sorted(p.name for p in folder.iterdir()) == ["best", "latest"]
    engine.close()

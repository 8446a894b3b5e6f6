"""Exported weights: what Hugging Face, PEFT and safetensors load is what was trained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc

import pytest
import safetensors.torch
import torch
import zerocore
from safetensors import safe_open
from torch import nn
from toy_models import SHARD_ALL, batch, make
from zerocore import _export
from zerocore._cli import main
from zerocore._load import open_checkpoint
from zerocore.config import Config, OptimizerConfig, PrecisionConfig, ZeroConfig
from zerocore.errors import CheckpointError, IoError
from zerocore.utils import get_fp32_state_dict_from_zero_checkpoint

os.environ.setdefault("HF_HUB_OFFLINE", "1")

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MICRO_BATCHES = 2


def engine_of(model, *, stage=3, dtype="fp32", gather=False, compute=None):
    return zerocore.Engine(
        model,
        Config(
            train_batch_size=MICRO_BATCHES,
            micro_batch_size=1,
            optimizer=OptimizerConfig(type="adamw", lr=0.01),
            precision=PrecisionConfig(dtype=dtype, compute_dtype=compute),
            zero=ZeroConfig(stage=stage, bucket_numel=3000, gather_16bit_weights_on_save=gather, **SHARD_ALL),
        ),
    )


def train(engine, name, dtype):
    for k in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(*batch(name, k * engine.world_size + engine.rank, DTYPES[dtype])))
        engine.step()


def trained(name, folder, *, dtype="fp32", **settings):
    """Saves a checkpoint after a step. Returns the model's state and its masters."""
    engine = engine_of(make(name), dtype=dtype, **settings)
    train(engine, name, dtype)
    engine.save_checkpoint(folder)
    masters = {
        name: zerocore.utils.safe_get_full_fp32_param(param)
        for name, param in engine.module.named_parameters()
        if param.requires_grad
    }
    state = engine.state_dict()
    engine.close()
    return state, masters


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name in got:
        assert got[name].dtype == expected[name].dtype, name
        assert torch.equal(got[name], expected[name]), name


def read(out):
    """All tensors of an export, by hand."""
    tensors = {}
    for path in sorted(out.glob("*.safetensors")):
        part = safetensors.torch.load_file(path)
        assert not tensors.keys() & part.keys()
        tensors |= part
    return tensors


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("name", "dtype"), [("odd", "fp32"), ("odd", "bf16"), ("cnn", "fp16"), ("t5", "bf16")])
def test_load_model_gives_what_was_trained(folder, name, dtype, world_size):
    expected, _ = trained(name, folder / "run", dtype=dtype)
    if zerocore._comm.world().rank == 0:
        assert main(["export", str(folder / "run"), str(folder / "out")]) == 0
        assert [path.name for path in (folder / "out").iterdir()] == ["model.safetensors"]
        model = make(name).to(DTYPES[dtype])
        safetensors.torch.load_model(model, folder / "out" / "model.safetensors")
        assert_same(dict(model.state_dict()), expected)


def test_ties_are_named_once(folder):
    trained("odd", folder)
    _export.export(open_checkpoint(folder), folder / "out")
    with safe_open(folder / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "table.weight"}
        assert "table.weight" in file.keys() and "head.weight" not in file.keys()  # noqa: SIM118
        assert "frozen.weight" in file.keys()  # noqa: SIM118


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_come_from_the_masters(folder, dtype):
    state, masters = trained("cnn", folder, dtype="bf16")
    out = folder / "out"
    assert main(["export", str(folder), str(out), "--dtype", dtype]) == 0
    for name, value in read(out).items():
        source = masters.get(name, state[name])
        assert torch.equal(value, source.to(DTYPES[dtype]) if source.is_floating_point() else source), name
        assert value.is_floating_point() == (value.dtype == DTYPES[dtype])
    assert "net.1.num_batches_tracked" in state


def test_shards(folder):
    expected, _ = trained("odd", folder)
    out = folder / "out"
    limit = 40_000
    assert main(["export", str(folder), str(out), "--max-shard-size", "40KB"]) == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == sorted(path.name for path in out.glob("*.safetensors")) and len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    got = read(out)
    del expected["head.weight"]
    assert_same(got, expected)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in got.values())
    for file in files:
        part = safetensors.torch.load_file(out / file)
        assert len(part) == 1 or sum(t.numel() * t.element_size() for t in part.values()) <= limit
        assert all(index["weight_map"][name] == file for name in part)


@pytest.mark.parametrize("batch_bytes", [64, 5000, 64 << 20])
def test_batches_of_any_size_give_the_same(folder, monkeypatch, batch_bytes):
    expected, _ = trained("odd", folder)
    monkeypatch.setattr(_export, "_BATCH_BYTES", batch_bytes)
    _export.export(open_checkpoint(folder), folder / "out", dtype="bf16")
    del expected["head.weight"]
    assert_same(read(folder / "out"), {name: value.bfloat16() for name, value in expected.items()})


@pytest.mark.parametrize("shape", [(40, 3, 5, 2), (2, 3, 4, 50)])
def test_other_orders_in_memory(folder, shape):
    model = nn.ParameterList([torch.randn(shape).to(memory_format=torch.channels_last), torch.randn(4, 7).t()])
    expected = {name: value.detach().clone() for name, value in model.state_dict().items()}
    engine = engine_of(model, stage=2)
    engine.save_checkpoint(folder)
    engine.close()
    _export.export(open_checkpoint(folder), folder / "out")
    assert_same(read(folder / "out"), expected)


def test_tensors_are_aligned(folder):
    """Readers map them: an element begins at a multiple of its size."""
    model = nn.Linear(3, 1)
    model.register_buffer("bytes", torch.arange(3, dtype=torch.uint8))
    model.register_buffer("count", torch.tensor(7))
    model.register_buffer("narrow", torch.ones(3, dtype=torch.bfloat16))
    engine = engine_of(model)
    engine.save_checkpoint(folder)
    expected = engine.state_dict()
    engine.close()
    _export.export(open_checkpoint(folder), folder / "out")
    data = (folder / "out" / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:begin]).items():
        if name != "__metadata__":
            assert (begin + entry["data_offsets"][0]) % expected[name].element_size() == 0, name
    assert_same(read(folder / "out"), expected)


def test_memory_is_not_the_models(folder, monkeypatch):
    """16 MiB of weights in 64 tensors; 256 KiB at a time."""
    engine = zerocore.Engine(
        nn.ParameterList([torch.randn(1 << 16) for _ in range(64)]),
        Config(train_batch_size=1, optimizer=OptimizerConfig(type="sgd", lr=0.1)),
    )
    engine.save_checkpoint(folder)
    engine.close()
    monkeypatch.setattr(_export, "_BATCH_BYTES", 1 << 18)
    checkpoint = open_checkpoint(folder)
    tracemalloc.start()
    _export.export(checkpoint, folder / "out", dtype="bf16")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 1 << 18 < peak < 1 << 20


def test_neither_torch_nor_numpy_is_needed(folder):
    trained("odd", folder)
    code = "import sys; sys.modules['torch'] = sys.modules['numpy'] = None; from zerocore._cli import main; "
    code += f"sys.exit(main(['export', {str(folder)!r}, {str(folder / 'out')!r}, '--dtype', 'fp16']))"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert read(folder / "out")["inner.weight"].dtype == torch.float16


# From an engine


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    ("name", "dtype", "compute"),
    [("odd", "fp32", None), ("odd", "bf16", None), ("odd", "fp32", "bf16"), ("cnn", "bf16", None)],
)
def test_save_16bit_model(folder, name, stage, dtype, compute, world_size):
    engine = engine_of(make(name), stage=stage, dtype=dtype, compute=compute, gather=True)
    train(engine, name, compute or dtype)
    used = DTYPES[compute or dtype]
    expected = engine.state_dict()
    params = dict(engine.module.named_parameters())
    expected = {
        key: value.to(used) if key in params or key == "head.weight" else value for key, value in expected.items()
    }
    assert engine.save_16bit_model(folder / "new" / "folder")
    assert engine.save_16bit_model(folder, save_filename="model.safetensors")
    got = engine._zero3_consolidated_16bit_state_dict()
    assert (got is None) == (engine.rank != 0)
    if engine.rank == 0:
        assert_same(got, expected)
        loaded = torch.load(folder / "new" / "folder" / "pytorch_model.bin")
        assert_same(loaded, expected)
        model = make(name).to(used)
        safetensors.torch.load_model(model, folder / "model.safetensors")
        assert_same(
            {key: value for key, value in model.state_dict().items() if key in params}, {k: expected[k] for k in params}
        )
        if name == "odd":
            assert loaded["head.weight"].data_ptr() == loaded["table.weight"].data_ptr()
            with safe_open(folder / "model.safetensors", "pt") as file:
                assert file.metadata() == {"format": "pt", "head.weight": "table.weight"}
    engine.close()


@pytest.mark.ranks(1, 2)
def test_save_16bit_model_without_gathering(folder, world_size, caplog):
    engine = engine_of(make("odd"), stage=3)
    assert not engine.zero_gather_16bit_weights_on_model_save()
    assert engine.save_16bit_model(folder) is False
    assert not list(folder.iterdir())
    assert engine.rank or "stage3_gather_16bit_weights_on_model_save" in caplog.text
    engine.close()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_save_16bit_model_leaves_out_what_is_frozen(folder, file, world_size):
    engine = engine_of(make("odd"), stage=3, gather=True)
    assert engine.save_16bit_model(folder, file, True)
    expected = engine.state_dict()
    engine.close()
    if engine.rank == 0:
        got = read(folder) if file.endswith("rs") else torch.load(folder / file)
        gone = {"frozen.weight", "frozen.bias"} | ({"head.weight"} if file.endswith("rs") else set())
        assert_same(got, {name: value for name, value in expected.items() if name not in gone})


def test_save_16bit_model_leaves_out_what_a_checkpoint_does(folder):
    """What the engine does not train, whatever asks for gradients now: a layer frozen for a while is trained."""
    engine = engine_of(make("odd"), gather=True)
    train(engine, "odd", "fp32")
    engine.module.table.weight.requires_grad_(False)
    engine.module.frozen.weight.requires_grad_(True)
    path = engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    assert engine.save_16bit_model(folder, exclude_frozen_parameters=True)
    engine.close()
    assert_same(torch.load(folder / "pytorch_model.bin"), get_fp32_state_dict_from_zero_checkpoint(path))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_save_16bit_model_on_a_full_disk(folder, file, world_size):
    """An error on every rank; what was there stands, and the next one succeeds."""
    import resource

    engine = engine_of(make("odd"), stage=3, gather=True)
    assert engine.save_16bit_model(folder, file)
    before = (folder / file).read_bytes()
    train(engine, "odd", "fp32")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if engine.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
    try:
        with pytest.raises(IoError) as error:
            engine.save_16bit_model(folder, file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.errno in (27, 28)
    assert (folder / file).read_bytes() == before
    assert [path.name for path in folder.iterdir()] == [file]
    engine.comm.barrier("compared").wait()
    assert engine.save_16bit_model(folder, file)
    assert (folder / file).read_bytes() != before
    engine.close()


# What is refused, and what fails


def test_a_folder_that_is_not_empty(folder, capsys):
    trained("odd", folder / "run")
    out = folder / "out"
    arguments = ["export", str(folder / "run"), str(out)]
    assert main([*arguments, "--max-shard-size", "40KB"]) == 0
    (out / "mine.txt").write_text("kept")
    before = sorted(out.iterdir())
    assert main(arguments) == 2
    assert "not empty" in capsys.readouterr().err
    assert sorted(out.iterdir()) == before
    assert main([*arguments, "--force"]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["mine.txt", "model.safetensors"]
    assert sorted(path.name for path in folder.iterdir()) == ["out", "run"]
    assert main(["export", str(folder / "run"), str(out / "mine.txt"), "--force"]) == 2


def test_an_export_that_is_killed_leaves_no_weights(folder):
    trained("odd", folder / "run")
    code = "import os; from zerocore import _export; from zerocore._cli import main; "
    code += "_export._core.sync_folder = lambda path: os.kill(os.getpid(), 9); "  # all is written, nothing is named
    code += f"main(['export', {str(folder / 'run')!r}, {str(folder / 'out')!r}])"
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert sorted(path.name for path in folder.iterdir()) == [".out.exporting", "run"]
    (folder / ".out.exporting" / "model-00001-of-00002.safetensors").write_text("left over")
    _export.export(open_checkpoint(folder / "run"), folder / "out")
    assert sorted(path.name for path in folder.iterdir()) == ["out", "run"]
    assert [path.name for path in (folder / "out").iterdir()] == ["model.safetensors"]


def test_a_folder_that_is_a_link(folder):
    trained("odd", folder / "run")
    (folder / "disk").mkdir()
    (folder / "out").symlink_to(folder / "disk")
    _export.export(open_checkpoint(folder / "run"), folder / "out")
    assert (folder / "out").is_symlink()
    assert [path.name for path in (folder / "disk").iterdir()] == ["model.safetensors"]


def test_configurations_that_are_not_there(folder, capsys):
    trained("odd", folder / "run")
    (folder / "empty").mkdir()
    arguments = ["export", str(folder / "run"), str(folder / "out"), "--config-from"]
    assert main([*arguments, str(folder / "empty")]) == 2
    assert "expected a folder with config.json" in capsys.readouterr().err
    assert main([*arguments, str(folder / "none")]) == 2
    assert sorted(path.name for path in folder.iterdir()) == ["empty", "run"]


def test_damage_is_found_and_nothing_appears(folder):
    trained("odd", folder / "run")
    file = folder / "run" / "global_step1" / "rank_00000.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors"):
        _export.export(open_checkpoint(folder / "run"), folder / "out")
    assert [path.name for path in folder.iterdir()] == ["run"]


def test_no_checkpoint(folder, capsys):
    assert main(["export", str(folder), str(folder / "out")]) == 2
    assert "got no checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["", "0", "5XB", "-1", "GB"])
def test_sizes_that_are_none(size, capsys):
    with pytest.raises(SystemExit):
        main(["export", "a", "b", f"--max-shard-size={size}"])
    assert "size like" in capsys.readouterr().err


def test_a_disk_that_is_full(folder):
    import resource

    trained("odd", folder / "run")
    checkpoint = open_checkpoint(folder / "run")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(IoError) as error:
            _export.export(checkpoint, folder / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.errno in (27, 28)
    assert [path.name for path in folder.iterdir()] == ["run"]


def test_what_is_left_out_is_said(folder, capsys):
    engine = engine_of(make("odd"))
    engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    engine.close()
    assert main(["export", str(folder), str(folder / "out")]) == 0
    assert "not exported: frozen parameters" in capsys.readouterr().err


# Hugging Face


class Adapted(nn.Module):
    """A linear layer as PEFT leaves it, with an adapter called "mine"."""

    def __init__(self):
        super().__init__()
        self.base_layer = nn.Linear(6, 5).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"mine": nn.Linear(6, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"mine": nn.Linear(2, 5, bias=False)})
        self.modules_to_save = nn.ModuleDict({"mine": nn.LayerNorm(5)})

    def forward(self, x):
        return self.modules_to_save["mine"](self.base_layer(x) + self.lora_B["mine"](self.lora_A["mine"](x)))


def test_adapter_names(folder, capsys):
    model = nn.ModuleDict({"base_model": Adapted()})
    state = {name: value.clone() for name, value in model.state_dict().items()}
    engine = engine_of(model)
    engine.save_checkpoint(folder)
    engine.close()
    assert main(["export", str(folder), str(folder / "out"), "--adapter", "mine"]) == 0
    assert [path.name for path in (folder / "out").iterdir()] == ["adapter_model.safetensors"]
    expected = {
        f"base_model.{short}": state[f"base_model.{long}"]
        for short, long in {
            "lora_A.weight": "lora_A.mine.weight",
            "lora_B.weight": "lora_B.mine.weight",
            "weight": "modules_to_save.mine.weight",
            "bias": "modules_to_save.mine.bias",
        }.items()
    }
    assert_same(read(folder / "out"), expected)
    assert main(["export", str(folder), str(folder / "none"), "--adapter"]) == 2
    assert "'default'" in capsys.readouterr().err


TOKENS = {"vocab_size": 67, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def hugging_face(kind):
    transformers = pytest.importorskip("transformers", "5", reason="needs Hugging Face: pip install 'transformers>=5'")
    torch.manual_seed(3)
    if kind == "gpt2":
        config = transformers.GPT2Config(n_positions=32, n_embd=32, n_layer=2, n_head=2, **TOKENS)
        return transformers.AutoModelForCausalLM.from_config(config)
    config = transformers.T5Config(
        d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2, decoder_start_token_id=0, **TOKENS
    )
    return transformers.AutoModelForSeq2SeqLM.from_config(config)


def step(engine):
    tokens = torch.randint(3, 67, (2, 9), generator=torch.Generator().manual_seed(1))
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_from_pretrained(folder, kind, dtype, size):
    model = hugging_face(kind)
    model.save_pretrained(folder / "base")
    engine = engine_of(model.train(), dtype=dtype)
    step(engine)
    engine.save_checkpoint(folder / "run")
    expected = engine.state_dict()
    engine.close()
    arguments = ["--config-from", str(folder / "base"), "--max-shard-size", size]
    assert main(["export", str(folder / "run"), str(folder / "out"), *arguments]) == 0
    loaded, info = type(model).from_pretrained(folder / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert_same(dict(loaded.state_dict()), expected)


def test_peft_loads_an_adapter(folder):
    peft = pytest.importorskip("peft", reason="needs PEFT: pip install peft")
    base = hugging_face("gpt2")
    base.save_pretrained(folder / "base")
    settings = peft.LoraConfig(
        r=4, target_modules=["c_attn"], modules_to_save=["ln_f"], bias="lora_only", lora_dropout=0
    )
    model = peft.get_peft_model(base, settings)
    engine = engine_of(model.train())
    for _ in range(3):
        step(engine)
    engine.save_checkpoint(folder / "run")
    with engine.unsharded():
        model.save_pretrained(folder / "theirs")
    expected = engine.state_dict()
    engine.close()
    arguments = ["--adapter", "--config-from", str(folder / "theirs")]
    assert main(["export", str(folder / "run"), str(folder / "out"), *arguments]) == 0
    assert_same(read(folder / "out"), read(folder / "theirs"))
    base = type(hugging_face("gpt2")).from_pretrained(folder / "base")
    assert_same(dict(peft.PeftModel.from_pretrained(base, folder / "out").state_dict()), expected)
    assert main(["export", str(folder / "run"), str(folder / "whole")]) == 0
    whole = peft.get_peft_model(hugging_face("gpt2"), settings)
    safetensors.torch.load_model(whole, folder / "whole" / "model.safetensors")
    assert_same(dict(whole.state_dict()), expected)

"""Which device an engine takes, and what a build without CUDA says of it."""

from __future__ import annotations

import pytest
import torch
import zerocore
from zerocore import _core, _device
from zerocore.errors import ConfigError, DeviceError, UnsupportedError


@pytest.fixture
def model():
    return torch.nn.Linear(4, 4)


def config(**keys):
    return zerocore.Config(train_batch_size=2, **keys)


def test_a_build_without_cuda_says_so(capsys):
    built, num_devices, text = _core.cuda_status()
    assert num_devices == 0 and text == ("CUDA backend built, no device" if built else "no CUDA backend")
    assert zerocore.capabilities() == {"cuda_built": built, "cuda_devices": 0, "cuda": text}
    from zerocore._cli import main

    assert main(["report", "--no-self-test"]) == 0
    assert f"\nCUDA          {text}\n" in capsys.readouterr().out


def test_cuda_is_refused_where_there_is_none(model):
    with pytest.raises(DeviceError, match=r'\[device\] got device = "cuda", expected a CUDA device and a build for it'):
        zerocore.Engine(model, config(device="cuda"))
    with pytest.raises(DeviceError, match=r"\[cuda\]"):
        _core.cuda_device(0)
    assert not hasattr(model.weight, "_zc_owner")


def test_auto_is_the_cpu_here(model):
    engine = zerocore.Engine(model, config())
    assert engine.device == torch.device("cpu") == zerocore.Engine(torch.nn.Linear(1, 1), config(device="cpu")).device


def test_a_gpu_that_the_build_cannot_use_is_told_of_once(model, monkeypatch, caplog):
    monkeypatch.setattr(_core, "cuda_status", lambda: (False, 0, "no CUDA backend"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    _device._tell_not_built.cache_clear()
    for _ in range(2):
        assert zerocore.Engine(torch.nn.Linear(4, 4), config()).device == torch.device("cpu")
    assert [record.message for record in caplog.records if "[device]" in record.message] == [
        "[device] torch sees a CUDA device, but this build of zerocore has no code for it: the engine runs on the CPU. "
        "Install with `pip install . --config-settings=cmake.define.ZC_CUDA=ON`."
    ]


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"zero": {"offload": "cpu"}}, r"zero.offload \(offload_optimizer, offload_param\): got 'cpu'"),
        ({"zero": {"stage": 1, "share_parameters": True}}, "zero.share_parameters: got True"),
    ],
)
def test_what_is_on_the_cpu_only_is_refused_on_cuda(model, monkeypatch, keys, named):
    monkeypatch.setattr(_core, "cuda_status", lambda: (True, 1, "CUDA backend, 1 x test"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UnsupportedError, match=rf"\[device\] {named} for an engine on CUDA"):
        zerocore.Engine(model, config(zero=zerocore.config.ZeroConfig(**keys["zero"])))


@pytest.mark.parametrize("block", ["offload_optimizer", "offload_param"])
def test_offload_of_deepspeed_is_remembered(block):
    translated = zerocore.Config.from_deepspeed(
        {"train_batch_size": 1, "zero_optimization": {"stage": 3, block: {"device": "cpu"}}}, warn=False
    )
    assert translated.zero.offload == "cpu"
    off = zerocore.Config.from_deepspeed(
        {"train_batch_size": 1, "zero_optimization": {"stage": 3, block: {"device": "none"}}}, warn=False
    )
    assert off.zero.offload == "none"


def test_a_fast_reduction_is_that_of_nccl(model):
    with pytest.raises(ConfigError, match=r'comm.reduction: got "fast", which is NCCL\'s'):
        zerocore.Engine(model, config(comm=zerocore.config.CommConfig(reduction="fast")))


def test_importing_creates_no_cuda_context():
    assert not torch.cuda.is_initialized()

"""Hugging Face's Trainer and Accelerate drive zerocore, through zerocore.compat; what install() does and does not."""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers", "5", reason="needs Hugging Face: pip install 'transformers>=5'")
pytest.importorskip("accelerate", reason="needs Accelerate: pip install accelerate")
pytest.importorskip("peft", reason="needs PEFT: pip install peft")

RUNS = str(Path(__file__).with_name("hugging_face_runs.py"))
STAGES = [2, 3]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """`runs(n)`: (results without zerocore, results with it) of the same scripts on n ranks."""
    from rank_launch import run_ranks

    @functools.cache
    def results(n):
        folder = tmp_path_factory.mktemp(f"ranks{n}")
        for kind in ("plain", "zerocore"):
            # For the group of DistributedDataParallel; zerocore needs neither.
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()} if kind == "plain" else {}
            done = run_ranks(n, RUNS, kind, str(folder), timeout=240, OMP_NUM_THREADS="1", **address)
            assert done.returncode == 0, done.stdout
        return [json.loads((folder / f"{kind}.json").read_text()) for kind in ("plain", "zerocore")]

    return results


def check_close(found, expected):
    assert len(found) == len(expected) > 0
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-5


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["trainer", "trainer decay", "lora"])
@pytest.mark.parametrize("n", [1, 2])
def test_trainer_has_the_losses_that_it_has_without_deepspeed(runs, n, name, stage):
    """Trained with clipping and accumulation over unequally many tokens, and evaluated."""
    plain, ours = (kind[key] for kind, key in zip(runs(n), (name, f"{name} {stage}"), strict=True))
    assert plain["ranks"] == ours["ranks"] == n
    check_close(ours["losses"], plain["losses"])
    check_close(ours["norms"], plain["norms"])
    check_close([ours["eval_loss"]], [plain["eval_loss"]])
    if name != "trainer":  # whose schedule DeepSpeed steps, inside of backward, before the Trainer logs it
        assert ours["rates"] == plain["rates"]


@pytest.mark.parametrize("n", [1, 2])
def test_trainer_saves_what_the_engine_holds_in_every_stage(runs, n):
    _, ours = runs(n)
    saved = {name: run["saved_all"] for name, run in ours.items() if "saved_all" in run}
    assert len(saved) == 14 and all(saved.values()), saved
    for name in ("trainer", "trainer decay", "lora"):
        assert ours[f"{name} 2"]["hash"] == ours[f"{name} 3"]["hash"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["dropout", "dropout lora"])
@pytest.mark.parametrize("n", [1, 2])
def test_trainer_that_resumes_ends_with_the_bits_of_one_that_never_stopped(runs, n, name, stage):
    _, ours = runs(n)
    whole, resumed = (ours[f"{name} {stage} {resume}"] for resume in (False, True))
    assert resumed["hash"] == whole["hash"] and resumed["steps"] == whole["steps"]
    assert resumed["losses"] == whole["losses"] and resumed["eval_loss"] == whole["eval_loss"]
    assert (whole["steps_taken"], resumed["steps_taken"]) == (6, 3)


def test_trainer_fills_auto(runs):
    _, ours = runs(2)
    filled = ours["dropout 2 False"]["filled"]
    assert (filled["train_batch_size"], filled["train_micro_batch_size_per_gpu"]) == (8, 2)
    assert (filled["gradient_accumulation_steps"], filled["gradient_clipping"]) == (2, 0.5)
    assert filled["optimizer"]["params"]["lr"] == filled["scheduler"]["params"]["warmup_max_lr"] == 2e-3
    assert (filled["scheduler"]["params"]["warmup_num_steps"], filled["scheduler"]["params"]["total_num_steps"]) == (
        2,
        6,
    )
    assert filled["zero_optimization"]["reduce_bucket_size"] == 32 * 32


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("n", [1, 2])
def test_accelerate_has_the_losses_that_it_has_without_deepspeed(runs, n, stage):
    plain, ours = (kind[key] for kind, key in zip(runs(n), ("accelerate", f"accelerate {stage}"), strict=True))
    assert plain["ranks"] == ours["ranks"] == n
    check_close(ours["losses"], plain["losses"])
    check_close(ours["norms"], plain["norms"])
    assert min(plain["norms"]) > 0 and plain["state"].keys() == ours["state"].keys()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("n", [1, 2])
def test_accelerate_that_loads_its_state_goes_on_with_the_same_bits(runs, n, stage):
    _, ours = runs(n)
    for name in (f"accelerate {stage}", f"accelerate dropout {stage}", f"accelerate config {stage}"):
        assert ours[name]["again"] == ours[name]["state"]


@pytest.mark.parametrize("stage", STAGES)
def test_accelerate_fills_auto(runs, stage):
    _, ours = runs(2)
    run = ours[f"accelerate config {stage}"]
    assert run["filled"]["train_batch_size"] == 16 and run["filled"]["optimizer"]["params"]["weight_decay"] == 0.1
    assert run["filled"]["scheduler"]["params"]["warmup_max_lr"] == 0.01 == run["rates"][0]


# install()


def run(code):
    env = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PMI_", "RANK", "WORLD_SIZE", "LOCAL_RANK"))
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, env=env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_deepspeed_is_there_where_install_was_called():
    run(
        """
        import importlib.metadata, importlib.util, torch
        import zerocore.compat
        zerocore.compat.install()
        zerocore.compat.install()
        assert importlib.metadata.version("deepspeed") == zerocore.compat.VERSION
        assert importlib.metadata.metadata("deepspeed")["Name"] == "deepspeed"
        assert importlib.util.find_spec("deepspeed") is not None
        import deepspeed, deepspeed.comm as dist
        assert deepspeed.initialize is zerocore.initialize and deepspeed.DeepSpeedEngine is zerocore.Engine
        assert deepspeed.__version__ == zerocore.compat.VERSION and deepspeed.zero.Init is zerocore.zero.Init
        assert dist.is_initialized() and torch.distributed.get_world_size() == 1
        from deepspeed import OnDevice, comm
        from deepspeed.accelerator import get_accelerator
        from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
        from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
        from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
        from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
        from deepspeed.runtime.dataloader import RepeatingLoader
        from deepspeed.runtime.engine import DeepSpeedEngine
        from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES, WarmupLR
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
        from deepspeed.utils import logger, safe_get_full_grad, set_z3_leaf_modules
        from deepspeed.runtime.utils import see_memory_usage
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_cold
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live
        from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs_all_live
        from deepspeed.utils import groups
        from deepspeed.utils.groups import _get_data_parallel_world_size
        from deepspeed.utils.logging import log_dist
        assert deepspeed.utils.groups is groups and _get_data_parallel_world_size() == 1
        from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
        assert {"WarmupLR", "WarmupDecayLR", "WarmupCosineLR"} <= set(VALID_LR_SCHEDULES)
        bucket = torch.zeros(10)
        copies = clone_tensors_for_torch_save({"a": bucket[:2], "b": [bucket[2:3], 7]})
        assert copies["a"].untyped_storage().nbytes() == 8 and copies["b"][1] == 7
        for missing in ("deepspeed.pipe", "deepspeed.ops.transformer"):
            try:
                importlib.import_module(missing)
            except ModuleNotFoundError:
                continue
            raise AssertionError(missing)
        """
    )


def test_deepspeed_is_not_there_otherwise():
    run(
        """
        import importlib.metadata, importlib.util, sys
        import zerocore, zerocore.compat
        zerocore.Engine
        if importlib.util.find_spec("deepspeed") is None:  # not installed itself
            try:
                importlib.metadata.version("deepspeed")
            except importlib.metadata.PackageNotFoundError:
                pass
            else:
                raise AssertionError("found")
        assert "deepspeed" not in sys.modules
        """
    )


def test_an_install_that_fails_leaves_nothing_behind():
    """Here for a group of torch.distributed of the script's own, which is not over MPI's ranks."""
    run(
        """
        import sys
        import torch
        from torch.testing._internal.distributed import fake_pg
        import zerocore.compat
        torch.distributed.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=2)
        try:
            zerocore.compat.install()
        except zerocore.errors.ConfigError as error:
            assert "got a process group" in str(error)
        else:
            raise AssertionError("installed")
        assert not [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]
        """
    )


@pytest.mark.parametrize("library", ["accelerate.utils", "transformers.integrations.deepspeed"])
def test_install_after_a_library_that_has_looked(library):
    out = run(
        f"""
        import sys
        sys.modules["deepspeed"] = None  # so that one that is installed is not found
        import {library}
        del sys.modules["deepspeed"]
        import zerocore.compat
        try:
            zerocore.compat.install()
        except zerocore.errors.ConfigError as error:
            print(error)
        """
    )
    name = library.split(".")[0]
    assert f"[compat] install: got {name} imported already, which has found no DeepSpeed" in out


def test_accelerate_without_deepspeed_is_left_alone():
    run(
        """
        import zerocore.compat
        zerocore.compat.install()
        from accelerate import Accelerator
        from accelerate.utils import DistributedType
        assert Accelerator().distributed_type == DistributedType.NO
        """
    )

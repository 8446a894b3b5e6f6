"""Makes tests/data/deepspeed.tar.xz: small checkpoints saved by DeepSpeed itself, and what it says is in them.

By hand, where deepspeed is installed (made with 0.19.8 and torch 2.13, on CPUs):

    python tests/python/make_deepspeed_checkpoints.py tests/data/deepspeed.tar.xz

Of each of CASES and OTHER_OPTIMIZERS there is a folder `<case>/global_step2` as save_checkpoint() leaves it, without
the scripts that DeepSpeed copies into it, and `<case>/expected.safetensors`: `fp32/<name>` from DeepSpeed's
zero_to_fp32, or from its safe_get_full_fp32_param where that fails, and `exp_avg/<name>` and the like from
safe_get_full_optimizer_state.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import torch
from torch import nn

CASES = [f"stage{s}-{d}-{n}ranks" for s, d, n in itertools.product((1, 2, 3), ("fp32", "bf16", "fp16"), (1, 2))]
VARIANTS = {  # of the configuration, and so of the layout
    "stage3-fp32-2ranks-subgroups": {"zero_optimization": {"stage": 3, "sub_group_size": 40}},
    "stage3-fp32-3ranks-alike": {},
    "stage2-fp32-3ranks-alike": {},
    "stage2-bf16-2ranks-elastic": {"zero_optimization": {"stage": 2, "elastic_checkpoint": True}},
    "stage1-bf16-2ranks-sums32": {"data_types": {"grad_accum_dtype": "fp32"}},
}
CASES += VARIANTS
_RATE = {"lr": 0.01, "weight_decay": 0.1}
OTHER_OPTIMIZERS = {  # than Adam, whose states have other names
    "stage2-fp32-2ranks-lion": {
        "optimizer": {"type": "Lion", "params": _RATE | {"betas": [0.75, 0.875]}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},  # else it needs CUDA
    },
    "stage1-bf16-2ranks-adagrad": {"optimizer": {"type": "Adagrad", "params": _RATE}},
    "stage3-fp32-2ranks-adagrad": {"optimizer": {"type": "Adagrad", "params": _RATE}},
}
STEPS = 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CLIENT_STATE = {
    "epoch": 3,
    "best": float("inf"),
    "seen": {"tokens": [1, 2, None], "pair": (4, "five")},
    "table": torch.arange(3),
    "arguments": argparse.Namespace(lr=0.1),  # no JSON
    "nested": {"kept": True, "counter": collections.Counter("aab"), "names": {"x"}},
}


class Model(nn.Module):
    """Tied, frozen and odd-sized parameters, buffers, a scalar."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.norm = nn.LayerNorm(6)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mask", torch.tensor([1.0, 0.5, 1.0, 0.25, 1.0]))
        self.inner = nn.Linear(6, 7)
        self.frozen = nn.Linear(7, 5).requires_grad_(False)
        self.outer = nn.Linear(5, 6, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        self.count += tokens.numel()
        x = self.frozen(torch.tanh(self.inner(self.norm(self.table(tokens))))) * self.mask.to(self.scale.dtype)
        return self.head(self.outer(x) * self.scale).float().square().mean()


def make_model():
    torch.manual_seed(7)
    return Model()


def groups(model, case=""):
    """Two parameter groups: biases and scales are not decayed. One for Adagrad: DeepSpeed fails with two."""
    params = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if case.endswith("adagrad"):
        return [{"params": [p for _, p in params]}]
    decayed = [p for _, p in params if p.dim() > 1]
    return [{"params": decayed}, {"params": [p for _, p in params if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.003}]


def config(case):
    """DeepSpeed's configuration, also for the engine that loads the import."""
    stage, dtype, ranks = parse(case)
    decoupled = dtype != "fp16"
    precision = {"enabled": True} | ({"initial_scale_power": 5} if dtype == "fp16" else {})
    return {
        "train_batch_size": 4 if ranks < 3 else 6,
        "gradient_accumulation_steps": 1,
        "optimizer": {
            "type": "AdamW" if decoupled else "Adam",
            "params": {"lr": 0.01, "weight_decay": 0.1, "adam_w_mode": decoupled, "torch_adam": True},
        },
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 9}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 10**9,
        **({} if dtype == "fp32" else {dtype: precision}),
        **VARIANTS.get(case, {}),
        **OTHER_OPTIMIZERS.get(case, {}),
    }


def states(case):
    """The names of the optimizer's states, here and there."""
    return {"lion": ("exp_avg",), "adagrad": ("sum",)}.get(case.rpartition("-")[2], ("exp_avg", "exp_avg_sq"))


def parse(case):
    stage, dtype, ranks = case.split("-")[:3]
    return int(stage.removeprefix("stage")), dtype, int(ranks.removesuffix("ranks"))


def save(case, folder):
    """One rank's part of one case."""
    import deepspeed
    import safetensors.torch
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    _, _, ranks = parse(case)
    model = make_model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups(model, case), config=config(case))
    for step in range(STEPS):
        random = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 9, (config(case)["train_batch_size"],), generator=random).chunk(ranks)[
            engine.global_rank
        ]
        engine.backward(engine(tokens))
        engine.step()
    engine.save_checkpoint(folder, client_state=CLIENT_STATE)
    expected = {}
    if hasattr(
        engine.optimizer, "_hp_optimizer_states_linked"
    ):  # DeepSpeed does so before the second group has a state
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            expected[f"fp32/{name}"] = safe_get_full_fp32_param(param)
            for key in states(case):
                expected[f"{key}/{name}"] = safe_get_full_optimizer_state(param, key)
    if engine.global_rank == 0:
        if case == "stage1-bf16-2ranks-sums32":  # "not a zero checkpoint", zero_to_fp32 says
            weights = dict(engine.module.named_buffers())
        else:
            weights = get_fp32_state_dict_from_zero_checkpoint(folder)
        expected |= {f"fp32/{name}": value for name, value in weights.items()}
        expected = {name: value.detach().clone().contiguous() for name, value in expected.items()}
        safetensors.torch.save_file(expected, f"{folder}/expected.safetensors")
        for script in Path(folder).glob("*.py"):
            script.unlink()
    engine.destroy()


def run(cases, folder):
    """Saves the cases below `folder`, each on its ranks."""
    for ranks in sorted({parse(case)[2] for case in cases}):
        mine = [case for case in cases if parse(case)[2] == ranks]
        env = {
            **os.environ,
            "DS_ACCELERATOR": "cpu",
            "LOCAL_SIZE": str(ranks),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29507",
            "OMP_NUM_THREADS": "1",
        }
        jobs = [
            subprocess.Popen(
                [sys.executable, __file__, "--folder", folder, *mine], env=env | {"RANK": str(r), "LOCAL_RANK": str(r)}
            )
            for r in range(ranks)
        ]
        if any([job.wait() for job in jobs]):
            raise RuntimeError(f"a rank failed with {mine}")


def main():
    if sys.argv[1] == "--folder":
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        get_accelerator().is_fp16_supported = lambda: True  # by torch it is; DeepSpeed does not believe it of CPUs
        torch.set_num_threads(1)
        deepspeed.init_distributed("gloo")
        for case in sys.argv[3:]:
            save(case, f"{sys.argv[2]}/{case}")
        return
    with tempfile.TemporaryDirectory() as folder:
        run([*CASES, *OTHER_OPTIMIZERS], folder)
        with tarfile.open(sys.argv[1], "w:xz") as archive:
            archive.add(folder, arcname=".")


if __name__ == "__main__":
    main()

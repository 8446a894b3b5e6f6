"""What test_compat.py runs on several ranks: Trainer and Accelerate, as they are and driving zerocore.

Usage: mpirun -n N python hugging_face_runs.py plain|zerocore FOLDER. Results go to FOLDER/plain.json or zerocore.json.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

from rank_launch import mpi_rank_and_size

os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore", message=".*pin_memory.*")

KIND, FOLDER = sys.argv[1], Path(sys.argv[2])
RANK, _ = mpi_rank_and_size()
if KIND == "zerocore":
    import zerocore.compat

    zerocore.compat.install()

import torch  # noqa: E402
import transformers  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

transformers.utils.logging.disable_progress_bar()

VOCAB = 64
STEPS, SAVED_AT = 6, 3
CLIP = 0.5  # below the norms there are


def make_model(dropout):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=dropout,
    )
    return LlamaForCausalLM(config)


def token_data(samples):
    """Sequences of which unequally many tokens count, so that a mean of means is another number."""
    random = torch.Generator().manual_seed(1)
    found = []
    for i in range(samples):
        tokens = torch.randint(3, VOCAB, (12,), generator=random)
        labels = tokens.clone()
        labels[: i % 11] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


# Trainer


def deepspeed_config(stage, *, optimizer=True, scheduler=None):
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": "auto",
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
    if optimizer:
        params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
        config["optimizer"] = {"type": "AdamW", "params": params}
    if scheduler is not None:
        names = ["warmup_min_lr", "warmup_max_lr", "warmup_num_steps"]
        names += ["total_num_steps"] * (scheduler == "WarmupDecayLR")
        config["scheduler"] = {"type": scheduler, "params": dict.fromkeys(names, "auto")}
    return config


class CallOnStepEnd(TrainerCallback):
    def __init__(self, call):
        self.call = call

    def on_step_end(self, args, state, control, **others):
        self.call(state.global_step)


def accelerate_config(stage):
    """What Accelerate fills is less: it knows a model's size from Hugging Face's configuration only."""
    config = deepspeed_config(stage, scheduler="WarmupLR")
    config["zero_optimization"]["reduce_bucket_size"] = 1000
    del config["optimizer"]["params"]["betas"], config["optimizer"]["params"]["eps"]
    return config | {"gradient_accumulation_steps": 2}


def run_trainer(name, *, deepspeed=None, weight_decay=0.0, dropout=0.0, resume=False, lora=False):
    """Losses, norms and learning rates of each step, the loss of an evaluation, and what was saved."""
    folder = FOLDER / f"{KIND}-{name}"
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        learning_rate=2e-3,
        weight_decay=weight_decay,
        warmup_steps=2,
        max_grad_norm=CLIP,
        logging_steps=1,
        save_steps=SAVED_AT,
        eval_strategy="steps",
        eval_steps=SAVED_AT,
        report_to=[],
        disable_tqdm=True,
        log_level="error",
        **({"use_cpu": True} if deepspeed is None else {"deepspeed": deepspeed}),
    )
    model = LlamaForCausalLM.from_pretrained(FOLDER / f"model-{dropout}")
    if lora:
        torch.manual_seed(7)
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], r=4, lora_dropout=dropout))
    trainer = Trainer(model=model, args=arguments, train_dataset=token_data(64), eval_dataset=token_data(16))
    taken = []
    trainer.add_callback(CallOnStepEnd(taken.append))
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED_AT}") if resume else None)
    metrics = trainer.evaluate()
    saved = folder / ("resumed" if resume else "final")
    trainer.save_model(str(saved))
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    result = {
        "ranks": arguments.world_size,
        "losses": [entry["loss"] for entry in steps],
        "norms": [entry["grad_norm"] for entry in steps],
        "rates": [entry["learning_rate"] for entry in steps],
        "eval_loss": metrics["eval_loss"],
        "steps_taken": len(taken),
    }
    if deepspeed is not None:
        result |= of_engine(trainer.model_wrapped, saved / ("adapter_model" if lora else "model"))
        result["filled"] = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
        trainer.model_wrapped.destroy()
    return result


def of_engine(engine, file):
    """The engine's weights, and whether a file has the same."""
    assert type(engine).__module__ == "zerocore._engine"
    state = engine.state_dict()
    engine.comm.barrier("saved").wait()
    loaded = load_file(f"{file}.safetensors")
    if file.name == "adapter_model":  # PEFT leaves the adapter's name out
        state = {name.replace(".default.", "."): value for name, value in state.items() if ".lora_" in name}
    return {
        "hash": zerocore.utils.params_sha256(engine.module),
        "steps": engine.global_steps,
        "saved_all": loaded.keys() == state.keys() and all(torch.equal(loaded[n], state[n]) for n in loaded),
    }


# Accelerate


class Regression(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Dropout(dropout), nn.Linear(40, 3))

    def forward(self, x):
        return self.net(x)


def run_accelerate(name, *, stage=None, dropout=0.0, config=None):
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(0)
    model = Regression(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    if config is not None:  # which names both
        from accelerate.utils import DummyOptim, DummyScheduler

        optimizer = DummyOptim(model.parameters(), lr=0.01, weight_decay=0.1)
        scheduler = DummyScheduler(optimizer, total_num_steps=100, warmup_num_steps=2)
    data = TensorDataset(torch.randn(48, 8), torch.randn(48, 3))
    if stage is None:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    else:
        from accelerate import DeepSpeedPlugin

        plugin = DeepSpeedPlugin(
            hf_ds_config=config, zero_stage=stage, gradient_accumulation_steps=2, gradient_clipping=CLIP
        )
        plugin.deepspeed_config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
        accelerator = Accelerator(deepspeed_plugin=plugin)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=4), scheduler
    )
    losses, norms = [], []

    def epoch():
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), CLIP)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather_for_metrics(loss.detach()).mean().item())

    def trained():
        state = accelerator.get_state_dict(model)
        return {n: value.tolist() for n, value in state.items()} if accelerator.is_main_process else None

    epoch()
    folder = FOLDER / f"{KIND}-{name}"
    accelerator.save_state(str(folder))
    epoch()
    rates = [group["lr"] for group in optimizer.param_groups]
    result = {
        "rates": rates,
        "ranks": accelerator.num_processes,
        "losses": list(losses),
        "norms": list(norms),
        "state": trained(),
    }
    if stage is not None:
        result["filled"] = plugin.deepspeed_config
        assert accelerator.unwrap_model(model) is model.module
        accelerator.load_state(str(folder))
        epoch()
        result["again"] = trained()
        model.destroy()
    accelerator.end_training()
    accelerator.free_memory()
    return result


def main():
    results = {}
    if KIND == "plain":
        for dropout in (0.0, 0.25):
            make_model(dropout).save_pretrained(FOLDER / f"model-{dropout}", is_main_process=RANK == 0)
        results["trainer"] = run_trainer("trainer")
        results["trainer decay"] = run_trainer("decay", weight_decay=0.5)
        results["lora"] = run_trainer("lora", lora=True)
        results["accelerate"] = run_accelerate("accelerate")
    else:
        for stage in (2, 3):
            given = deepspeed_config(stage)
            results[f"trainer {stage}"] = run_trainer(f"trainer-{stage}", deepspeed=given)
            given = deepspeed_config(stage, optimizer=False)
            results[f"trainer decay {stage}"] = run_trainer(f"decay-{stage}", deepspeed=given, weight_decay=0.5)
            given = deepspeed_config(stage, scheduler="WarmupDecayLR")
            for resume in (False, True):
                results[f"dropout {stage} {resume}"] = run_trainer(
                    f"dropout-{stage}", deepspeed=given, dropout=0.25, resume=resume
                )
            given = deepspeed_config(stage, optimizer=False)
            results[f"lora {stage}"] = run_trainer(f"lora-{stage}", deepspeed=given, lora=True)
            for resume in (False, True):
                results[f"dropout lora {stage} {resume}"] = run_trainer(
                    f"dropout-lora-{stage}", deepspeed=given, lora=True, dropout=0.25, resume=resume
                )
            results[f"accelerate {stage}"] = run_accelerate(f"accelerate-{stage}", stage=stage)
            results[f"accelerate config {stage}"] = run_accelerate(
                f"accelerate-config-{stage}", stage=stage, config=accelerate_config(stage)
            )
            results[f"accelerate dropout {stage}"] = run_accelerate(
                f"accelerate-dropout-{stage}", stage=stage, dropout=0.25
            )
    if RANK == 0:
        (FOLDER / f"{KIND}.json").write_text(json.dumps(results, default=str))


main()

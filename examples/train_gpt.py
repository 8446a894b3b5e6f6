"""Trains a byte-level GPT on Python's own source with ZeRO.

    mpirun -n 2 python examples/train_gpt.py                  # or, on one rank: python examples/train_gpt.py
    mpirun -n 2 python examples/train_gpt.py --stage 1 --dtype bf16 --text ~/my/texts
    mpirun -n 2 python examples/train_gpt.py --stage 3 --layers 12 --hidden 512 --heads 8 --checkpointing
    zerocore --num_ranks 2 --max-restarts 3 examples/train_gpt.py --save run    # saves as it goes; goes on from there

The lines that zerocore needs are in main() and train_step(); the rest is data, progress and a picture.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import zerocore
from gpt import GPT, decay_groups
from matplotlib.figure import Figure
from progress import Progress, dtypes, many
from text import Windows, load_text
from zerocore.config import (
    ActivationCheckpointingConfig,
    CheckpointConfig,
    Config,
    LossScaleConfig,
    OptimizerConfig,
    PrecisionConfig,
    SchedulerConfig,
    ZeroConfig,
)

# What --config replaces.
ENGINE_FLAGS = {
    "stage": 2,
    "dtype": "auto",
    "compute_dtype": None,
    "micro_batch": 4,
    "global_batch": 16,
    "bucket_numel": 1_000_000,
    "persistent": 1_000,
    "prefetch": 500_000,
    "checkpointing": False,
}
VALIDATION_WINDOWS = 256


def main() -> None:
    """One rank's part of the job."""
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    train_text, validation_text = load_text(args.text)
    if min(len(train_text), len(validation_text)) <= args.seq:
        stop(
            f"--text: got {len(train_text)} bytes to train on and {len(validation_text)} held out, expected more than "
            f"--seq {args.seq} of each. Every 20th file is held out, at least one."
        )
    config = args.config or engine_config(args)
    with zerocore.zero.Init(config=config):  # in stage 3 no rank ever holds more than a module whole
        model = GPT(layers=args.layers, hidden=args.hidden, heads=args.heads, seq=args.seq)

    engine = zerocore.Engine(
        model,
        config,
        model_parameters=decay_groups(model),
        training_data=Windows(train_text, seq=args.seq),
    )
    curves: dict[str, list[list[float]]] = {"training": [], "validation": []}  # pairs of step and loss
    if args.save:  # go on from the newest checkpoint, if there is one, and save when told to stop
        _, state = engine.resume(args.save, client_state=lambda: curves)
        curves = state or curves
    batches = itertools.chain.from_iterable(itertools.repeat(engine.training_dataloader))  # epoch after epoch
    progress = Progress(engine, args)
    validation = Windows(validation_text, seq=args.seq)
    for step in range(engine.global_steps + 1, args.steps + 1):
        loss = train_step(engine, batches)
        curves["training"].append([step, loss])
        progress.show(step, loss)
        if step % max(1, args.steps // 8) == 0 or step == args.steps:
            curves["validation"].append([step, validation_loss(engine, validation)])
        if args.save and (step % args.save_every == 0 or step == args.steps):
            engine.save_checkpoint(args.save, client_state=curves)
    progress.close()

    engine.eval()
    sample = engine.module.generate(b"def ", count=300, seed=args.seed)
    sha256 = zerocore.utils.params_sha256(engine.module)
    if engine.rank == 0:
        picture = save_loss_curve(args.out / "train_gpt_loss.png", curves)
        print(f"\nsample:\n{printable(sample)}\n\nloss curve: {picture}")
        if engine.skipped_steps:
            print(f"steps skipped for inf or NaN gradients: {engine.skipped_steps} of {args.steps}")
        print(f"validation loss: {curves['validation'][-1][1]:.4f} nats a byte, {progress.elapsed():.0f} s of training")
        print(f"params sha256: {sha256} ({dtypes(engine.config)}, {many(args.threads, 'torch thread')} a rank)")
    engine.close()


def train_step(engine: zerocore.Engine, batches: Iterator[list[torch.Tensor]]) -> float:
    """One optimizer step. Returns the loss, the mean over all ranks."""
    losses = []
    for _ in range(engine.gradient_accumulation_steps()):
        tokens, targets = next(batches)
        loss = engine(tokens, targets)
        engine.backward(loss)
        losses.append(engine.all_reduce_mean(loss.item()))
        engine.step()
    return sum(losses) / len(losses)


@torch.no_grad()
def validation_loss(engine: zerocore.Engine, windows: Windows) -> float:
    """Nats a byte over windows spread evenly over the text. Every rank computes all of it, so all have the same."""
    engine.eval()
    count = min(VALIDATION_WINDOWS, len(windows))
    chosen = [windows[i * len(windows) // count] for i in range(count)]
    total = 0.0
    for start in range(0, count, 16):
        tokens, targets = (torch.stack(each) for each in zip(*chosen[start : start + 16], strict=True))
        total += engine(tokens, targets).item() * len(tokens)
    engine.train()
    return total / count


def engine_config(args: argparse.Namespace) -> Config:
    """The engine's settings from the flags."""
    return Config(
        train_batch_size=args.global_batch,
        micro_batch_size=args.micro_batch,
        gradient_clipping=1.0,
        seed=args.seed,
        optimizer=OptimizerConfig(type="adamw", lr=3e-3, betas=(0.9, 0.99), weight_decay=0.1),
        scheduler=SchedulerConfig(
            type="WarmupCosineLR",
            warmup_num_steps=max(2, args.steps // 30),
            total_num_steps=args.steps,
            warmup_type="linear",
            warmup_min_ratio=0.1,
            cos_min_ratio=0.02,
        ),
        precision=PrecisionConfig(
            dtype=best_dtype() if args.dtype == "auto" else args.dtype,
            compute_dtype=args.compute_dtype,
            loss_scale=LossScaleConfig(initial_scale_power=12),  # fp16: this model overflows above
        ),
        # Stage 3: a block is whole while it computes, and the next ones are on their way; then it is released.
        zero=ZeroConfig(
            stage=args.stage,
            bucket_numel=args.bucket_numel,
            unit_classes=("Block",),
            persistent_param_numel=args.persistent,
            prefetch_numel=args.prefetch,
            max_reuse_numel=0,
        ),
        activation_checkpointing=ActivationCheckpointingConfig(enabled=args.checkpointing),
        checkpoint=CheckpointConfig(async_save=True, keep_last=2),
    )


def best_dtype() -> str:
    """bf16 where the processor computes in it, else fp32: elsewhere torch's bf16 products are many times slower."""
    cpu = Path("/proc/cpuinfo")
    flags = set(cpu.read_text().split()) if cpu.exists() else set()
    return "bf16" if flags & {"amx_bf16", "avx512_bf16"} else "fp32"


def save_loss_curve(path: Path, curves: dict[str, list[list[float]]]) -> Path:
    """Draws the losses by step."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*curves["training"], strict=True), linewidth=0.8, alpha=0.6, label="training, a step")
    axes.plot(*zip(*curves["validation"], strict=True), "o-", label="validation")
    axes.set(title="Byte-level GPT on source code", xlabel="step", ylabel="loss (nats a byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def printable(text: bytes) -> str:
    """Text for a terminal: what would control it is replaced by a dot."""
    return "".join(c if c.isprintable() or c == "\n" else "." for c in text.decode(errors="replace"))


def stop(message: str) -> None:
    """Ends the program with a message."""
    sys.exit(f"train_gpt.py: {message}")


def parse_args() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stage", type=int, help="ZeRO stage: 0, 1, 2 or 3 (default 2)")
    parser.add_argument("--dtype", choices=["auto", "fp32", "bf16", "fp16"], help="default auto: bf16 where it is fast")
    parser.add_argument("--compute-dtype", choices=["fp32", "bf16", "fp16"], help="default: --dtype")
    parser.add_argument("--micro-batch", type=int, help="sequences a forward (default 4)")
    parser.add_argument("--global-batch", type=int, help="sequences a step, over all ranks (default 16)")
    parser.add_argument("--bucket-numel", type=int, help="elements a bucket (default 1000000)")
    parser.add_argument("--persistent", type=int, help="stage 3: parameters up to this size stay whole (default 1000)")
    parser.add_argument("--prefetch", type=int, help="stage 3: elements gathered ahead of use (default 500000)")
    parser.add_argument("--checkpointing", action="store_true", default=None, help="recompute blocks in backward")
    parser.add_argument("--config", type=Path, help="a DeepSpeed JSON, in place of the flags above")
    for name, default in [("layers", 4), ("hidden", 128), ("heads", 4), ("seq", 128), ("steps", 1000), ("threads", 1)]:
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--seed", type=int, default=1, help="of initial values and data order (default 1)")
    parser.add_argument("--text", type=Path, help="a folder of text to train on; default: Python's standard library")
    parser.add_argument("--save", type=Path, help="a folder for checkpoints; a job that finds one goes on from it")
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS", help="steps between them (default 50)")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the loss curve (default: this one)")
    args = parser.parse_args()
    for name, default in ENGINE_FLAGS.items():
        flag = f"--{name.replace('_', '-')}"
        if args.config and getattr(args, name) is not None:
            stop(f"got {flag} and --config {args.config}: the file says it. Leave one of them out.")
        if getattr(args, name) is None:
            setattr(args, name, default)
    sizes = ("layers", "hidden", "heads", "seq", "steps", "threads", "micro_batch", "global_batch", "bucket_numel")
    for name in (*sizes, "save_every"):
        if getattr(args, name) < 1:
            stop(f"--{name.replace('_', '-')}: got {getattr(args, name)}, expected a number >= 1.")
    if args.hidden % (2 * args.heads):
        stop(
            f"--hidden {args.hidden} does not divide over --heads {args.heads}: expected a multiple of twice as many, "
            f"{2 * args.heads}."
        )
    for path in (args.text, args.config):
        if path and not path.exists():
            stop(f"{path}: no such file or folder.")
    return args


if __name__ == "__main__":
    try:
        main()
    except zerocore.errors.ConfigError as error:
        stop(str(error))

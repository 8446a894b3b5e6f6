"""Trains a recommender with sparse embeddings: which functions does a program need, given others that it calls?

    mpirun -n 2 python examples/recommender.py

Baskets are the sets of names that each function of Python's own library calls. One name is hidden, and ranked among all
others by the names that are left.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import random
from collections import Counter

import torch
import zerocore
from text import load_text
from torch import nn
from torch.nn import functional as F

CONFIG = {
    "train_batch_size": 64,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
}
SOURCE_BYTES = 6_000_000
RAREST = 10  # a name in fewer baskets is left out
LONGEST = 8  # names shown of a basket
Basket = list[int]


class Recommender(nn.Module):
    """Scores all items by the mean of the embeddings of those in a basket.

    Gradients of both tables are sparse: a batch touches few rows.
    """

    def __init__(self, items: int, width: int = 32):
        super().__init__()
        self.basket = nn.EmbeddingBag(items, width, mode="mean", sparse=True)
        self.items = nn.Embedding(items, width, sparse=True)
        for table in (self.basket, self.items):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, shown: torch.Tensor, offsets: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Items of all baskets, where each basket begins, (n,) candidates: scores (baskets, n)."""
        return self.basket(shown, offsets) @ self.items(candidates).t()


def main() -> None:
    """One rank's part of the job."""
    args = parse_args()
    torch.manual_seed(0)
    baskets, names = load_baskets()
    held_out = baskets[::20]
    train = [basket for i, basket in enumerate(baskets) if i % 20]
    engine = zerocore.Engine(Recommender(len(names)), CONFIG, training_data=train, collate_fn=collate)
    for epoch in range(args.epochs):
        for shown, offsets, hidden in engine.training_dataloader:
            # The other baskets' hidden items serve as those that were not wanted.
            scores = engine(shown.to(engine.device), offsets.to(engine.device), hidden.to(engine.device))
            engine.backward(F.cross_entropy(scores, torch.arange(len(hidden), device=engine.device)))
            engine.step()
        hits = hits_in_10(engine, held_out, len(names))
        if engine.rank == 0:
            share = f"{hits} of {len(held_out)} hidden names among the first 10 of {len(names)}"
            print(f"epoch {epoch + 1}: {share} (by chance {10 * len(held_out) / len(names):.1f})", flush=True)
    engine.close()


def collate(baskets: list[Basket]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Items shown, one basket after the other; where each begins; and the item of each that is hidden, its last."""
    shown = [basket[:-1] for basket in baskets]
    offsets = torch.tensor([0, *map(len, shown)]).cumsum(0)[:-1]
    return torch.tensor([*itertools.chain(*shown)]), offsets, torch.tensor([basket[-1] for basket in baskets])


@torch.no_grad()
def hits_in_10(engine: zerocore.Engine, baskets: list[Basket], items: int) -> int:
    """In how many baskets the hidden item is among the ten best; all ranks together."""
    engine.eval()
    shown, offsets, hidden = collate(baskets)
    best = engine(shown.to(engine.device), offsets.to(engine.device), torch.arange(items, device=engine.device)).topk(
        10
    )
    engine.train()
    return int((best.indices.cpu() == hidden[:, None]).sum())


def load_baskets() -> tuple[list[Basket], list[str]]:
    """Baskets of two or more item numbers, in an order that is the same each time; and the items' names."""
    called: list[set[str]] = []
    for text in load_text()[0][:SOURCE_BYTES].decode(errors="replace").split("\n\n\n"):  # mostly whole definitions
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        called += [{name(node) for node in ast.walk(each) if isinstance(node, ast.Call)} - {""} for each in functions]
    counts = Counter(name for names in called for name in names)
    kept = sorted(name for name, count in counts.items() if count >= RAREST)
    number = {name: i for i, name in enumerate(kept)}
    shuffled = random.Random(0)
    baskets = [sorted(number[name] for name in names if name in number) for names in called]
    baskets = [shuffled.sample(basket, min(len(basket), LONGEST + 1)) for basket in baskets if len(basket) > 1]
    shuffled.shuffle(baskets)
    return baskets, kept


def name(call: ast.Call) -> str:
    """The last part of what is called."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def parse_args() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()

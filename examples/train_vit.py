"""Trains a vision transformer, or a CNN with BatchNorm, to read handwritten digits.

    pip install scikit-learn
    mpirun -n 2 python examples/train_vit.py
    mpirun -n 2 python examples/train_vit.py --model cnn --stage 1

The images are scikit-learn's 1,797 scans of 8 x 8 pixels. Parameters, running statistics included, have the same bits
on any number of ranks.
"""

from __future__ import annotations

import argparse

import torch
import zerocore
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from zerocore.config import Config, OptimizerConfig, SchedulerConfig, ZeroConfig

BATCH, MICRO_BATCH = 32, 8
HELD_OUT = 297  # images


class ViT(nn.Module):
    """Patches of 2 x 2 pixels, a class token, pre-norm transformer layers. Images (n, 1, 8, 8) to logits (n, 10)."""

    def __init__(self, width: int = 64, layers: int = 4, heads: int = 4):
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 17, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """See the class."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(images), -1, -1), patches], dim=1) + self.positions
        return self.head(self.layers(tokens)[:, 0])


def cnn() -> nn.Module:
    """Two convolutions with BatchNorm and a classifier."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 10)),
    )


def main() -> None:
    """One rank's part of the job."""
    args = parse_args()
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    config = Config(
        train_batch_size=BATCH,
        micro_batch_size=MICRO_BATCH,
        optimizer=OptimizerConfig(type="adamw", lr=args.lr, weight_decay=0.01),
        scheduler=SchedulerConfig(type="WarmupLR", warmup_max_lr=args.lr, warmup_num_steps=20),
        gradient_clipping=1.0,
        zero=ZeroConfig(stage=args.stage),
        buffers="ordered",  # BatchNorm's statistics see the micro-batches in their order
    )
    engine = zerocore.Engine(
        ViT() if args.model == "vit" else cnn(),
        config,
        training_data=torch.utils.data.TensorDataset(images[:-HELD_OUT], labels[:-HELD_OUT]),
    )
    for epoch in range(args.epochs):
        for batch, target in engine.training_dataloader:
            loss = F.cross_entropy(engine(batch.to(engine.device)), target.to(engine.device))
            engine.backward(loss)
            engine.step()
        engine.eval()
        with torch.no_grad():
            right = (engine(images[-HELD_OUT:].to(engine.device)).argmax(-1).cpu() == labels[-HELD_OUT:]).sum()
        engine.train()
        if engine.rank == 0:
            print(f"epoch {epoch + 1}: {int(right)} of {HELD_OUT} held-out digits right", flush=True)
    sha256 = zerocore.utils.params_sha256(engine.module)
    if engine.rank == 0:
        print(f"params sha256: {sha256}")
    engine.close()


def parse_args() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["vit", "cnn"], default="vit")
    parser.add_argument("--stage", type=int, choices=[0, 1, 2, 3], default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=2e-3)
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""The GPT that the benchmarks train, its sizes, and the statistics of what they time."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from gpt import GPT

SIZES = {  # short: the weights of base, and few tokens: what an engine adds shows
    "default": {"layers": 6, "hidden": 256, "heads": 4, "seq": 128, "micro_batch": 4, "vocab": 8192},
    "base": {"layers": 12, "hidden": 384, "heads": 6, "seq": 256, "micro_batch": 4, "vocab": 8192},
    "short": {"layers": 12, "hidden": 384, "heads": 6, "seq": 32, "micro_batch": 1, "vocab": 8192},
    "tiny": {"layers": 2, "hidden": 64, "heads": 2, "seq": 32, "micro_batch": 2, "vocab": 256},
}
FIELDS = tuple(SIZES["default"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--size, and a flag for each of its fields, which settle() fills in."""
    parser.add_argument("--size", choices=SIZES, default="default", help="a model and its batch")
    for name in FIELDS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="instead of the size's")


def settle(args: argparse.Namespace, defaults: dict[str, int]) -> None:
    """Gives what was not named on the command line the value of the size or of `defaults`."""
    for name, value in (SIZES[args.size] | defaults).items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def flags(args: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """The command line that says the same."""
    return [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names]


def make_model(args: argparse.Namespace) -> GPT:
    """With the same initial values on every call and rank."""
    torch.manual_seed(0)
    return GPT(layers=args.layers, hidden=args.hidden, heads=args.heads, seq=args.seq, vocabulary=args.vocab)


def make_data(args: argparse.Namespace, rank: int, steps: int) -> list[list[torch.Tensor]]:
    """(tokens, targets) a step: random text in which every other token repeats the one before."""
    generator = torch.Generator().manual_seed(1 + rank)
    half = torch.randint(0, args.vocab, (steps, args.micro_batch, args.seq // 2 + 1), generator=generator)
    text = half.repeat_interleave(2, dim=2)[:, :, : args.seq + 1]
    return [[tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()] for tokens in text]


def describe(settings: Mapping[str, Any]) -> str:
    """The model and its batch, in words."""
    return (
        "{ranks} ranks x {threads} thread, GPT {layers} x {hidden}, vocabulary {vocab}, {micro_batch} x {seq} tokens a "
        "rank, fp32"
    ).format(**settings)


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """Where the median lies with a confidence of at least 95 %, whatever the distribution: two of the samples.

    The number of samples below the median is binomial. With fewer than 6 the whole range says less than 95 %.
    """
    ordered, n = sorted(samples), len(samples)
    outside, rank = 0.0, 0
    while (outside := outside + math.comb(n, rank) / 2**n) <= 0.025:
        rank += 1
    first = max(rank - 1, 0)
    return ordered[first], ordered[n - 1 - first]


def summary(samples: Sequence[float], digits: int = 3) -> str:
    """The median and its interval, as tables show it."""
    low, high = median_interval(samples)
    return f"{statistics.median(samples):.{digits}f} ({low:.{digits}f} - {high:.{digits}f})"

"""`zerocore plan CONFIG --model MODEL`: what training would hold on a rank in each ZeRO stage, and what fits."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from zerocore._cli._sizes import size
from zerocore.config import Config, OptimizerConfig
from zerocore.config._deepspeed import explain
from zerocore.config._json import read
from zerocore.config._keys import Auto, Use
from zerocore.config._reading import Reading
from zerocore.config._table import TABLE
from zerocore.errors import Error

if TYPE_CHECKING:
    import torch

    from zerocore._plan import Plan

_STAGES = (0, 1, 2, 3)
_MOST_RANKS = 1 << 16
_BATCH = ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps")
# Numbers that somebody else fills in; none of them changes how much is held.
_FILLED_IN = {key.path for key in TABLE if key.auto is Auto.MUST_FILL and not key.path.endswith(".type")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("config", help="a DeepSpeed configuration: a JSON file")
    parser.add_argument(
        "--model",
        required=True,
        metavar="NAME",
        help="module:function, which returns the model, or a Hugging Face model whose config is on this machine",
    )
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="of the job (default: 1)")
    parser.add_argument("--gpu-mem", type=size, metavar="SIZE", help="of a rank, like 80G: says what fits")


def run(arguments: argparse.Namespace) -> int:
    """Prints keys, bytes and what fits. Returns 1 when keys are refused, or nothing fits."""
    raw, _ = read(arguments.config)
    config, reading = explain(_fill(raw))
    print("\n".join(_keys(reading)))
    if config is None:
        print(f"zerocore: [plan] {arguments.config}: keys are refused. Mend those first.", file=sys.stderr)
        return 1
    from zerocore._plan import build_model, table  # torch

    model = build_model(arguments.model)
    count = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    ranks = arguments.ranks
    print(f"\n{type(model).__name__}: {count:,} parameters, {trained:,} of them trained; {ranks} ranks")
    if config.optimizer is None:
        config = dataclasses.replace(config, optimizer=OptimizerConfig())
        print("no optimizer in the configuration: AdamW")
    plans = _plans(model, config, ranks)
    print("\n".join(table(plans)))
    if arguments.gpu_mem is None:
        return 0
    fit, text = _what_fits(model, config, ranks, plans, arguments.gpu_mem)
    print(text)
    return 0 if fit else 1


def _fill(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with numbers for "auto" where these are needed and change nothing here."""

    def filled(block: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        out = {}
        for name, value in block.items():
            path = f"{prefix}{name}"
            if isinstance(value, dict):
                value = filled(value, f"{path}.")
            elif value == "auto" and path in _FILLED_IN:
                value = 1
            out[name] = value
        return out

    new = filled(raw, "")
    if not any(isinstance(new.get(name), int) for name in _BATCH[:2]) and any(name in new for name in _BATCH[:2]):
        new = {name: value for name, value in new.items() if name not in _BATCH} | {_BATCH[0]: 1}
    return new


def _keys(reading: Reading) -> Iterator[str]:
    natives = {key.path: key.note for key in TABLE if key.use is Use.HONOURED}
    yield "honoured:"
    for path, value in reading.values.items():
        yield f"  {path} {json.dumps(value)}: sets {natives[path]}"
    for title, lines in (
        ("without effect", reading.without_effect),
        ("older names", reading.older_names),
        ('"auto", counts as not given', reading.autos),
        ("refused", reading.problems),
    ):
        if lines:
            yield f"{title}:"
            yield from (f"  {line}" for line in lines)


def _plans(model: torch.nn.Module, config: Config, ranks: int) -> dict[int, Plan | Error]:
    """By stage; what a stage cannot do for this model is its error."""
    from zerocore._plan import plan

    plans: dict[int, Plan | Error] = {}
    for stage in _STAGES:
        try:
            plans[stage] = plan(model, _with_stage(config, stage), ranks)
        except Error as error:
            plans[stage] = error
    return plans


def _with_stage(config: Config, stage: int) -> Config:
    return dataclasses.replace(config, zero=dataclasses.replace(config.zero, stage=stage))


def _what_fits(
    model: torch.nn.Module, config: Config, ranks: int, plans: Mapping[int, Plan | Error], limit: int
) -> tuple[bool, str]:
    def first(plans: Mapping[int, Plan | Error]) -> int | None:
        fitting = (stage for stage, each in plans.items() if not isinstance(each, Error) and each.bytes <= limit)
        return next(fitting, None)

    stage = first(plans)
    if stage is not None:
        own = plans[config.zero.stage]
        fits = not isinstance(own, Error) and own.bytes <= limit
        return True, (
            f'first that fits into {limit:,} bytes: "zero_optimization": {{"stage": {stage}}}\n'
            f"the configuration's own stage {config.zero.stage} {'fits' if fits else 'does not fit'}"
        )
    more = ranks
    any_batch = dataclasses.replace(config, train_batch_size=None, micro_batch_size=1, gradient_accumulation_steps=None)
    while more < _MOST_RANKS:
        more *= 2
        if first(_plans(model, any_batch, more)) is not None:
            return False, f"nothing fits into {limit:,} bytes on {ranks} ranks; on {more} ranks a stage does"
    return False, f"nothing fits into {limit:,} bytes, whatever the number of ranks"

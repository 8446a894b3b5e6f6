"""`zerocore import-deepspeed CHECKPOINT OUT`: a DeepSpeed checkpoint, made one of zerocore's."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "checkpoint", type=Path, help="a DeepSpeed checkpoint of ZeRO stage 1, 2 or 3, or the folder above"
    )
    parser.add_argument("out", type=Path, help="a folder of checkpoints, for load_checkpoint() or resume()")
    parser.add_argument("--force", action="store_true", help="replace a checkpoint of the same tag")


def run(arguments: argparse.Namespace) -> int:
    """Makes it, and says what was left out."""
    from zerocore._import_deepspeed import import_deepspeed  # torch reads the files

    imported = import_deepspeed(arguments.checkpoint, arguments.out, force=arguments.force)
    print(f"imported {imported.source} (stage {imported.stage}, {imported.world_size} ranks) to {imported.path}")
    for what in imported.left_out:
        print(f"  left out: {what}")
    return 0

"""`zerocore export CHECKPOINT OUT`: a checkpoint's weights as safetensors."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from zerocore import _export
from zerocore._cli._sizes import size
from zerocore._load import open_checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or a folder of checkpoints: what `latest` names")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument(
        "--dtype",
        choices=["auto", *_export.DTYPES],
        default="auto",
        help="of the weights (default: auto, as in the model)",
    )
    parser.add_argument(
        "--max-shard-size", type=size, default=size("5GB"), metavar="SIZE", help="of a file (default: 5GB)"
    )
    parser.add_argument(
        "--config-from", type=Path, metavar="DIR", help="copy a Hugging Face model's other files from there"
    )
    parser.add_argument(
        "--adapter",
        nargs="?",
        const="default",
        metavar="NAME",
        help="write an adapter of a PeftModel, as PEFT does, and nothing else (default NAME: default)",
    )
    parser.add_argument("--force", action="store_true", help="replace the weights in a folder that is not empty")


def run(arguments: argparse.Namespace) -> int:
    """Writes the files and prints what they are."""
    checkpoint = open_checkpoint(arguments.checkpoint)
    exported = _export.export(
        checkpoint,
        arguments.out,
        dtype=arguments.dtype,
        max_shard_bytes=arguments.max_shard_size,
        config_from=arguments.config_from,
        adapter=arguments.adapter,
        force=arguments.force,
    )
    print(f"exported {checkpoint.path} to {arguments.out}")
    for name, tensors in exported.files.items():
        dtypes = ", ".join(sorted({tensor.dtype for tensor in tensors}))
        held = sum(tensor.bytes for tensor in tensors)
        print(f"  {name}  {len(tensors)} tensors ({dtypes}), {held:,} bytes")
    for tie, name in exported.ties.items():
        print(f"  {tie} is {name}")
    for what in _export.left_out(checkpoint) if arguments.adapter is None else []:
        print(f"  not exported: {what}", file=sys.stderr)
    return 0

"""A checkpoint's weights in fp32, in files named as those that DeepSpeed's zero_to_fp32.py makes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from zerocore import _core
from zerocore._cli._sizes import size
from zerocore._export import export
from zerocore._files import named_errors
from zerocore._load import Checkpoint
from zerocore._model_file import write_pickle
from zerocore.errors import ConfigError

_INDEX = "pytorch_model.bin.index.json"


def convert(
    checkpoint: Checkpoint,
    state: dict[str, torch.Tensor] | None,
    out: Path,
    *,
    max_shard_size: int | str | None,
    exclude_frozen: bool,
) -> None:
    """Writes `state` as pytorch_model*.bin; without one, the checkpoint itself as model*.safetensors.

    Raises:
        ConfigError: max_shard_size is none, or `out` is called like a file.
        IoError: writing failed.
    """
    if out.suffix in (".bin", ".pt", ".pth", ".safetensors"):
        raise ConfigError(
            f"[export] output_dir: got {out}, expected a folder, in which the files get their names. Give {out.parent}."
        )
    limit = _bytes(max_shard_size)
    if state is None:
        export(checkpoint, out, dtype="fp32", max_shard_bytes=limit, exclude_frozen=exclude_frozen, force=True)
        return
    shards = _shards(state, limit)
    names = [f"pytorch_model-{i + 1:05}-of-{len(shards):05}.bin" for i in range(len(shards))]
    if len(shards) == 1:
        names = ["pytorch_model.bin"]
    index = {
        "metadata": {"total_size": sum(_size(value) for value in {id(v): v for v in state.values()}.values())},
        "weight_map": {name: file for file, shard in zip(names, shards, strict=True) for name in shard},
    }
    with named_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        (out / _INDEX).unlink(missing_ok=True)  # of other weights
        for name, shard in zip(names, shards, strict=True):
            temporary = out / f".{name}.converting"
            write_pickle(temporary, shard)
            os.replace(temporary, out / name)
        if len(shards) > 1:
            _core.write_new_file(out / _INDEX, json.dumps(index, indent=2).encode())
        _core.sync_folder(out)


def _bytes(max_shard_size: int | str | None) -> int:
    try:
        limit = size(str(max_shard_size)) if max_shard_size is not None else 1 << 62
    except ValueError:
        raise ConfigError(
            f"[export] max_shard_size: got {max_shard_size!r}, expected bytes, a size like '5GB', or None."
        ) from None
    return limit


def _shards(state: dict[str, torch.Tensor], limit: int) -> list[dict[str, torch.Tensor]]:
    """Filled one after the other; all names of a tensor are in the same one, so that it is written once."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    home: dict[int, dict[str, torch.Tensor]] = {}
    held = 0
    for name, value in state.items():
        if id(value) not in home:
            if shards[-1] and held + _size(value) > limit:
                shards.append({})
                held = 0
            held += _size(value)
            home[id(value)] = shards[-1]
        home[id(value)][name] = value
    return shards


def _size(value: torch.Tensor) -> int:
    return value.numel() * value.element_size()

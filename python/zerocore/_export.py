"""A checkpoint's weights as safetensors files that Hugging Face and plain torch load. No torch in it.

Note: memory. Tensors are read in batches of _BATCH_BYTES, so that a chunk of the checkpoint is read and checked once,
not once for each small tensor in it; a large tensor goes through in several. Only one whose elements are stored in
another order than its shape's is whole in memory, twice.

Note: what appears when. The files are made in a folder of another name beside the target, and are on the disk before
they get their own names. A new target appears at once, by one rename. In one that stands (`force`) the old index and
weights are removed first, then the new files are moved in, the index last: nobody finds half a file, or an index of
other weights.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from zerocore import _core
from zerocore._exchange import address_of
from zerocore._files import named_errors
from zerocore._load import Checkpoint, Wanted
from zerocore._manifest import Entry, Part
from zerocore._safetensors import ITEM_BYTES, Writer
from zerocore.errors import CheckpointError, ConfigError, UnsupportedError

logger = logging.getLogger("zerocore")

DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_CORE_DTYPES = {"F32": _core.DType.fp32, "BF16": _core.DType.bf16, "F16": _core.DType.fp16}
_HF_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_UNSIGNED: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}
_BATCH_BYTES = 64 << 20
_WEIGHTS = re.compile(r"(model(-\d+-of-\d+)?|adapter_model)\.safetensors(\.index\.json)?")
_CONFIGS = re.compile(r"(?!.*\.index\.json$).*\.(json|txt|model|jinja|py)")  # of a Hugging Face model; no weights


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of the export."""

    name: str
    dtype: str
    entry: Entry
    part: Part

    @property
    def bytes(self) -> int:
        return self.entry.numel * ITEM_BYTES[self.dtype]


@dataclasses.dataclass(frozen=True)
class _Span:
    """Elements [begin, end) of a tensor; all of it when they are stored in another order."""

    tensor: Tensor
    begin: int
    end: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written: file names with their tensors, and names that stand for tensors under another name."""

    files: dict[str, list[Tensor]]
    ties: dict[str, str]


def export(
    checkpoint: Checkpoint,
    out: Path,
    *,
    dtype: str = "auto",
    max_shard_bytes: int = 5_000_000_000,
    config_from: Path | None = None,
    adapter: str | None = None,
    exclude_frozen: bool = False,
    force: bool = False,
) -> Exported:
    """Writes the weights and buffers of a checkpoint into the folder `out`, which then holds all of them or none.

    Args:
        dtype: "auto": as in the model that was saved. "fp32", "bf16", "fp16": what is fp32, bf16 or fp16 becomes that;
            of trained parameters from their fp32 masters, rounded once.
        max_shard_bytes: of the tensors in one file; one that is larger has a file of its own.
        config_from: a folder from which the files of a Hugging Face model that are no weights are copied, with the
            dtype in its config.json set to what was written.
        adapter: write this adapter of a PeftModel as PEFT does, and nothing else.
        exclude_frozen: without the parameters that were not trained; of a whole model.
        force: replace the weights in a folder that is not empty.

    Raises:
        ConfigError: `out` is not empty, or there is no such adapter.
        CheckpointError: what was read is damaged; nothing was written.
        IoError: writing failed.
    """
    _check_target(out, force=force)
    tensors, ties = _whole_model(checkpoint, exclude_frozen) if adapter is None else _adapter(checkpoint, adapter)
    tensors = [_converted(tensor, dtype) for tensor in tensors]
    files = _shards(tensors, max_shard_bytes, "model" if adapter is None else "adapter_model")
    out = out.resolve()  # a link stays one
    temporary = out.with_name(f".{out.name}.exporting")
    with named_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)  # of an export that was killed
        temporary.mkdir()
        try:
            if config_from is not None:
                _copy_configs(config_from, temporary, _main_dtype(tensors))
            for name, contents in files.items():
                _write_file(checkpoint, temporary / name, contents, ties)
            if len(files) > 1:
                _write_index(temporary / "model.safetensors.index.json", files)
            _core.sync_folder(temporary)
            _publish(temporary, out)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return Exported(files=files, ties=ties)


def left_out(checkpoint: Checkpoint) -> list[str]:
    """What of the model is not in an export, in words."""
    manifest = checkpoint.manifest
    lines = []
    if manifest.frozen_excluded:
        lines.append("frozen parameters: the checkpoint was saved with exclude_frozen_parameters=True")
    if manifest.state.extra_state:
        lines.append(f"what is no tensor: {', '.join(manifest.state.extra_state)}")
    return lines


# What is written


def _whole_model(checkpoint: Checkpoint, exclude_frozen: bool) -> tuple[list[Tensor], dict[str, str]]:
    tensors, ties = [], {}
    for entry in checkpoint.manifest.of_role("trained", "frozen", "buffer"):
        if exclude_frozen and entry.role == "frozen":
            continue
        tensors.append(Tensor(entry.name, entry.dtype, entry, _weights(checkpoint, entry)))
        ties.update(dict.fromkeys(entry.ties, entry.name))
    return tensors, ties


def _adapter(checkpoint: Checkpoint, adapter: str) -> tuple[list[Tensor], dict[str, str]]:
    """The tensors that PEFT saves, under its names: without the adapter's own name, whatever it is called on loading.

    They are all that have the adapter's name in theirs, and what else was trained (biases, embeddings).
    """
    tensors = []
    found = False
    for entry in checkpoint.manifest.of_role("trained", "frozen", "buffer"):
        for full_name in [entry.name, *entry.ties]:
            parts = full_name.split(".")
            if adapter in parts:
                if "prompt_encoder" in parts:
                    raise UnsupportedError(
                        f"[export] --adapter: got {full_name}, of prompt learning, expected LoRA or another adapter "
                        "with weights at the model's layers. Export the whole model."
                    )
                found = True
                parts = [part for part in parts if part not in (adapter, "modules_to_save")]
            elif entry.role != "trained":
                continue
            tensors.append(Tensor(".".join(parts), entry.dtype, entry, _weights(checkpoint, entry)))
    if not found:
        raise ConfigError(
            f"[export] --adapter: got no tensor of an adapter {adapter!r} in {checkpoint.path}, expected the "
            'checkpoint of a PeftModel. Its name is that given to get_peft_model(), by default "default".'
        )
    return tensors, {}


def _weights(checkpoint: Checkpoint, entry: Entry) -> Part:
    part = entry.part("master") or entry.part("value")
    if part is None:
        raise CheckpointError(f"[ckpt] {checkpoint.path} is damaged: {entry.name} has no values.")
    if entry.numel * ITEM_BYTES[part.dtype] > sum(file.bytes for file in checkpoint.manifest.files):
        raise CheckpointError(f"[ckpt] {checkpoint.path} is damaged: {entry.name} is larger than the files.")
    return part


def _converted(tensor: Tensor, dtype: str) -> Tensor:
    if dtype == "auto" or tensor.dtype not in _CORE_DTYPES:
        return tensor
    return dataclasses.replace(tensor, dtype=DTYPES[dtype])


def _main_dtype(tensors: list[Tensor]) -> str | None:
    """The floating-point dtype that most elements have."""
    numel = {dtype: sum(t.entry.numel for t in tensors if t.dtype == dtype) for dtype in _CORE_DTYPES}
    dtype = max(numel, key=lambda each: numel[each])
    return dtype if numel[dtype] else None


def _shards(tensors: list[Tensor], max_bytes: int, stem: str) -> dict[str, list[Tensor]]:
    shards: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.bytes > max_bytes and stem == "model":
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.bytes
    if len(shards) == 1:
        return {f"{stem}.safetensors": shards[0]}
    return {f"{stem}-{i + 1:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards)}


# Reading and writing


def _write_file(checkpoint: Checkpoint, path: Path, tensors: list[Tensor], ties: dict[str, str]) -> None:
    here = {tensor.name for tensor in tensors}
    # As safetensors.torch.save_model() does: a name that is left out, and the one under which its tensor stands.
    metadata = {"format": "pt"} | {tie: name for tie, name in ties.items() if name in here}
    listed = [(tensor.name, tensor.dtype, tensor.entry.shape) for tensor in tensors]
    with Writer(path, listed, metadata) as writer:
        for batch in _batches(tensors):
            for span, data in zip(batch, _read(checkpoint, batch), strict=True):
                item = ITEM_BYTES[span.tensor.dtype]
                writer.write(span.tensor.name, span.begin * item, _cast(span.tensor, data, span.end - span.begin))


def _batches(tensors: list[Tensor]) -> Iterator[list[_Span]]:
    """All tensors' elements, cut into batches that are read together."""
    batch: list[_Span] = []
    free = _BATCH_BYTES
    for tensor in tensors:
        item = ITEM_BYTES[tensor.part.dtype]
        at = 0
        while at < tensor.entry.numel:
            whole = tensor.entry.order is not None
            end = tensor.entry.numel if whole else min(tensor.entry.numel, at + max(1, free // item))
            batch.append(_Span(tensor, at, end))
            free -= (end - at) * item
            at = end
            if free < item:
                yield batch
                batch, free = [], _BATCH_BYTES
    if batch:
        yield batch


def _read(checkpoint: Checkpoint, batch: list[_Span]) -> list[bytearray]:
    """The elements of each span, in the order of its tensor's shape."""
    data = [bytearray((s.end - s.begin) * ITEM_BYTES[s.tensor.part.dtype]) for s in batch]
    checkpoint.read(
        [
            Wanted(span.tensor.entry, span.tensor.part, span.begin, span.end, address_of(memory))
            for span, memory in zip(batch, data, strict=True)
        ]
    )
    for i, span in enumerate(batch):
        order = span.tensor.entry.order
        if order is not None:
            data[i] = _reordered(data[i], span.tensor.entry.shape, order, ITEM_BYTES[span.tensor.part.dtype])
    return data


def _cast(tensor: Tensor, data: bytearray, numel: int) -> bytearray:
    if tensor.dtype == tensor.part.dtype:
        return data
    if tensor.dtype not in _CORE_DTYPES or tensor.part.dtype not in _CORE_DTYPES:
        raise UnsupportedError(
            f"[export] {tensor.name}: got {tensor.part.dtype}, to be written as {tensor.dtype}, expected one of "
            f"{', '.join(_CORE_DTYPES)} each."
        )
    out = bytearray(numel * ITEM_BYTES[tensor.dtype])
    source = _core.BufferView(address_of(data), numel, _CORE_DTYPES[tensor.part.dtype])
    _core.cast(source, _core.BufferView(address_of(out), numel, _CORE_DTYPES[tensor.dtype]))
    return out


def _reordered(data: bytearray, shape: Sequence[int], order: Sequence[int], item: int) -> bytearray:
    """Elements that lie in memory with dimension order[0] outermost, laid out with dimension 0 outermost."""
    out = bytearray(len(data))
    source, target = (memoryview(each).cast(_UNSIGNED[item]) for each in (data, out))
    from_strides, to_strides = [0] * len(shape), [0] * len(shape)
    for strides, dims in ((from_strides, order), (to_strides, range(len(shape)))):
        stride = 1
        for dim in reversed(dims):
            strides[dim] = stride
            stride *= shape[dim]
    longest = max(range(len(shape)), key=lambda dim: shape[dim])  # moved in one slice each
    others = [dim for dim in range(len(shape)) if dim != longest]
    step_from, step_to, count = from_strides[longest], to_strides[longest], shape[longest]
    for index in range(math.prod(shape) // count):
        begin_from = begin_to = 0
        for dim in others:
            index, at = divmod(index, shape[dim])
            begin_from += at * from_strides[dim]
            begin_to += at * to_strides[dim]
        end_from, end_to = begin_from + step_from * (count - 1) + 1, begin_to + step_to * (count - 1) + 1
        target[begin_to:end_to:step_to] = source[begin_from:end_from:step_from]
    return out


# The folder


def _check_target(out: Path, *, force: bool) -> None:
    if not out.exists() or (out.is_dir() and (force or not any(out.iterdir()))):
        return
    got, way_out = "a file", ""
    if out.is_dir():
        got, way_out = "a folder that is not empty", ", or --force to replace the weights in it"
    raise ConfigError(f"[export] {out}: got {got}, expected a new folder. Give another one{way_out}.")


def _publish(temporary: Path, out: Path) -> None:
    if not out.exists() or not any(out.iterdir()):
        os.rename(temporary, out)
        _core.sync_folder(out.parent)
        return
    old = [path for path in out.iterdir() if _WEIGHTS.fullmatch(path.name)]
    for path in sorted(old, key=lambda path: not path.name.endswith(".index.json")):
        path.unlink()
    for path in sorted(temporary.iterdir(), key=lambda path: path.name.endswith(".index.json")):
        os.replace(path, out / path.name)
    _core.sync_folder(out)


def _write_index(path: Path, files: dict[str, list[Tensor]]) -> None:
    index = {
        "metadata": {"total_size": sum(tensor.bytes for tensors in files.values() for tensor in tensors)},
        "weight_map": {tensor.name: name for name, tensors in files.items() for tensor in tensors},
    }
    _core.write_new_file(path, json.dumps(index, indent=2).encode())


def _copy_configs(source: Path, target: Path, dtype: str | None) -> None:
    names = [path.name for path in source.iterdir() if path.is_file() and _CONFIGS.fullmatch(path.name)]
    if not {"config.json", "adapter_config.json"} & set(names):
        raise ConfigError(
            f"[export] --config-from: got {source}, expected a folder with config.json or adapter_config.json, as "
            "save_pretrained() makes."
        )
    for name in names:
        data = (source / name).read_bytes()
        if name == "config.json" and dtype is not None:
            data = json.dumps(_with_dtype(json.loads(data), _HF_DTYPES[dtype]), indent=2).encode()
        _core.write_new_file(target / name, data)


def _with_dtype(config: dict[str, object], dtype: str) -> dict[str, object]:
    """A model's configuration, and those of models within it, with another dtype where they name one."""
    out = dict(config)
    for key, value in config.items():
        if key in ("dtype", "torch_dtype") and isinstance(value, str):
            out[key] = dtype
        elif isinstance(value, dict) and "model_type" in value:
            out[key] = _with_dtype(value, dtype)
    return out

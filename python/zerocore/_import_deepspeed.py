"""Makes a checkpoint of a DeepSpeed checkpoint. What it says of steps and settings goes with it; nothing is run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

import zerocore
from zerocore import _core
from zerocore._deepspeed import MASTER, DeepSpeedCheckpoint
from zerocore._engine_state import DTYPE_NAMES, VALUE, Item, entry_of, plain_name
from zerocore._foreign_pickle import StandIn
from zerocore._manifest import CHUNK_BYTES, FORMAT, VERSION, File, Job, Manifest, Optimizer, State
from zerocore._save import Pieces, Saver, Target, check_tag
from zerocore._values import ClientState
from zerocore.config import as_config
from zerocore.errors import CheckpointError, ConfigError, UnsupportedError

_HYPERPARAMETERS = (
    *("lr", "initial_lr", "weight_decay", "betas", "eps", "bias_correction"),
    *("momentum", "dampening", "nesterov", "lr_decay", "initial_accumulator_value"),
)
_PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_UNKNOWN_THREADS = 0
_TIMEOUT_MS = 60_000  # of collectives of one rank, which do not wait


@dataclasses.dataclass(frozen=True, kw_only=True)
class Imported:
    """What was made: the checkpoint's folder, of how many ranks and which stage, and what was left out, in words."""

    path: Path
    source: Path
    world_size: int
    stage: int
    left_out: list[str]


def import_deepspeed(source: Path, out: Path, *, force: bool = False) -> Imported:
    """Makes `out/<tag>`, which `out/latest` then names, of a DeepSpeed checkpoint.

    Masters and the optimizer's states keep their bits. Files are mapped: memory is not that of the checkpoint.

    Args:
        source: the folder named after the tag, or the one above it with `latest`.
        out: a folder of zerocore's checkpoints; made if need be.
        force: replace a checkpoint of that tag.

    Raises:
        CheckpointError: the source is damaged, or is none.
        UnsupportedError: it is of stage 0, or of model, pipeline or expert parallelism.
        ConfigError: there is a checkpoint of that tag.
        IoError: reading or writing failed.
    """
    checkpoint = DeepSpeedCheckpoint(source)
    steps = checkpoint.number("global_steps")
    try:
        tag = check_tag(checkpoint.path.resolve().name)
    except ConfigError:
        tag = f"global_step{steps}"
    if (out / tag).exists() and not force:
        raise ConfigError(f"[import] {out / tag}: it is there already. Give another folder, or --force to replace it.")
    left_out: list[str] = []
    client = ClientState(_json(checkpoint.client_state(), "client_state", left_out))
    items = [*_params(checkpoint, left_out), *_client(client)]
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "job": Job(
            world_size=checkpoint.world_size,
            stage=checkpoint.stage,
            precision=_precision(items),
            threads=_UNKNOWN_THREADS,
            zerocore=zerocore.__version__,
            torch=f"DeepSpeed {checkpoint.version}",
        ),
        "global_steps": steps,
        "chunk_bytes": CHUNK_BYTES,
        "optimizer": _optimizer(checkpoint),
        "state": _numbers(checkpoint, left_out),
        "client_state": client.plain,
    }

    def make(files: list[File], pieces: Pieces) -> Manifest:
        return Manifest(**manifest, files=files, entries=[entry_of(item, pieces) for item in items])

    sources = [source for item in items for source in item.sources]
    Saver(_core.self_communicator(timeout_ms=_TIMEOUT_MS)).save(
        Target(dir=out, tag=tag), sources, make, background=False
    )
    return Imported(
        path=out / tag,
        source=checkpoint.path,
        world_size=checkpoint.world_size,
        stage=checkpoint.stage,
        left_out=left_out,
    )


def _params(checkpoint: DeepSpeedCheckpoint, left_out: list[str]) -> list[Item]:
    """Parameters and buffers, in the model's order."""
    trained = {param.name: param for param in checkpoint.trained}
    steps = checkpoint.steps()
    parts = _parts(checkpoint)
    groups: dict[str, list[str]] = {}
    for tie, name in checkpoint.ties().items():
        groups.setdefault(name, []).append(tie)
    aliases = {tie for name, ties in groups.items() for tie in ties if name in checkpoint.values}
    items = []
    for name, value in checkpoint.values.items():
        if name in aliases:
            continue
        if not isinstance(value, torch.Tensor):
            left_out.append(f"{name}: a {_kind(value)}")
            continue
        param = trained.pop(name, None)
        item = Item(
            name=plain_name(name),
            shape=tuple(value.shape) if param is None else param.shape,
            dtype=_dtype(value, name),
            role="frozen" if param is None else "trained",
            ties=[plain_name(tie) for tie in groups.get(name, [])],
        )
        items.append(item)
        if param is not None:
            flat = param.fragments[0].flat if param.fragments else -1
            item.group, item.step = param.group, steps.get(flat, 0)
            for part, theirs in parts.items():
                item.parts[part] = "F32"
                for fragment in param.fragments:
                    _add(item, part, "F32", fragment.begin, checkpoint.read(theirs, fragment))
        elif name in checkpoint.buffers:
            item.role = "buffer"
            item.parts[VALUE] = item.dtype
            _add(item, VALUE, item.dtype, 0, value.detach().reshape(-1))
        else:
            found = checkpoint.frozen(name)
            if found is None:
                items.pop()
                left_out.append(f"{name}: it was left out when it was saved")
                continue
            item.shape, pieces = found
            if not math.prod(item.shape):  # DeepSpeed calls it frozen, whatever it is
                item.role, item.group, item.step = "trained", 0, max(steps.values(), default=0)
                item.parts.update(dict.fromkeys(parts, "F32"))
                continue
            item.parts[VALUE] = item.dtype
            at = 0
            for piece in pieces:
                _add(item, VALUE, item.dtype, at, piece)
                at += piece.numel()
    if trained:
        raise CheckpointError(f"[import] {checkpoint.path} is damaged: the model has no {', '.join(trained)}.")
    return items


def _parts(checkpoint: DeepSpeedCheckpoint) -> dict[str, str]:
    """Our names of what there is of each trained parameter, and DeepSpeed's."""
    parts = {name: name for name in checkpoint.parts()}
    groups = checkpoint.param_groups()
    kind = _optimizer_type(checkpoint, groups[0]) if groups else None
    if kind == "lion":
        parts.pop("exp_avg_sq", None)  # DeepSpeedCPULion keeps one, all zeros
    if kind == "adagrad" and "exp_avg_sq" in parts:
        parts["sum"] = parts.pop("exp_avg_sq")  # DeepSpeedCPUAdagrad's name of it
    return parts


def _add(item: Item, part: str, dtype: str, begin: int, values: torch.Tensor) -> None:
    dense = values.contiguous()
    item.keep.append(dense)
    num_bytes = dense.numel() * dense.element_size()
    item.add(part, dtype, begin, begin + dense.numel(), (dense.data_ptr(), num_bytes))


def _client(client: ClientState) -> list[Item]:
    items = []
    for index, tensor in enumerate(client.tensors):
        item = Item(
            name=f"client/{index}", shape=tuple(tensor.shape), dtype=_dtype(tensor, "a client state"), role="client"
        )
        item.parts[VALUE] = item.dtype
        _add(item, VALUE, item.dtype, 0, tensor.reshape(-1))
        items.append(item)
    return items


def _dtype(tensor: torch.Tensor, name: str) -> str:
    if tensor.dtype not in DTYPE_NAMES:
        raise UnsupportedError(
            f"[import] {name}: got {tensor.dtype}, expected one of {', '.join(DTYPE_NAMES.values())}."
        )
    return DTYPE_NAMES[tensor.dtype]


def _precision(items: list[Item]) -> dict[str, str]:
    """The dtype of the model: that of most trained elements."""
    numel = dict.fromkeys(_PRECISIONS.values(), 0)
    for item in items:
        for dtype, name in _PRECISIONS.items():
            if item.role == "trained" and item.dtype == DTYPE_NAMES[dtype]:
                numel[name] += math.prod(item.shape)
    name = max(numel, key=lambda each: numel[each])
    return {"dtype": name, "compute_dtype": name}


def _optimizer(checkpoint: DeepSpeedCheckpoint) -> Optimizer | None:
    groups = checkpoint.param_groups()
    if not groups:
        return None
    kept = []
    for group in groups:
        dropped: list[str] = []
        kept.append(_json({key: group[key] for key in _HYPERPARAMETERS if key in group}, "group", dropped))
    return Optimizer(type=_optimizer_type(checkpoint, groups[0]), groups=kept)


def _optimizer_type(checkpoint: DeepSpeedCheckpoint, group: Mapping[str, Any]) -> str:
    """From the group where torch's optimizer says it, or the names of the states; else from the configuration."""
    if "momentum" in group:
        return "sgd"
    states = set(checkpoint.parts()) - {MASTER}
    if states == {"exp_avg"}:
        return "lion"
    if states in ({"sum"}, {"exp_avg_sq"}):
        return "adagrad"
    decoupled = group.get("decoupled_weight_decay")
    if isinstance(decoupled, bool):
        return "adamw" if decoupled else "adam"
    try:
        given = as_config({"train_batch_size": 1, "optimizer": checkpoint.config["optimizer"]}).optimizer
    except (ConfigError, UnsupportedError, KeyError):
        given = None
    return "adamw" if given is None else given.type


def _numbers(checkpoint: DeepSpeedCheckpoint, left_out: list[str]) -> State:
    accumulation = checkpoint.config.get("gradient_accumulation_steps")
    left_out += [key for key in ("data_sampler", "random_ltd") if checkpoint.model.get(key) is not None]
    dropped: list[str] = []
    scheduler = _json(checkpoint.model.get("lr_scheduler"), "lr_scheduler", dropped)
    if dropped:
        left_out.append(f"the learning-rate scheduler's state: {', '.join(dropped)}")
    try:
        return State(
            global_samples=checkpoint.number("global_samples"),
            skipped_steps=checkpoint.number("skipped_steps"),
            micro_steps=checkpoint.number("global_steps") * (accumulation if type(accumulation) is int else 1),
            train_batch_size=_batch_size(checkpoint),
            loss_scaler=checkpoint.loss_scaler(),
            scheduler=None if dropped else scheduler,
        )
    except (ValidationError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"[import] {checkpoint.path} is damaged: its counters or loss scale: {error}") from None


def _batch_size(checkpoint: DeepSpeedCheckpoint) -> int:
    """Samples a step: as configured, else those of an average step."""
    configured = checkpoint.config.get("train_batch_size")
    if type(configured) is int and configured > 0:
        return configured
    return max(1, checkpoint.number("global_samples") // max(1, checkpoint.number("global_steps")))


def _json(value: Any, where: str, left_out: list[str]) -> Any:
    """JSON types and tensors of a value; tuples become lists. What cannot be kept is None, or left out of its dict."""
    if isinstance(value, Mapping):
        out = {}
        for key, each in value.items():
            name = str(key) if type(key) in (str, int, float, bool) else None
            if name is None or isinstance(each, StandIn) or not _is_json(each):
                left_out.append(f"{where}[{key!r}]: a {_kind(each)}")
            else:
                out[name] = _json(each, f"{where}[{key!r}]", left_out)
        return out
    if isinstance(value, (list, tuple)):
        return [_json(each, f"{where}[{i}]", left_out) for i, each in enumerate(value)]
    if value is None or isinstance(value, torch.Tensor) or type(value) in (bool, int, float, str):
        return value
    left_out.append(f"{where}: a {_kind(value)}")
    return None


def _is_json(value: Any) -> bool:
    return value is None or isinstance(value, (Mapping, list, tuple, torch.Tensor, bool, int, float, str))


def _kind(value: Any) -> str:
    return value.called if isinstance(value, StandIn) and value.called else type(value).__name__

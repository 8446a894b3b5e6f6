"""What an engine is made of, as a checkpoint holds it: tensors with names, and numbers."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import json
import numbers
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

import zerocore
from zerocore._exchange import gather_json
from zerocore._load import MANIFEST
from zerocore._manifest import (
    CHUNK_BYTES,
    FORMAT,
    VERSION,
    Data,
    Entry,
    File,
    Job,
    Manifest,
    Optimizer,
    Part,
    Role,
    State,
    parse_manifest,
)
from zerocore._save import Pieces, Source
from zerocore.errors import CheckpointError, ConfigError, UnsupportedError

if TYPE_CHECKING:
    from zerocore._engine import Engine

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
MASTER, VALUE = "master", "value"  # the parts of what is trained, besides the optimizer's, and of all else
_TENSOR = "$tensor"  # stands in a client state where a tensor was
_TUPLE, _ITEMS, _COUNTER = "$tuple", "$items", "$counter"  # stand in a state where JSON has no such type
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # of torch.compile() and checkpoint_wrapper()


class Names:
    """A model's tensors by the names under which they are saved: without what wrappers have put into them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.params: dict[str, torch.nn.Parameter] = {}
        self.ties: dict[int, list[str]] = {}  # other names, by id
        first: dict[int, str] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            plain = plain_name(name)
            if first.setdefault(id(param), plain) == plain:
                self.params[plain] = param
            else:
                self.ties.setdefault(id(param), []).append(plain)
        self.buffers: dict[str, torch.Tensor] = {}
        self.made: dict[str, torch.Tensor] = {}  # what modules make for the state dict, and keep as something else
        self.extra: dict[str, Any] = {}  # get_extra_state() of modules that have one
        params = {*self.params, *(tie for ties in self.ties.values() for tie in ties)}
        live = {plain_name(name): buffer for name, buffer in model.named_buffers(remove_duplicate=False)}
        name_of = {id(buffer): name for name, buffer in reversed(live.items())}
        for key, value in model.state_dict(keep_vars=True).items():
            name = plain_name(key)
            if name in params or id(value) in first:
                continue
            if id(value) in name_of or name in live:  # hooks may have renamed it, or copied it
                buffer = value if id(value) in name_of else live[name]
                own = name_of[id(buffer)]
                if own not in self.buffers:
                    self.buffers[own] = buffer
                elif name != own:
                    self.ties.setdefault(id(buffer), []).append(name)
            elif isinstance(value, torch.Tensor):
                self.made[name] = value
            else:
                self.extra[name] = value
        self.of = first | {id(buffer): name for name, buffer in self.buffers.items()}


def modules_by_name(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Modules by their plain names, the wrapped ones instead of their wrappers."""
    return {plain_name(f"{name}.").rstrip("."): module for name, module in model.named_modules()}


def plain_name(name: str) -> str:
    """A tensor's name in the model, without what wrappers put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def memory_order(tensor: torch.Tensor) -> list[int] | None:
    """A dense tensor's dimensions from the outermost in memory to the innermost; None: as they stand."""
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: (-strides[d], d))
    return None if order == list(range(tensor.dim())) else order


@dataclasses.dataclass(kw_only=True)
class Item:
    """A tensor that is saved: what the manifest says of it, and this rank's parts of it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role
    ties: list[str] = dataclasses.field(default_factory=list)
    step: int | None = None
    group: int | None = None
    order: list[int] | None = None
    parts: dict[str, str] = dataclasses.field(default_factory=dict)  # dtypes
    sources: list[Source] = dataclasses.field(default_factory=list)
    keep: list[torch.Tensor] = dataclasses.field(default_factory=list)  # what the sources point to

    def add(self, part: str, dtype: str, begin: int, end: int, memory: tuple[int, int]) -> None:
        """Adds a part, of which this rank has elements [begin, end) at `memory`, (address, bytes)."""
        self.parts[part] = dtype
        if begin == end:
            return
        numel = 1
        for size in self.shape:
            numel *= size
        whole = self.order is None and end - begin == numel
        shape = self.shape if whole else (end - begin,)
        self.sources.append(Source(self.name, part, dtype, shape, begin, end, *memory))

    def add_tensor(self, tensor: torch.Tensor, begin: int, end: int) -> None:
        """Adds elements [begin, end) of a tensor, as VALUE.

        Raises:
            UnsupportedError: it has no elements in memory here.
        """
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise UnsupportedError(
                f"[ckpt] {self.name}: got a tensor of {tensor.layout} on {tensor.device}, expected a dense one on the "
                "CPU. Keep it out of the state dict (register_buffer(persistent=False)), or convert it."
            )
        dense = tensor.detach().contiguous()
        self.keep.append(dense)
        item = dense.element_size()
        self.add(VALUE, self.dtype, begin, end, (dense.data_ptr() + begin * item, (end - begin) * item))


def dtype_name(dtype: torch.dtype, name: str) -> str:
    if dtype not in DTYPE_NAMES:
        listed = ", ".join(str(each).removeprefix("torch.") for each in DTYPE_NAMES)
        raise UnsupportedError(
            f"[ckpt] {name}: got a tensor of {dtype}, expected one of {listed}. Keep it out "
            "of the state dict (register_buffer(persistent=False)), or convert it; torch.view_as_real() does it for a "
            "complex one."
        )
    return DTYPE_NAMES[dtype]


def collect(engine: Engine, client: ClientState, *, exclude_frozen: bool) -> list[Item]:
    """Everything that is saved: the same list on every rank, with the parts that this rank saves. Collective.

    Note: which rank saves what. What is trained or frozen is saved share by share, each element once, whatever the
    stage. Buffers, which all ranks have alike, and the client state are rank 0's. Each rank saves its random
    generators.
    """
    return [
        *_params(engine, exclude_frozen=exclude_frozen),
        *_buffers(engine),
        *_client(engine, client),
        *_generators(engine),
    ]


def _params(engine: Engine, *, exclude_frozen: bool) -> Iterator[Item]:
    params, rank = engine._params, engine.rank
    params.take_writes()
    names = Names(engine.module)
    steps = params.core.param_steps()
    for name, param in names.params.items():
        index = params.find(param)
        trained = params.is_trained(param)
        if exclude_frozen and not trained:
            continue
        dtype = param.dtype if index is None else params.kept_dtype(index)
        item = Item(
            name=name,
            shape=tuple(param.shape),
            dtype=dtype_name(dtype, name),
            role="trained" if trained else "frozen",
            ties=names.ties.get(id(param), []),
        )
        if index is None:  # every rank has all of it
            share = -(-param.numel() // engine.world_size)
            item.add_tensor(param, min(rank * share, param.numel()), min((rank + 1) * share, param.numel()))
            yield item
            continue
        item.order = memory_order(param)
        begin, end = params.core.saved_range(index)
        if trained:
            item.step, item.group = steps[index], params.group_of(index)
            for part, kind in params.state_parts().items():
                item.add(part, "F32", begin, end, params.core.state_memory(index, kind, begin, end))
        else:
            item.add(VALUE, item.dtype, begin, end, params.core.kept_memory(index, begin, end))
        yield item


def _buffers(engine: Engine) -> Iterator[Item]:
    names = Names(engine.module)
    for name, buffer in {**names.buffers, **names.made}.items():
        item = Item(
            name=name,
            shape=tuple(buffer.shape),
            dtype=dtype_name(buffer.dtype, name),
            role="buffer",
            ties=names.ties.get(id(buffer), []),
        )
        item.add_tensor(buffer, 0, buffer.numel() if engine.rank == 0 else 0)
        yield item


def _client(engine: Engine, client: ClientState) -> Iterator[Item]:
    for index, tensor in enumerate(client.tensors):
        name = f"client/{index}"
        item = Item(name=name, shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype, name), role="client")
        item.add_tensor(tensor, 0, tensor.numel() if engine.rank == 0 else 0)
        yield item


def _generators(engine: Engine) -> Iterator[Item]:
    mine = _generator_states()
    sizes = gather_json(engine.comm, {name: state.numel() for name, state in mine.items()}, "save_checkpoint")
    for rank, of_rank in enumerate(sizes):
        for name, size in of_rank.items():
            item = Item(name=f"rng/{name}/{rank}", shape=(size,), dtype="U8", role="rng")
            item.add_tensor(mine[name], 0, size if rank == engine.rank else 0)
            yield item


def _generator_states() -> dict[str, torch.Tensor]:
    """The states of the random generators that users draw from, as bytes."""
    version, internal, gauss = random.getstate()
    states = {"torch": torch.get_rng_state(), "python": _bytes_of([version, list(internal), gauss])}
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = _bytes_of([kind, keys.tolist(), *rest])
    return states


def _bytes_of(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def restore_generators(states: Mapping[str, torch.Tensor]) -> None:
    """Sets this process's random generators as _generator_states() found them.

    Raises:
        CheckpointError: that is no state of such a generator.
    """
    before = _generator_states()
    try:
        for name, state in states.items():
            _restore_generator(name, state)
    except (ValueError, TypeError, KeyError, IndexError, RuntimeError, OverflowError) as error:
        for name, state in before.items():
            _restore_generator(name, state)
        raise CheckpointError(f"[ckpt] rng/{name}: got no state of such a generator ({error}).") from None


def _restore_generator(name: str, state: torch.Tensor) -> None:
    if name == "torch":
        torch.set_rng_state(state)
        return
    value = json.loads(bytes(state.tolist()))
    if name == "python":
        random.setstate((value[0], tuple(value[1]), value[2]))
    elif name == "numpy" and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(value))


class ClientState:
    """A user's state: JSON types, with tensors taken out.

    Raises:
        ConfigError: it holds something else, named.
    """

    def __init__(self, value: Any) -> None:
        self.tensors: list[torch.Tensor] = []
        self.plain = self._take(value, "client_state")

    def _take(self, value: Any, where: str) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, torch.Tensor):
            self.tensors.append(value.detach().cpu())
            return {_TENSOR: len(self.tensors) - 1}
        if type(value) is list:
            return [self._take(each, f"{where}[{i}]") for i, each in enumerate(value)]
        if type(value) is dict:
            for key in value:
                if type(key) is not str or key == _TENSOR:
                    raise ConfigError(f"[ckpt] {where}: got the key {key!r}, expected a string. Convert it.")
            return {key: self._take(each, f"{where}[{key!r}]") for key, each in value.items()}
        raise ConfigError(
            f"[ckpt] {where}: got a {type(value).__name__}, expected None, a bool, number, string, list, dict with "
            "string keys, or tensor: a checkpoint holds no pickled objects. Save the object's state_dict(), or numbers."
        )

    def digest(self) -> str:
        """The same on two ranks with the same state."""
        hashed = hashlib.sha256(json.dumps(self.plain, sort_keys=True).encode())
        for tensor in self.tensors:
            dense = tensor.contiguous()
            if num_bytes := dense.numel() * dense.element_size():
                hashed.update((ctypes.c_char * num_bytes).from_address(dense.data_ptr()))
        return hashed.hexdigest()


def with_tensors(plain: Any, tensors: Mapping[int, torch.Tensor]) -> Any:
    """The client state again.

    Raises:
        CheckpointError: it names a tensor that is not there.
    """
    if isinstance(plain, list):
        return [with_tensors(each, tensors) for each in plain]
    if isinstance(plain, dict):
        if _TENSOR in plain:
            number = plain[_TENSOR]
            if type(number) is not int or number not in tensors:
                raise CheckpointError(f"[ckpt] client state: got tensor {number!r}, expected one of {list(tensors)}.")
            return tensors[number]
        return {key: with_tensors(each, tensors) for key, each in plain.items()}
    return plain


def plain(value: Any, what: str) -> Any:
    """A value of ours or of torch's as JSON types: tuples become lists, 0-d tensors and numpy's numbers numbers.

    Raises:
        ConfigError: something in it is no such value.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        return [plain(each, what) for each in value]
    if isinstance(value, Mapping):
        return {str(key): plain(each, what) for key, each in value.items()}
    raise ConfigError(
        f"[ckpt] {what} holds a {type(value).__name__}, expected numbers, strings, lists and dicts: a checkpoint holds "
        "no pickled objects. Keep it out of the state, or save it yourself."
    )


def marked(value: Any, what: str) -> Any:
    """As plain(), but unmarked() gives back tuples, dicts with keys of any plain type, and Counters.

    What looks into its own state finds it as it was: torch's MultiStepLR has a Counter of numbers.
    """
    if isinstance(value, tuple):
        return {_TUPLE: [marked(each, what) for each in value]}
    if isinstance(value, list):
        return [marked(each, what) for each in value]
    if isinstance(value, Mapping):
        if all(type(key) is str and not key.startswith("$") for key in value) and not isinstance(value, Counter):
            return {key: marked(each, what) for key, each in value.items()}
        mark = _COUNTER if isinstance(value, Counter) else _ITEMS
        return {mark: [[marked(key, what), marked(each, what)] for key, each in value.items()]}
    return plain(value, what)


def unmarked(value: Any) -> Any:
    """What marked() was given; tuples and dicts instead of their subclasses.

    Raises:
        CheckpointError: marked() gives no such value.
    """
    if isinstance(value, list):
        return [unmarked(each) for each in value]
    if not isinstance(value, dict):
        return value
    try:
        if _TUPLE in value:
            return tuple(unmarked(each) for each in value[_TUPLE])
        for mark, kind in ((_ITEMS, dict), (_COUNTER, Counter)):
            if mark in value:
                return kind({unmarked(key): unmarked(each) for key, each in value[mark]})
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"[ckpt] got {str(value)[:100]} for a tuple or dict, which it is not: {error}.") from None
    return {key: unmarked(each) for key, each in value.items()}


def describe(
    engine: Engine, items: list[Item], client: ClientState, *, exclude_frozen: bool
) -> Callable[[list[File], Pieces], Manifest]:
    """A function that makes the manifest once all files are written; everything else in it is as it is now."""
    precision = engine.config.precision
    fixed: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "job": Job(
            world_size=engine.world_size,
            stage=engine.config.zero.stage,
            precision={"dtype": precision.dtype, "compute_dtype": precision.compute_dtype or precision.dtype},
            threads=torch.get_num_threads(),
            zerocore=zerocore.__version__,
            torch=torch.__version__,
        ),
        "global_steps": engine.global_steps,
        "frozen_excluded": exclude_frozen,
        "chunk_bytes": CHUNK_BYTES,
        "optimizer": Optimizer(
            type=engine.optimizer.type,
            groups=[
                plain({k: v for k, v in group.items() if k != "params"}, "a parameter group of the optimizer")
                for group in engine.optimizer.param_groups
            ],
        ),
        "state": _numbers(engine),
        "client_state": client.plain,
    }

    try:  # JSON can be written that cannot be read: half of a character, or a list in too many lists
        parse_manifest(Manifest(**fixed, files=[], entries=[]).dump(), path=MANIFEST)
    except (CheckpointError, RecursionError) as error:
        raise ConfigError(
            f"[ckpt] save_checkpoint: the client state, or another's, could not be loaded again: {error} Look for text "
            "that is no UTF-8, such as some file names, and for lists within hundreds of lists."
        ) from None

    def make(files: list[File], pieces: Pieces) -> Manifest:
        return Manifest(**fixed, files=files, entries=[entry_of(item, pieces) for item in items])

    return make


def entry_of(item: Item, pieces: Pieces) -> Entry:
    """What the manifest says of a tensor that was saved."""
    return Entry(
        name=item.name,
        shape=list(item.shape),
        dtype=item.dtype,
        role=item.role,
        ties=item.ties,
        step=item.step,
        group=item.group,
        order=item.order,
        parts=[
            Part(name=name, dtype=dtype, pieces=pieces.get((item.name, name), [])) for name, dtype in item.parts.items()
        ],
    )


def _numbers(engine: Engine) -> State:
    scheduler, loader = engine.lr_scheduler, engine.training_dataloader
    has_state = callable(getattr(scheduler, "state_dict", None))
    return State(
        skipped_steps=engine.skipped_steps,
        micro_steps=engine.micro_steps,
        loop=engine._accumulation.decided().name,
        train_batch_size=engine.config.train_batch_size,
        loss_scaler=None if engine._scaler is None else engine._scaler.state,
        scheduler=marked(scheduler.state_dict(), "the learning-rate scheduler's state_dict()") if has_state else None,
        data=None if loader is None else Data(**loader.state_dict()),
        extra_state=marked(Names(engine.module).extra, "what get_extra_state() of a module returns"),
    )

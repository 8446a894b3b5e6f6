"""What an engine is made of, as a checkpoint holds it: tensors with names, and numbers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

import zerocore
from zerocore._exchange import gather_json
from zerocore._generators import generator_states
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
from zerocore._values import ClientState, marked, plain
from zerocore.errors import CheckpointError, ConfigError, UnsupportedError

if TYPE_CHECKING:
    from zerocore._engine import Engine
    from zerocore._params import ModelParams

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
NO_SETTINGS = ("params", "param_names")  # in a parameter group: the model has them
CLASS = "$class"  # in a scheduler's state: whose it is. No key of a marked dict begins so
MASTER, VALUE = "master", "value"  # the parts of what is trained, besides the optimizer's, and of all else
_EXTRA_STATE = "_extra_state"  # torch's key for what get_extra_state() gives
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
    """Modules by their plain names, the wrapped ones instead of their wrappers; a shared one by each of its names."""
    modules = model.named_modules(remove_duplicate=False)
    return {plain_name(f"{name}.").rstrip("."): module for name, module in modules}


def is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == _EXTRA_STATE


def extra_names(model: torch.nn.Module) -> set[str]:
    """The plain names under which modules take an extra state, as torch's load_state_dict() asks for them."""
    takes_none = torch.nn.Module.set_extra_state
    return {
        f"{name}.{_EXTRA_STATE}".lstrip(".")
        for name, module in modules_by_name(model).items()
        if type(module).set_extra_state is not takes_none
    }


def hand_out(model: torch.nn.Module, values: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[Any], Any], Any]]:
    """Who takes what is neither parameter nor buffer, as torch's load_state_dict() gives it: (who, function, value).

    What belongs to no module of the model is passed over.
    """
    modules = modules_by_name(model)
    own: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        owner, _, key = name.rpartition(".")
        if owner not in modules:
            continue
        if is_extra(name):
            yield f"set_extra_state of {name}", modules[owner].set_extra_state, value
        else:
            own.setdefault(owner, {})[key] = value
    for owner, state in own.items():
        yield f"module {owner or 'model'}", functools.partial(_load_own, modules[owner]), state


def _load_own(module: torch.nn.Module, state: dict[str, Any]) -> None:
    """load_state_dict() of one module, without those inside of it."""
    errors: list[str] = []
    module._load_from_state_dict(state, "", {"version": module._version}, False, [], [], errors)
    if errors:
        raise ValueError("; ".join(errors))


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
    numbers: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the optimizer's state
    parts: dict[str, str] = dataclasses.field(default_factory=dict)  # dtypes
    sources: list[Source] = dataclasses.field(default_factory=list)
    keep: list[Any] = dataclasses.field(default_factory=list)  # what the sources point to

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

    def on_host(self, params: ModelParams, memory: tuple[int, int]) -> tuple[int, int]:
        """The same as host memory: a copy where the engine's device has memory of its own. Kept by the item."""
        if not params.runs_behind or memory[1] == 0:
            return memory
        copy = params.device.core.allocate_pinned(memory[1])
        params.device.core.to_host(memory[0], copy.address, memory[1], params.device.stream())
        self.keep.append(copy)
        return copy.address, memory[1]

    def add_tensor(self, tensor: torch.Tensor, begin: int, end: int) -> None:
        """Adds elements [begin, end) of a tensor, as VALUE.

        Raises:
            UnsupportedError: it has no elements in memory here.
        """
        if tensor.layout != torch.strided or tensor.device.type == "meta":
            raise UnsupportedError(
                f"[ckpt] {self.name}: got a tensor of {tensor.layout} on {tensor.device}, expected a dense one with "
                "memory. Keep it out of the state dict (register_buffer(persistent=False)), or convert it."
            )
        dense = tensor.detach().contiguous().cpu()
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


def collect(engine: Engine, names: Names, client: ClientState, *, exclude_frozen: bool) -> list[Item]:
    """Everything that is saved: the same list on every rank, with the parts that this rank saves. Collective.

    Note: which rank saves what. What is trained or frozen is saved share by share, each element once, whatever the
    stage. Buffers, which all ranks have alike, and the client state are rank 0's. Each rank saves its random
    generators.
    """
    return [
        *_params(engine, names, exclude_frozen=exclude_frozen),
        *_buffers(engine, names),
        *_client(engine, client),
        *_generators(engine),
    ]


def _params(engine: Engine, names: Names, *, exclude_frozen: bool) -> Iterator[Item]:
    params, rank = engine._params, engine.rank
    params.take_writes()
    steps = params.core.param_steps()
    foreign = {} if params.foreign is None else params.foreign.describe(engine.comm)
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
            tensors, item.numbers = foreign.get(index, ([], {}))
            for part in [*params.state_parts(index), *tensors]:
                item.add(part, "F32", begin, end, item.on_host(params, params.part_memory(index, part, begin, end)))
        else:
            item.add(VALUE, item.dtype, begin, end, item.on_host(params, params.core.kept_memory(index, begin, end)))
        yield item


def _buffers(engine: Engine, names: Names) -> Iterator[Item]:
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
    mine = generator_states()
    sizes = gather_json(engine.comm, {name: state.numel() for name, state in mine.items()}, "save_checkpoint")
    for rank, of_rank in enumerate(sizes):
        for name, size in of_rank.items():
            item = Item(name=f"rng/{name}/{rank}", shape=(size,), dtype="U8", role="rng")
            item.add_tensor(mine[name], 0, size if rank == engine.rank else 0)
            yield item


def describe(
    engine: Engine, names: Names, items: list[Item], client: ClientState, *, exclude_frozen: bool
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
                plain({k: v for k, v in group.items() if k not in NO_SETTINGS}, "a parameter group of the optimizer")
                for group in engine.optimizer.param_groups
            ],
        ),
        "state": _numbers(engine, names),
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
        numbers=item.numbers,
        parts=[
            Part(name=name, dtype=dtype, pieces=pieces.get((item.name, name), [])) for name, dtype in item.parts.items()
        ],
    )


def _numbers(engine: Engine, names: Names) -> State:
    scheduler, loader = engine.lr_scheduler, engine.training_dataloader
    return State(
        global_samples=engine.global_samples,
        skipped_steps=engine.skipped_steps,
        micro_steps=engine.micro_steps,
        loop=engine._accumulation.decided().name,
        train_batch_size=engine.config.train_batch_size,
        loss_scaler=engine._params.loss_scale_state,
        scheduler=_scheduler(scheduler) if callable(getattr(scheduler, "state_dict", None)) else None,
        data=None if loader is None else Data(**loader.state_dict()),
        extra_state=marked(names.extra, "what get_extra_state() of a module returns"),
    )


def _scheduler(scheduler: Any) -> Any:
    state = marked(scheduler.state_dict(), "the learning-rate scheduler's state_dict()")
    return state | {CLASS: class_name(scheduler)} if isinstance(state, dict) else state


def class_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"

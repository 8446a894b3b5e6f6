"""Brings an engine into the state that a checkpoint holds, on any number of ranks and in any stage."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from zerocore import _core
from zerocore._accumulation import Loop
from zerocore._engine_state import (
    CLASS,
    DTYPE_NAMES,
    MASTER,
    NO_SETTINGS,
    TORCH_DTYPES,
    VALUE,
    Names,
    class_name,
    hand_out,
    memory_order,
)
from zerocore._generators import restore_generators
from zerocore._load import Checkpoint, Wanted
from zerocore._manifest import Data, Entry, Part, State
from zerocore._values import unmarked, with_tensors
from zerocore.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from zerocore._engine import Engine

logger = logging.getLogger("zerocore")

_SAME_STATE = {"adam", "adamw"}  # types of optimizers whose states mean the same
_SHOWN = 20  # names in a list of what was not loaded


@dataclasses.dataclass(frozen=True, kw_only=True)
class What:
    """What of a checkpoint is loaded.

    module_strict: tensors of the module that do not fit are an error. strict: so is all else that is left out.
    """

    module_strict: bool
    optimizer_states: bool
    scheduler_states: bool
    counters: bool
    custom_load_fn: Callable[..., Any] | None
    strict: bool


class Restore:
    """One load into one engine.

    Raises:
        ConfigError: it does not fit the model, with what.module_strict or what.strict. Nothing has changed then.
    """

    def __init__(self, engine: Engine, checkpoint: Checkpoint, what: What) -> None:
        self._engine = engine
        self._checkpoint = checkpoint
        self._what = what
        self._names = Names(engine.module)
        self._entries = {e.name: e for e in checkpoint.manifest.of_role("trained", "frozen", "buffer")}
        for entry in list(self._entries.values()):
            for tie in entry.ties:
                self._entries.setdefault(tie, entry)
        self._direct: list[Wanted] = []  # straight into the core's memory
        self._later: list[Callable[[], None]] = []  # through a tensor of their own
        self._foreign: dict[int, dict[str, Any]] = {}  # new states, of an optimizer without a native twin
        self._made: dict[str, torch.Tensor] = {}  # read, to be handed to the modules that make such
        self._steps = engine._params.core.param_steps()
        self._scheduler_state: Any = None  # that is handed over
        self._settings: list[dict[str, Any]] = []  # of each parameter group, as this engine has them
        self._left_out: dict[str, list[str]] = {}  # why, and what
        self._fits: dict[str, bool] = {}
        self._compare()
        self._plan()
        self._compare_numbers()
        self._judge()

    def read(self) -> None:
        """Reads all tensors. Local.

        Raises:
            CheckpointError, IoError: the checkpoint is damaged, or cannot be read. The engine's state is not whole.
        """
        self._engine._params.begin_load()
        self._checkpoint.read(self._direct)
        with torch.no_grad():
            for work in self._later:
                work()
        if self._what.counters:
            self._restore_generators()

    def finish(self) -> None:
        """After read() on all ranks: moves the engine to where it was. Collective."""
        foreign = self._engine._params.foreign
        for index, state in self._foreign.items():
            assert foreign is not None
            foreign.set_state(index, state)
        self._engine._params.end_load(self._steps)
        if self._what.custom_load_fn is not None:
            self._load_by_hand(self._what.custom_load_fn)
        self._restore_made()
        if self._what.counters:
            self._restore_numbers()
        self._say()

    # What fits

    def _compare(self) -> None:
        ours: dict[str, torch.Tensor] = {**self._names.params, **self._names.buffers}
        found = set()
        saved_extra = self._checkpoint.manifest.state.extra_state
        for name in {**self._names.made, **self._names.extra}:
            if name in self._entries:
                found.add(self._entries[name].name)
                self._fits[name] = True
            elif name not in saved_extra:
                self._leave_out("not in the checkpoint", name)
        for name in saved_extra:
            if name not in self._names.extra and name not in self._names.made:
                self._leave_out("not in the model", name)
        for name, tensor in ours.items():
            entry = self._entries.get(name)
            if entry is None:
                excluded = self._checkpoint.manifest.frozen_excluded and not self._engine._params.is_trained(tensor)
                why = "frozen parameters were left out when it was saved" if excluded else "not in the checkpoint"
                self._leave_out(why if name in self._names.params else "not in the checkpoint", name)
                continue
            found.add(entry.name)
            if tuple(entry.shape) != tuple(tensor.shape):
                self._leave_out(
                    "of another shape in the model", f"{name}: {tuple(entry.shape)}, in the model {tuple(tensor.shape)}"
                )
                continue
            self._fits[name] = True
        for entry in {id(e): e for e in self._entries.values()}.values():
            if entry.name not in found:
                self._leave_out("not in the model", entry.name)
        self._misfits = [why for why in self._left_out if why.startswith(("not in", "of another"))]

    def _compare_numbers(self) -> None:
        manifest, engine = self._checkpoint.manifest, self._engine
        if self._what.optimizer_states:
            why_not = self._why_groups_do_not_fit()
            if why_not is None:
                self._settings = self._settings_of_groups()
            else:
                self._leave_out("the optimizer's hyperparameters", why_not)
            if manifest.state.loss_scaler is None and self._has_dynamic_scale():
                self._leave_out("not in the checkpoint", "the loss scaler's state")
        if self._what.scheduler_states and engine.lr_scheduler is not None:
            if not _takes_state(engine.lr_scheduler):
                self._leave_out("without load_state_dict(), so it begins anew", "the learning-rate scheduler")
            elif manifest.state.scheduler is None:
                self._leave_out("not in the checkpoint", "the learning-rate scheduler's state")
            else:
                self._compare_scheduler(manifest.state.scheduler)

    def _compare_scheduler(self, saved: Any) -> None:
        """Takes the state of a scheduler of the same class, or of one whose state has the same keys.

        Classes may move, and some are alike, such as WarmupLR and WarmupDecayLR; checkpoints that are older, or that
        were imported, name none.
        """
        scheduler = self._engine.lr_scheduler
        theirs, ours = saved.get(CLASS) if isinstance(saved, dict) else None, class_name(scheduler)
        state = unmarked({k: v for k, v in saved.items() if k != CLASS} if isinstance(saved, dict) else saved)
        own = scheduler.state_dict() if callable(getattr(scheduler, "state_dict", None)) else state
        if theirs != ours and _keys(state) != _keys(own):
            whose = theirs or f"one with the keys {_keys(state)}"
            self._leave_out("of another scheduler, so it begins anew", f"the state for {ours}, saved by {whose}")
            return
        self._scheduler_state = state

    def _why_groups_do_not_fit(self) -> str | None:
        saved, ours = self._checkpoint.manifest.optimizer, self._engine.optimizer
        if saved is None or saved.type != ours.type or len(saved.groups) != len(ours.param_groups):
            return f"{len(ours.param_groups)} groups of {ours.type} in this engine"
        moved = self._in_other_groups()
        if moved is not None:
            return f"{moved} stands in another group in this engine"
        if ours.type == "sgd" and any(group.get("momentum") for group in saved.groups) and not ours.state_names(0):
            return "this engine was built without momentum"
        return None

    def _has_dynamic_scale(self) -> bool:
        precision = self._engine.config.precision
        return self._engine._params.loss_scale() is not None and precision.loss_scale.static_scale is None

    def _leave_out(self, why: str, what: str) -> None:
        self._left_out.setdefault(why, []).append(what)

    def _judge(self) -> None:
        wrong = self._misfits if self._what.module_strict else []
        wrong = list(self._left_out) if self._what.strict else wrong
        if wrong:
            raise ConfigError(
                f"[ckpt] load_checkpoint: {self._checkpoint.path} does not fit: {self._list(wrong)}. Load it into the "
                "model that it was saved from, or pass load_module_strict=False to load what fits."
            )

    def _list(self, reasons: list[str]) -> str:
        texts = []
        for why in reasons:
            names = self._left_out[why]
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            texts.append(f"{why}: {', '.join(names[:_SHOWN])}{more}")
        return "; ".join(texts)

    def _say(self) -> None:
        if self._left_out and self._engine.rank == 0:
            logger.warning(
                "[ckpt] load_checkpoint: not loaded from %s: %s.",
                self._checkpoint.path,
                self._list(list(self._left_out)),
            )

    # Tensors

    def _plan(self) -> None:
        params = self._engine._params
        for name, param in self._names.params.items():
            if name not in self._fits:
                continue
            entry = self._entries[name]
            weights = entry.part(MASTER) or entry.part(VALUE)
            index = params.find(param)
            if weights is None:
                self._leave_out("without values in the checkpoint", name)
                continue
            if index is None:
                self._later.append(self._into_tensor(entry, weights, param))
                continue
            begin, end = params.core.loaded_range(index)
            trained = params.is_trained(param)
            if self._what.custom_load_fn is None:
                if trained:
                    memory = params.core.state_memory(index, _core.StateKind.master, begin, end)
                    self._into_core(entry, weights, param, begin, end, memory, torch.float32)
                else:
                    memory = params.core.kept_memory(index, begin, end)
                    self._into_core(entry, weights, param, begin, end, memory, params.kept_dtype(index))
            if trained and self._what.optimizer_states:
                self._plan_states(entry, param, index, begin, end)
        for name, buffer in self._names.buffers.items():
            part = self._entries[name].part(VALUE) if name in self._fits else None
            if part is not None:
                self._later.append(self._into_tensor(self._entries[name], part, buffer))

        for name in {**self._names.made, **self._names.extra}:
            part = self._entries[name].part(VALUE) if name in self._fits else None
            if part is not None:
                self._later.append(self._into_made(name, self._entries[name], part))

    def _plan_states(self, entry: Entry, param: torch.Tensor, index: int, begin: int, end: int) -> None:
        params, ours = self._engine._params, self._engine.optimizer.type
        saved = self._checkpoint.manifest.optimizer
        held = {part.name for part in entry.parts} - {MASTER, VALUE}
        # States of one name are not one thing: the momentum of SGD is a sum, that of Muon a mean.
        alike = saved is not None and (saved.type == ours or {saved.type, ours} <= _SAME_STATE)
        if alike and params.foreign is not None:
            self._foreign[index] = params.foreign.new_state(index, sorted(held), entry.numbers)
        elif not alike or held != set(params.state_parts(index)) - {MASTER}:
            self._leave_out(
                f"optimizer state (saved with {saved.type if saved else 'no optimizer'}, this engine has {ours})",
                entry.name,
            )
            return
        for name in held:
            part = entry.part(name)
            assert part is not None
            if index in self._foreign:
                state = self._foreign[index].get(name)
                memory = (0, 0) if state is None else (state.data_ptr(), state.numel() * 4)
            else:
                memory = params.part_memory(index, name, begin, end)
            self._into_core(entry, part, param, begin, end, memory, torch.float32)
        self._steps[index] = entry.step or 0

    def _into_core(
        self,
        entry: Entry,
        part: Part,
        param: torch.Tensor,
        begin: int,
        end: int,
        memory: tuple[int, int],
        dtype: torch.dtype,
    ) -> None:
        """Plans to read elements [begin, end), as they lie in memory here, to `memory`, (address, bytes)."""
        address, num_bytes = memory
        if num_bytes == 0:
            return
        if entry.order == memory_order(param) and part.dtype == DTYPE_NAMES[dtype]:
            if not self._engine._params.runs_behind:
                self._direct.append(Wanted(entry, part, begin, end, address))
                return

            def read_through() -> None:
                room = torch.empty(num_bytes, dtype=torch.uint8)
                self._checkpoint.read([Wanted(entry, part, begin, end, room.data_ptr())])
                self._write(room, address)

            self._later.append(read_through)
            return

        def read() -> None:
            order = memory_order(param) or list(range(param.dim()))
            flat = read_tensor(self._checkpoint, entry, part).permute(order).reshape(-1)
            self._write(flat[begin:end].to(dtype), address)

        self._later.append(read)

    def _write(self, values: torch.Tensor, address: int) -> None:
        device = self._engine._params.device
        device.core.from_host(values.data_ptr(), address, values.nbytes, device.stream())

    def _into_tensor(self, entry: Entry, part: Part, target: torch.Tensor) -> Callable[[], None]:
        def read() -> None:
            target.detach().copy_(read_tensor(self._checkpoint, entry, part))

        return read

    def _into_made(self, name: str, entry: Entry, part: Part) -> Callable[[], None]:
        def read() -> None:
            self._made[name] = read_tensor(self._checkpoint, entry, part)

        return read

    def _load_by_hand(self, custom_load_fn: Callable[..., Any]) -> None:
        """DeepSpeed's hook: the user's function gets the whole state dict and the module."""
        source = {}
        for entry in self._checkpoint.manifest.of_role("trained", "frozen", "buffer"):
            part = entry.part(MASTER) or entry.part(VALUE)
            if part is not None:
                values = read_tensor(self._checkpoint, entry, part).to(TORCH_DTYPES[entry.dtype])
                source.update(dict.fromkeys([entry.name, *entry.ties], values))
        with self._engine.unsharded(modifier_rank=0), torch.no_grad():
            custom_load_fn(src=source, dst=self._engine.module)

    def _restore_made(self) -> None:
        """Hands modules what is neither parameter nor buffer, in the ways in which torch's load_state_dict() does."""
        saved = self._checkpoint.manifest.state.extra_state
        values = {name: unmarked(value) for name, value in saved.items()} | self._made
        for receiver, take, value in hand_out(self._engine.module, values):
            self._hand_over(receiver, take, value)

    # Numbers

    def _restore_numbers(self) -> None:
        engine, manifest = self._engine, self._checkpoint.manifest
        state = manifest.state
        engine.global_steps = manifest.global_steps
        engine.global_samples = state.global_samples
        engine._outcomes.skipped_steps = state.skipped_steps
        engine.micro_steps = state.micro_steps
        if engine._accumulation.loop is Loop.UNDECIDED and state.loop in Loop.__members__:
            engine._accumulation.loop = Loop[state.loop]
        if self._what.optimizer_states:
            self._restore_groups()
            self._restore_loss_scale(state)
        if self._scheduler_state is not None:
            self._hand_over("the learning-rate scheduler", engine.lr_scheduler.load_state_dict, self._scheduler_state)
        if engine.training_dataloader is not None and state.data is not None:
            engine.training_dataloader.load_state_dict(self._position(state.data, state.train_batch_size))
        threads = torch.get_num_threads()
        if manifest.job.threads not in (0, threads) and engine.rank == 0:
            logger.warning(
                "[ckpt] the checkpoint was saved with %d torch threads a rank, this job has %d: some of torch's bits "
                "depend on it. Call torch.set_num_threads(%d) for the bits of a run that never stopped.",
                manifest.job.threads,
                threads,
                manifest.job.threads,
            )

    def _restore_groups(self) -> None:
        """Hyperparameters of the parameter groups, as torch's optimizers restore them."""
        for group, settings in zip(self._engine.optimizer.param_groups, self._settings, strict=False):  # or none fits
            for key, value in settings.items():
                if isinstance(group.get(key), torch.Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = value

    def _in_other_groups(self) -> str | None:
        """A parameter whose group in the checkpoint has another number than in this engine."""
        params = self._engine._params
        for name, param in self._names.params.items():
            index, entry = params.find(param), self._entries.get(name)
            if index is None or entry is None or entry.group is None or not params.is_trained(param):
                continue
            if entry.group != params.group_of(index):
                return name
        return None

    def _settings_of_groups(self) -> list[dict[str, Any]]:
        saved, groups = self._checkpoint.manifest.optimizer, self._engine.optimizer.param_groups
        assert saved is not None
        return [
            {key: self._setting(key, group.get(key), value) for key, value in each.items() if key not in NO_SETTINGS}
            for group, each in zip(groups, saved.groups, strict=True)
        ]

    def _setting(self, key: str, ours: Any, saved: Any) -> Any:
        try:
            return _like(ours, saved)
        except TypeError:
            raise CheckpointError(
                f"[ckpt] {self._checkpoint.path}: the optimizer's {key}: got {saved!r}, expected a value like "
                f"{ours!r}. Build the optimizer as it was when this was saved, or use another checkpoint."
            ) from None

    def _hand_over(self, receiver: str, take: Callable[[Any], Any], state: Any) -> None:
        """Gives saved state to code that is not ours, and says whose state it was when that refuses it."""
        try:
            take(state)
        except Exception as error:
            raise CheckpointError(
                f"[ckpt] {self._checkpoint.path}: {receiver} does not take its state: {type(error).__name__}: {error}."
            ) from error

    def _restore_loss_scale(self, state: State) -> None:
        if state.loss_scaler is not None and self._has_dynamic_scale():
            self._engine._params.loss_scale_state = state.loss_scaler
            self._engine._outcomes.reload()

    def _position(self, data: Data, then: int) -> dict[str, int]:
        """Where in the data to go on. Steps are counted in batches: `then` samples each in the checkpoint."""
        epoch, step = data.epoch, data.step
        now = self._engine.config.train_batch_size
        if then != now:
            if step * then % now and self._engine.rank == 0:
                logger.warning(
                    "[ckpt] %d samples into epoch %d the train_batch_size changes from %d to %d: %d samples are seen "
                    "again.",
                    step * then,
                    epoch,
                    then,
                    now,
                    step * then % now,
                )
            step = step * then // now
        return {"epoch": epoch, "step": step}

    def _restore_generators(self) -> None:
        engine = self._engine
        states = {}
        for entry in self._checkpoint.manifest.of_role("rng"):
            _, name, rank = entry.name.split("/")
            part = entry.part(VALUE)
            if int(rank) == engine.rank and part is not None:
                states[name] = read_tensor(self._checkpoint, entry, part)
        restore_generators(states)


def _takes_state(scheduler: Any) -> bool:
    return callable(getattr(scheduler, "load_state_dict", None))


def _keys(state: Any) -> list[str] | None:
    """Of a scheduler's state, without those of its own that change with torch's version."""
    return sorted(k for k in map(str, state) if not k.startswith("_")) if isinstance(state, dict) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _like(ours: Any, saved: Any) -> Any:
    """A saved setting in the types that it has in this engine: JSON has no tuples.

    Raises:
        TypeError: it is no number where ours is one, or no list of that length where ours is a list.
    """
    if isinstance(ours, (tuple, list)):
        if not isinstance(saved, list) or len(saved) != len(ours):
            raise TypeError
        values = [_like(*pair) for pair in zip(ours, saved, strict=True)]
        return tuple(values) if isinstance(ours, tuple) else values
    if isinstance(ours, bool):
        fits = type(saved) is bool
    else:
        fits = not (_is_number(ours) or isinstance(ours, torch.Tensor)) or _is_number(saved)
    if not fits:
        raise TypeError
    return saved


def client_state(checkpoint: Checkpoint) -> Any:
    """What the user saved beside the engine."""
    tensors = {}
    for entry in checkpoint.manifest.of_role("client"):
        part = entry.part(VALUE)
        if part is not None:
            tensors[int(entry.name.split("/")[1])] = read_tensor(checkpoint, entry, part)
    return with_tensors(checkpoint.manifest.client_state, tensors)


def read_tensor(checkpoint: Checkpoint, entry: Entry, part: Part) -> torch.Tensor:
    """A whole part as a tensor of its shape and dtype."""
    data = checkpoint.read_part(entry, part)
    dtype = TORCH_DTYPES[part.dtype]
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    if entry.order is None:
        return flat.reshape(entry.shape)
    stored = flat.reshape([entry.shape[d] for d in entry.order])
    inverse = [entry.order.index(d) for d in range(len(entry.order))]
    return stored.permute(inverse)

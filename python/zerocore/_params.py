"""The parameters of an engine: their place in the core's buckets, and their state there."""

from __future__ import annotations

import contextlib
import itertools
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from zerocore import _core, _released, _tensor
from zerocore._accumulation import Weights
from zerocore._attachment import Attachment
from zerocore._device import Host
from zerocore._foreign import ForeignOptimizer
from zerocore._gathering import UnitGatherer
from zerocore._gradients import Gradients
from zerocore._optimizer import Optimizer, plain_settings
from zerocore._other_state import broadcast
from zerocore._param_specs import ParamsForCore
from zerocore._units import Unit
from zerocore.config import ResolvedConfig
from zerocore.errors import ConfigError, Error

logger = logging.getLogger("zerocore")

_STATES = (_core.StateKind.state1, _core.StateKind.state2)
_PART_FOR_GRADIENTS = 4  # of the memory that is left, for those held in the first micro-step


class ModelParams(ParamsForCore):
    """Moves parameters into the core's buckets, and reads and writes them there.

    The move is in place: `p.data` becomes a view, of a bucket where the parameter is used as it is kept, else of its
    unit's storage (_gathering.py). Collective over `comm`: rank 0's values count.

    Args:
        units: as for ParamsForCore.
        on_foreign_gradient: as Gradients' on_foreign.
        on_read_gradient: ends the open micro-step and returns what the gradients are to be divided by.

    Raises:
        ConfigError, UnsupportedError: as ParamsForCore.
        DeviceError: a parameter on a device without code here.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        config: ResolvedConfig,
        comm: _core.Communicator,
        *,
        device: Host,
        units: list[Unit],
        on_foreign_gradient: Callable[[], None],
        on_read_gradient: Callable[[], float],
    ) -> None:
        super().__init__(model, optimizer, config, units)
        self._grouped = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
        self.comm = comm
        self.device = device
        self.runs_behind = device.runs_behind
        self._step_engine = _core.StepEngine(comm=comm, device=device.core, **self.core_arguments)
        self._scaled = self.core_arguments["loss_scale"] is not None
        self.gatherer = UnitGatherer(self._engine, self._units, device, self.follow)
        # Those that the model uses where they are kept, and that users may therefore write to.
        self._in_place = [i for i, p in enumerate(self.params) if id(p) not in self._gathered]
        for index, param in enumerate(self.params):
            self._move(index, param, self._unit_of.get(id(param), -1))
        self.gatherer.finish()
        self._engine.allocate_states()
        free = device.free_bytes(ranks=comm.size)
        if free is not None:
            self._engine.set_hold_bytes(free // _PART_FOR_GRADIENTS)
        self._foreign: ForeignOptimizer | None = None
        if optimizer.foreign and optimizer.source is not None:
            numbered = [(i, self.names[i], p) for i, p in enumerate(self.params) if self._is_trained[i]]
            self._foreign = ForeignOptimizer(optimizer.source, self._engine, numbered, device)
        self._half_updated = False
        self._attachment = Attachment(model, {id(p): name for name, p in zip(self.names, self.params, strict=True)})
        self._homes = [self.params[i].data_ptr() for i in self._in_place]
        self._versions = {i: self.params[i]._version for i in self._in_place}
        named = zip(self.names, self.params, strict=True)
        ours = {id(p) for p, trained in zip(self.params, self._is_trained, strict=True) if trained}
        self._not_trained = [(name, p) for name, p in model.named_parameters() if id(p) not in ours]
        self._told_not_trained = {name for name, p in self._not_trained if p.requires_grad}
        self.closed = False
        self._on_read_gradient = on_read_gradient
        self.gradients = Gradients(
            self._engine,
            [entry for entry, is_trained in zip(enumerate(named), self._is_trained, strict=True) if is_trained],
            scaled=self._scaled,
            follow=self.follow,
            on_foreign=on_foreign_gradient,
        )
        for param in self.params:
            param._zc_owner = self  # type: ignore[attr-defined]

    def _move(self, index: int, param: torch.nn.Parameter, unit: int) -> None:
        with torch.no_grad(), whole(param):
            dense = _tensor.is_dense(param)
            values = param.detach() if dense else param.detach().contiguous()
            kept = torch.float32 if self._is_trained[index] else self._kept[index]
            values = values.to(self.device.torch, kept, copy=True)
            self._engine.load_param(index, self.device.view(values))
        param.grad = None
        if unit >= 0:
            self.gatherer.adopt(unit, *self._engine.location(index), self.names[index], param)
            return
        memory, offset_bytes = self._engine.param_memory(index)
        _released.set_home(param, None)
        _released.mark_whole(param)
        flat = self.device.tensor(memory, self._kept[index], param.numel(), offset_bytes) if param.numel() else None
        if flat is None:
            param.data = torch.empty(param.shape, dtype=self._kept[index], device=self.device.torch)
        else:
            param.data = _tensor.shaped(flat, param)

    def follow(self) -> None:
        """What the core does next comes after what the caller has put on its stream so far."""
        if self.runs_behind:
            self._step_engine.set_stream(self.device.stream())

    @property
    def _engine(self) -> _core.StepEngine:
        """To do something on the caller's stream."""
        self.follow()
        return self._step_engine

    def begin_micro_step(self, *, has_micro_batch: bool) -> None:
        self._check_homes()
        self.follow()
        self.gradients.begin_micro_step(has_micro_batch=has_micro_batch)
        self._optimizer.has_gradients |= has_micro_batch

    def end_micro_step(self, *, drop: bool = False) -> None:
        """Ends it. drop: gradients that the user has removed or changed meanwhile are no error."""
        self.follow()
        self.gradients.end_micro_step(drop=drop)
        self.gatherer.end_micro_step()

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Within this block gradients are the engine's: scaled, under fp16."""
        with self.gradients.backward():
            yield
            self.gatherer.end_backward()

    def _check_homes(self) -> None:
        """The model and the engine must not have come apart."""
        if self._half_updated:
            raise Error(
                "[engine] this engine's state is not whole: the optimizer failed in an earlier step. Build a new "
                "engine, and load a checkpoint into it."
            )
        if self.closed:
            raise ConfigError("[engine] the engine was closed, expected one that is open. Build a new one to train on.")
        self._attachment.check()
        for index, home in zip(self._in_place, self._homes, strict=True):
            if self.params[index].data_ptr() != home:
                raise ConfigError(
                    f"[engine] parameter {self.names[index]} no longer lies in the engine's memory: it was given other "
                    "storage (p.data = ..., model.to()). Copy values in place instead, as in p.copy_(values), or build "
                    "a new engine."
                )
        for name, param in self._not_trained:
            if param.requires_grad and name not in self._told_not_trained:
                self._told_not_trained.add(name)
                logger.warning(
                    "[engine] parameter %s requires a gradient now, but did not when the engine was built: it is not "
                    "trained. Build a new engine to train it.",
                    name,
                )

    def step(self, *, divisor: float, weights: Weights, max_norm: float, stop: bool) -> bool:
        """Whether some rank asked to stop. divisor: without the loss scale; weights of micro-batches take its place."""
        self._check_groups()
        written = self.take_writes()
        self._versions.update({i: self.params[i]._version for i in written})
        self.gatherer.invalidate()
        arguments: dict[str, Any] = {
            "divisor": divisor,
            "max_norm": max_norm,
            "settings": zlib.crc32(repr(self._fingerprints(written)).encode()),
            "stop": stop,
            "weights": weights.given,
            "weights_missing": weights.missing,
        }
        if self._foreign is None:
            stopped = self._engine.step(self._optimizer.hypers(), **arguments)
        else:
            stopped = self._foreign_step(self._foreign, arguments)
        self._optimizer.has_gradients = False
        if self.runs_behind or not self._engine.result().skipped:
            trained = [p for p, is_trained in zip(self.params, self._is_trained, strict=True) if is_trained]
            torch.autograd.graph.increment_version(trained)  # torch must see the core's writes
            self._versions = {i: self.params[i]._version for i in self._in_place}
        return bool(stopped)

    def _fingerprints(self, written: list[int]) -> list[tuple[int, int]]:
        """What users have written, for ranks to compare: such parameters are whole on each. Shared ones exist once."""
        shared = self.core_arguments["share_parameters"]
        return [(i, 0 if shared else _tensor.digest(self.params[i])) for i in written]

    def result(self) -> StepOutcome:
        """How the last step went. Waits for its norm. Local."""
        result = self._engine.result()
        return StepOutcome(result, [self.names[i] for i in result.nonfinite])

    def _foreign_step(self, optimizer: ForeignOptimizer, arguments: dict[str, Any]) -> bool:
        groups = [sorted(plain_settings(group).items()) for group in self._optimizer.param_groups]
        settings = zlib.crc32(repr(groups).encode(), arguments["settings"])
        stopped: bool = self._engine.begin_foreign_step(**arguments | {"settings": settings})
        if not self._engine.result().skipped:
            self._half_updated = True
            optimizer.step()
            self._engine.end_foreign_step()
            self._half_updated = False
        return stopped

    # The loss scale of fp16; none elsewhere

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale."""
        if not self._scaled:
            return loss
        if self.runs_behind:  # its scale may not be known here yet
            return loss.float() * self.device.tensor_at(self._engine.loss_scale_address(), torch.float32, 4)[0]
        return loss.float() * self._engine.loss_scale

    def loss_scale(self) -> float | None:
        """As the next step will use it. Waits for the last step's outcome."""
        return self._engine.loss_scale if self._scaled else None

    @property
    def loss_scale_state(self) -> tuple[float, int, int, int] | None:
        """Scale, iteration, last overflow, overflows left until the scale halves. Waits as loss_scale() does."""
        return self._engine.loss_scale_state if self._scaled else None

    @loss_scale_state.setter
    def loss_scale_state(self, state: tuple[float, int, int, int]) -> None:
        self._engine.loss_scale_state = state

    def _check_groups(self) -> None:
        """The optimizer's groups must hold the parameters that they held when the engine was built."""
        groups, source = self._optimizer.param_groups, self._optimizer.source
        if source is not None and source.param_groups is not groups:
            raise ConfigError(
                "[engine] the optimizer's list of parameter groups is another one than when the engine was built: got "
                "one that the engine does not read (optimizer.load_state_dict(), optimizer.param_groups = ...), "
                "expected the same. Change the groups' values in place, and load state with engine.load_checkpoint()."
            )
        if len(groups) != len(self._grouped):
            raise ConfigError(
                f"[engine] the number of parameter groups changed: got {len(groups)}, expected {len(self._grouped)}. "
                "Build a new engine to add or remove groups."
            )
        for index, (group, then) in enumerate(zip(groups, self._grouped, strict=True)):
            now = [id(p) for p in group["params"]]
            if now != then:
                raise ConfigError(
                    f"[engine] parameter group {index} of the optimizer changed after the engine was built: got "
                    f"{len(now)} parameters, expected the same {len(then)} in the same order. Freeze parameters with "
                    "requires_grad_(False), or build a new engine for other groups."
                )

    def zero_grad(self) -> None:
        """Drops everything that was folded since the last step."""
        self._engine.zero_grad()
        self._optimizer.has_gradients = False

    def take_writes(self) -> list[int]:
        """Masters follow values that were written to the model, by load_state_dict() for one. Returns which. Local."""
        return [index for index in self._versions if self._take_write(index)]

    def _take_write(self, index: int) -> bool:
        version = self.params[index]._version
        written: bool = self._versions.get(index, version) != version
        if written and self._is_trained[index]:
            self._engine.reload_master(index)
        return written

    # One parameter

    def index_of(self, param: torch.nn.Parameter) -> int:
        return self._index_of[id(param)]

    def name_of(self, param: torch.nn.Parameter) -> str:
        return self.names[self.index_of(param)]

    def is_trained(self, param: torch.Tensor) -> bool:
        index = self._index_of.get(id(param))
        return index is not None and self._is_trained[index]

    def full_values(self, param: torch.nn.Parameter) -> torch.Tensor:
        """A copy of a parameter's values: a trained one's as it is kept, a frozen one's as it is used. Collective."""
        index = self.index_of(param)
        kept, used = self._kept[index], self._used[index]
        if self._is_trained[index] and kept == torch.float32 != used:
            return self.read_state(param, _core.StateKind.master)
        with torch.no_grad(), whole(param):
            return param.detach().to(kept if self._is_trained[index] else used, copy=True)

    def copies(self, tensors: Iterable[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        """Copies of parameters, as full_values() makes them, and of other tensors: (id, copy), each tensor once.

        Parameters come unit by unit; one unit is whole at a time. Collective, and to be gone through to its end.
        """
        distinct = {id(tensor): tensor for tensor in tensors}
        for key, tensor in distinct.items():
            if key not in self._index_of:
                yield key, tensor.detach().clone()
        in_core = [self._index_of[key] for key in distinct if key in self._index_of]
        in_core.sort(key=lambda index: (self._engine.location(index)[0], index))
        for unit, group in itertools.groupby(in_core, key=lambda index: self.gatherer.unit_of(self.params[index])):
            if unit is not None:
                self.gatherer.hold(unit)
            for index in group:
                yield id(self.params[index]), self.full_values(self.params[index])
            if unit is not None:
                self.gatherer.drop(unit)

    def read_state(self, param: torch.nn.Parameter, kind: _core.StateKind) -> torch.Tensor:
        """A trained parameter's state of one kind, whole, in fp32. Collective."""
        self._take_write(self.index_of(param))
        out = _tensor.shaped(torch.empty(param.numel(), dtype=torch.float32, device=self.device.torch), param)
        self._engine.read_state(self.index_of(param), kind, self.device.view(out))
        return out

    def write_state(self, param: torch.nn.Parameter, kind: _core.StateKind, values: torch.Tensor) -> None:
        """Sets a parameter's state from rank 0's values. Collective."""
        if tuple(values.shape) != tuple(param.shape):
            raise ConfigError(
                f"[zero] {self.name_of(param)}: got values of shape {tuple(values.shape)}, expected "
                f"{tuple(param.shape)}. Give the whole parameter's values."
            )
        if kind == _core.StateKind.master:
            self.load(param, values)
            return
        own = _tensor.shaped(torch.empty(param.numel(), dtype=torch.float32, device=self.device.torch), param)
        with torch.no_grad():
            own.copy_(values)
        self._engine.write_state(self.index_of(param), kind, self.device.view(own))

    def read_local(self, param: torch.nn.Parameter, kind: _core.StateKind) -> torch.Tensor:
        """The part of a trained parameter's state that this rank owns, 1-D. Local."""
        self._take_write(self.index_of(param))
        begin, end = self._engine.owned_range(self.index_of(param), kind)
        out = torch.empty(end - begin, dtype=torch.float32, device=self.device.torch)
        self._engine.read_owned_state(self.index_of(param), kind, self.device.view(out))
        return out

    def write_local(self, param: torch.nn.Parameter, kind: _core.StateKind, values: torch.Tensor) -> None:
        """Sets the part of a trained parameter's state that this rank owns. Of masters collective."""
        begin, end = self._engine.owned_range(self.index_of(param), kind)
        if values.numel() != end - begin:
            raise ConfigError(
                f"[zero] {self.name_of(param)}: got {values.numel()} values, expected the {end - begin} of this rank's "
                "part. Read the part first to see its length."
            )
        own = values.detach().reshape(-1).to(self.device.torch, torch.float32, copy=True)
        self._engine.write_owned_state(self.index_of(param), kind, self.device.view(own))
        if kind == _core.StateKind.master:
            self._after_write(param)

    def state_kind(self, param: torch.nn.Parameter, key: str) -> _core.StateKind:
        """The optimizer state of a parameter that torch's optimizers call `key`."""
        kinds = self._kinds(self.index_of(param))
        del kinds["master"]
        if key not in kinds:
            raise ConfigError(
                f'[zero] optimizer state "{key}": got a name that {self._optimizer.type} does not have, expected one '
                f"of {list(kinds)}."
            )
        return kinds[key]

    # Checkpoints

    def find(self, param: torch.Tensor) -> int | None:
        """The core's number of a parameter; None where the core does not hold it."""
        return self._index_of.get(id(param))

    def kept_dtype(self, index: int) -> torch.dtype:
        kept: torch.dtype = self._kept[index]
        return kept

    def used_dtype(self, index: int) -> torch.dtype:
        used: torch.dtype = self._used[index]
        return used

    def group_of(self, index: int) -> int | None:
        return self._groups[index]

    @property
    def foreign(self) -> ForeignOptimizer | None:
        """What runs an optimizer that has no native twin."""
        return self._foreign

    def state_parts(self, index: int) -> list[str]:
        """What the core keeps of a trained parameter in fp32, by name: the master and the optimizer's states."""
        return list(self._kinds(index))

    def _kinds(self, index: int) -> dict[str, _core.StateKind]:
        group = self._groups[index]
        names = () if group is None else self._optimizer.state_names(group)
        return {"master": _core.StateKind.master, **dict(zip(names, _STATES, strict=False))}

    def part_memory(self, index: int, part: str, begin: int, end: int) -> tuple[int, int]:
        """Where elements [begin, end) of a trained parameter's part lie, (address, bytes); this rank keeps them."""
        kinds = self._kinds(index)
        if part not in kinds and self._foreign is not None:
            return self._foreign.memory(index, part, begin, end)
        return self._engine.state_memory(index, kinds[part], begin, end)

    def begin_load(self) -> None:
        """The core's memory is about to be written to: what was gathered from it is stale. Local."""
        self.take_writes()  # of what is not loaded
        self.gatherer.invalidate()

    def end_load(self, steps: list[int]) -> None:
        """All masters have been written to; parameters follow them. steps: updates of each parameter. Collective."""
        self._engine.set_loaded(steps)
        torch.autograd.graph.increment_version(self.params)
        self._versions = {i: self.params[i]._version for i in self._in_place}

    def gradient_divisor(self) -> float:
        """Ends the open micro-step; what the folded gradients are to be divided by. Collective."""
        return self._on_read_gradient()

    def load(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Sets a parameter or buffer of the model from rank 0's values, which have its shape. Collective."""
        index = self._index_of.get(id(target))
        if index is None:
            with torch.no_grad():
                target.copy_(values)
            broadcast([target], self.comm, "load a tensor")
            return
        param = self.params[index]
        dtype = torch.float32 if self._is_trained[index] else self._kept[index]
        own = _tensor.shaped(torch.empty(param.numel(), dtype=dtype, device=self.device.torch), param)
        with torch.no_grad():
            own.copy_(values)
        self._engine.load_param(index, self.device.view(own))
        self._after_write(param, own)

    def _after_write(self, param: torch.nn.Parameter, values: torch.Tensor | None = None) -> None:
        """The core has changed what it keeps of a parameter. values: all of it, unrounded. Collective without."""
        torch.autograd.graph.increment_version([param])
        index = self.index_of(param)
        if index in self._versions:
            self._versions[index] = param._version
        elif not isinstance(param, _released.Released):
            whole = self.read_state(param, _core.StateKind.master) if values is None else values
            self.gatherer.write_gathered(param, whole.to(self._kept[index]))

    def memory_report(self) -> dict[str, int]:
        report = dict(self._engine.memory_report()) | {"gathered_parameters": self.gatherer.gathered_bytes()}
        if self._foreign is not None:
            report["optimizer_state"] += self._foreign.bytes()
        return report

    @property
    def core(self) -> _core.StepEngine:
        return self._engine

    def close(self) -> None:
        self.gradients.close()
        self.gatherer.close()
        self.closed = True
        for param in self.params:  # else the model would keep the core, and all its states, alive
            if getattr(param, "_zc_owner", None) is self:
                del param._zc_owner  # type: ignore[attr-defined]


class StepOutcome:
    """What an optimizer step did.

    `grad_norm` is before clipping by `clip`, `nonfinite` names parameters, `exhausted`: it overflowed at the minimum
    loss scale.
    """

    def __init__(self, result: _core.StepResult, nonfinite: list[str]) -> None:
        self.skipped: bool = result.skipped
        self.exhausted: bool = result.exhausted
        self.grad_norm: float = result.grad_norm
        self.clip: float = result.clip
        self.nonfinite = nonfinite


@contextlib.contextmanager
def whole(param: torch.nn.Parameter) -> Iterator[None]:
    """Within this block the parameter's values are there, wherever they are kept. Collective."""
    home = _released.home_of(param)
    if home is None:
        yield
        return
    home.hold_param(param)
    try:
        yield
    finally:
        home.drop_param(param)

"""Units' parameters in torch storage: gathered before a unit's forward and backward, emptied after.

What to gather, keep and release, and when, is decided in the core (cpp/zc/zero/param_gatherer.h). Here are the
storages, and the hooks that tell the core where the model is:

  forward    a unit's pre-hook and hook enclose each call. Modules that hold parameters of a unit around other units
             have such hooks, too, for calls from outside of that unit's forward (generate() calls an encoder by itself)
  backward   a hook on each output tells when the backward reaches the unit. A parameter that autograd has saved is
             gathered, too, when the backward asks for it, by whatever way it got there (an output in a container of
             somebody's own, a tensor stored on the side)

Note: gathered parameters of a unit lie in one storage a bucket, which is emptied and refilled in place. So views that
autograd or the user took stay right, and version counters do not move.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.utils import _pytree

from zerocore import _core, _released, _tensor
from zerocore._device import Host
from zerocore._hooks import ModuleHook
from zerocore._units import Unit
from zerocore.errors import Error

_WAY_OUT = (
    "When another module uses it, call zerocore.zero.register_external_parameter(module, parameter) before the engine "
    "is built. Read it inside `with engine.unsharded():`, write it inside "
    "`with zerocore.zero.GatheredParameters([parameter], modifier_rank=0):`, save engine.state_dict(); all of these on "
    "every rank."
)


_LARGE = 1 << 20  # bytes
_SHRINK_BYTES = 128
_MAX_SHRUNK = 512


_Function = TypeVar("_Function", bound=Callable[..., Any])


def _not_compiled(function: _Function) -> _Function:
    """torch.compiler.disable, without importing the compiler (1.3 s) for who does not use it.

    Nor are its 5 us a call paid where nothing is being compiled: there is a callback while code runs that torch has
    compiled, and while it is traced `is_dynamo_compiling` holds.
    """

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args)
        if not torch.compiler.is_dynamo_compiling() and torch._C._dynamo.eval_frame.get_eval_frame_callback() is None:
            return function(*args)
        disabled = getattr(function, "_zc_disabled", None)
        if disabled is None:
            disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
            function._zc_disabled = disabled  # type: ignore[attr-defined]
        return disabled(*args)

    return call  # type: ignore[return-value]


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _saved_tensors_hooks() -> tuple[Any, Any] | None:
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


@dataclasses.dataclass
class _UnitState:
    """A unit, its parameters' places, and what is in memory.

    Attributes:
        flats: one 1-D tensor a bucket, in the dtype of computation; its storage is empty while the unit is released.
        params: with their names; data is a view of a flat.
        calls: open calls of its module.
        whole: the parameters may be used.
        versions: of the parameters when they became whole.
    """

    flats: dict[int, torch.Tensor]
    params: list[tuple[str, torch.nn.Parameter]] = dataclasses.field(default_factory=list)
    calls: int = 0
    whole: bool = False
    versions: list[int] = dataclasses.field(default_factory=list)


def _frames() -> Iterator[FrameType]:
    """What this thread runs, from the inside out."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _frame_of_call() -> FrameType | None:
    return next((frame for frame in _frames() if frame.f_code is torch.nn.Module._call_impl.__code__), None)


@dataclasses.dataclass
class _Call:
    """An open call of a module.

    Attributes:
        enters: it has the unit gathered; otherwise it lies inside of a call of the unit.
        frame: runs as long as the call does; None where torch has compiled it.
        training: a backward will follow.
        first_nr: the number that autograd gives to the first node of the call.
        saving: the hooks on saved tensors, where they are ours.
    """

    enters: bool
    frame: FrameType | None = dataclasses.field(default_factory=_frame_of_call)
    training: bool = dataclasses.field(default_factory=torch.is_grad_enabled)
    first_nr: int = dataclasses.field(default_factory=torch._C._autograd._get_sequence_nr)
    saving: Any = None


class UnitGatherer(_released.NotPickled):
    """Carries out the core's plans for one model.

    Args:
        core: whose gatherer decides.
        units: as the core got them, in its order.
        device: of the gathered parameters.
        follow: called before the core works for what runs next.
    """

    def __init__(self, core: _core.StepEngine, units: list[Unit], device: Host, follow: Callable[[], None]) -> None:
        self._step_engine = core
        self._follow = follow
        self._device = device
        self.comm = core.gather_comm
        self._specs = units
        self._units: list[_UnitState] = []
        self._unit_of_param: dict[int, int] = {}
        self._unit_of_storage: dict[int, int] = {}
        self._shrunk = 0
        self._held_for_graph: list[int] = []
        self._open: list[tuple[int, list[_Call]]] = []  # calls of each module with hooks, and its unit
        for index in range(len(units)):
            flats = {}
            for bucket, numel, dtype in core.unit_buckets(index):
                flat = torch.empty(numel, dtype=_tensor.TORCH_DTYPES[dtype], device=device.torch)
                flat.untyped_storage().resize_(0)
                self._unit_of_storage[flat.untyped_storage()._cdata] = index
                flats[bucket] = flat
            self._units.append(_UnitState(flats))
        self._handles: list[Any] = []
        for index, unit in enumerate(units):
            self._hook(index, unit.module)

    @property
    def _engine(self) -> _core.StepEngine:
        """To do something on the caller's stream."""
        self._follow()
        return self._step_engine

    # Parameters

    def adopt(self, unit: int, bucket: int, offset: int, name: str, param: torch.nn.Parameter) -> None:
        """Lets the gatherer be the place of a parameter's values; the parameter is released."""
        state = self._units[unit]
        _released.mark_whole(param)
        storage = state.flats[bucket].untyped_storage()
        storage.resize_(state.flats[bucket].numel() * state.flats[bucket].element_size())  # a view must fit when made
        param.data = _tensor.shaped(state.flats[bucket][offset : offset + param.numel()], param)
        storage.resize_(0)
        _released.mark_released(param)
        state.params.append((name, param))
        self._unit_of_param[id(param)] = unit
        _released.set_home(param, self)

    def forget(self, param: torch.nn.Parameter) -> None:
        state = self._units[self._unit_of_param.pop(id(param))]
        at = next(i for i, (_, each) in enumerate(state.params) if each is param)
        del state.params[at]
        if state.whole:
            del state.versions[at]

    def finish(self) -> None:
        """All parameters are adopted."""
        for unit, module in self._called_from_outside():
            self._hook(unit, module)

    def _called_from_outside(self) -> Iterator[tuple[int, torch.nn.Module]]:
        """Modules that hold parameters of a unit around other units, each with that unit."""
        around = {unit.parent for unit in self._specs}
        for module in self._specs[0].module.modules() if self._specs else ():
            holds = {self._unit_of_param.get(id(param)) for param in module.parameters(recurse=False)}
            for unit in sorted(unit for unit in holds if unit is not None and unit in around):
                if self._specs[unit].module is not module:
                    yield unit, module

    def name_of(self, param: torch.nn.Parameter) -> str:
        state = self._units[self._unit_of_param[id(param)]]
        return next(name for name, each in state.params if each is param)

    def use_while_released(self, given: list[Any], operation: str) -> None:
        raise _released.refuse(given, operation, _WAY_OUT)

    # Gathering

    def hold(self, unit: int) -> None:
        """Gathers a unit until drop(). Collective."""
        self._carry_out(self._engine.enter_unit(unit, _core.Pass.demand, False))
        self._bring(unit)

    def drop(self, unit: int) -> None:
        self._carry_out(self._engine.leave_unit(unit, False))

    def hold_param(self, param: torch.nn.Parameter) -> None:
        self.hold(self._unit_of_param[id(param)])

    def drop_param(self, param: torch.nn.Parameter) -> None:
        self.drop(self._unit_of_param[id(param)])

    def unit_of(self, param: torch.nn.Parameter) -> int | None:
        return self._unit_of_param.get(id(param))

    def write_gathered(self, param: torch.nn.Parameter, values: torch.Tensor) -> None:
        """What is kept of a parameter that is whole has changed: it follows.

        The rest of its unit is left alone, since somebody may be writing to that.
        """
        with torch.no_grad():
            param.copy_(values)
        state = self._units[self._unit_of_param[id(param)]]
        at = next(i for i, (_, each) in enumerate(state.params) if each is param)
        state.versions[at] = param._version

    def end_backward(self) -> None:
        self._drop_held_for_graph()
        self._carry_out(self._engine.end_backward())

    def end_micro_step(self) -> None:
        self._engine.end_gathers_of_micro_step()

    def invalidate(self) -> None:
        """Parameters are about to change: releases all."""
        self._end_interrupted()
        self._drop_held_for_graph()
        self._carry_out(self._engine.invalidate_units())

    def gathered_bytes(self) -> int:
        return sum(
            flat.numel() * flat.element_size()
            for state in self._units
            for flat in state.flats.values()
            if flat.untyped_storage().nbytes() > 0
        )

    def close(self) -> None:
        """Takes the hooks off; the parameters stay as they are, here. Local."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _unit_in_storage_of(self, tensor: torch.Tensor) -> int | None:
        """The unit whose gathered parameters a tensor is, or is a view of."""
        if tensor.layout is not torch.strided:
            return None
        return self._unit_of_storage.get(tensor.untyped_storage()._cdata)

    def _carry_out(self, plan: tuple[list[int], list[int]] | None) -> None:
        if plan is None:
            return
        released, gathered = plan
        written = [name for unit in released for name in self._written(unit)]
        for unit in released:
            self._empty(unit)
        for unit in gathered:
            self._start(unit)
        if written:  # found after all of the plan is carried out, which the core counts on
            raise Error(
                f"[zero] parameter {written[0]} was written to while it was gathered: got a change that would be lost, "
                "expected none outside `with zerocore.zero.GatheredParameters([parameter], modifier_rank=0):`. Write "
                "it there, on every rank."
            )

    def _start(self, unit: int) -> None:
        for bucket, flat in self._units[unit].flats.items():
            flat.untyped_storage().resize_(self._room_for(flat.nbytes))
            self._engine.start_gather(bucket, flat.data_ptr())

    def _room_for(self, num_bytes: int) -> int:
        """How large to make a storage of so many bytes.

        Note: glibc cannot put an aligned block back into the hole that an equal one has left, when something small has
        settled behind it, and takes fresh memory: the heap would grow to a multiple of what is gathered. So each large
        block is a little smaller than the ones before it, and fits; every 512th starts over.
        """
        if num_bytes < _LARGE or self._device.runs_behind:
            return num_bytes
        self._shrunk = (self._shrunk + 1) % _MAX_SHRUNK
        return num_bytes + _SHRINK_BYTES * (_MAX_SHRUNK - self._shrunk)

    def _bring(self, unit: int) -> None:
        state = self._units[unit]
        if state.whole:
            return
        self._engine.wait_unit(unit)
        for _, param in state.params:
            _released.mark_whole(param)
        state.whole = True
        state.versions = [param._version for _, param in state.params]

    def _empty(self, unit: int) -> None:
        state = self._units[unit]
        for _, param in state.params:
            _released.mark_released(param)
        state.whole = False
        for flat in state.flats.values():
            flat.untyped_storage().resize_(0)

    def _written(self, unit: int) -> list[str]:
        """The unit's parameters that were written to, or given other memory, since they became whole."""
        state = self._units[unit]
        if not state.whole:
            return []
        return [
            name
            for (name, param), version in zip(state.params, state.versions, strict=True)
            if param._version != version or self._unit_in_storage_of(param) != unit
        ]

    # Hooks

    def _hook(self, unit: int, module: torch.nn.Module) -> None:
        """Gathers the unit for each call of its module, or of one in it that is called from outside."""
        state = self._units[unit]
        is_root = module is self._specs[0].module
        is_units = module is self._specs[unit].module
        calls: list[_Call] = []
        self._open.append((unit, calls))

        @_not_compiled
        def before(module: torch.nn.Module, args: Any) -> None:
            if is_root:
                self._end_interrupted()
            call = _Call(enters=is_units or state.calls == 0)
            calls.append(call)
            if not call.enters:
                return
            state.calls += 1
            which = _core.Pass.backward if _in_backward() else _core.Pass.forward
            self._carry_out(self._engine.enter_unit(unit, which, call.training))
            self._bring(unit)
            if call.training and _saved_tensors_hooks() is None:
                call.saving = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
                call.saving.__enter__()

        @_not_compiled
        def after(module: torch.nn.Module, args: Any, output: Any) -> Any:
            call = calls.pop()
            if not call.enters:
                return output
            state.calls -= 1
            if call.saving is not None:
                call.saving.__exit__()
            output = self._own_outputs(unit, output)
            if call.training:
                self._watch(unit, output, call.first_nr)
            self._carry_out(self._engine.leave_unit(unit, call.training))
            return output

        self._handles.append(module.register_forward_pre_hook(ModuleHook(before), prepend=True))
        self._handles.append(module.register_forward_hook(ModuleHook(after), always_call=True))

    def _end_interrupted(self) -> None:
        """Ends calls that run no more: torch does not tell us when it is a KeyboardInterrupt that ends them."""
        if _in_backward() or not any(calls for _, calls in self._open):
            return  # a backward may have a thread of its own, which does not see the calls around it
        running = [None, *_frames()]
        for unit, calls in self._open:
            ended = [call for call in calls if call.enters and call.frame not in running]
            calls[:] = [call for call in calls if call.frame in running]
            for call in ended:
                self._units[unit].calls -= 1
                if call.saving is not None:
                    self._remove_saved_tensors_hooks()
                self._carry_out(self._engine.leave_unit(unit, False))

    def _remove_saved_tensors_hooks(self) -> None:
        """Takes ours off where hooks of others may have been put on top."""
        others = []
        while (hooks := _saved_tensors_hooks()) is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            if hooks == (self._pack, self._unpack):
                break
            others.append(hooks)
        for hooks in reversed(others):
            torch._C._autograd._push_saved_tensors_default_hooks(*hooks)

    def _own_outputs(self, unit: int, output: Any) -> Any:
        """Replaces views of the unit's parameters by copies, since the unit is released behind them."""

        def is_ours(value: Any) -> bool:
            is_plain = isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
            return is_plain and self._unit_in_storage_of(value) == unit

        if any(is_ours(tensor) for tensor in _tensor.tensors_in(output)):
            return _pytree.tree_map(lambda value: value.clone() if is_ours(value) else value, output)
        return output

    def _watch(self, unit: int, output: Any, first_nr: int) -> None:
        """Gathers the unit when the backward reaches it.

        What was computed before the call (`first_nr` is the number of its first node) and only passes through is left
        alone: its gradient is complete when the backward is in some other unit, which would be released.

        A unit may hand on the output of a unit in it. One hook a tensor then needs the outer one first, which releases
        nothing that the backward is about to read: nothing would bring that back where the hooks on saved tensors are
        not ours.
        """
        for tensor in _tensor.tensors_in(output):
            node = tensor.grad_fn
            if node is None or node._sequence_nr() < first_nr:
                continue
            units = node.metadata.setdefault((self, tensor.output_nr), [])  # type: ignore[attr-defined]
            units.insert(0, unit)
            if len(units) == 1:
                tensor.register_hook(functools.partial(self._reached, units))  # type: ignore[no-untyped-call]

    def _reached(self, units: list[int], grad: torch.Tensor) -> None:
        for unit in units:
            self._need(unit)

    @_not_compiled
    def _need(self, unit: int) -> None:
        self._carry_out(self._engine.need_unit(unit))
        if not self._units[unit].whole:
            self._bring(unit)
        if torch.is_grad_enabled() and unit not in self._held_for_graph:
            self._held_for_graph.append(unit)
            self.hold(unit)

    def _drop_held_for_graph(self) -> None:
        """Drops what a backward with create_graph=True has used.

        What autograd saves meanwhile goes through no hook of ours, so its units stay until the backward of that graph.
        """
        held, self._held_for_graph = self._held_for_graph, []
        for unit in held:
            self.drop(unit)

    @_not_compiled
    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int, int | None]:
        return tensor.detach(), tensor._version, self._unit_in_storage_of(tensor)

    @_not_compiled
    def _unpack(self, packed: tuple[torch.Tensor, int, int | None]) -> torch.Tensor:
        tensor, version, unit = packed
        if unit is not None:
            self._need(unit)
        if tensor._version != version:  # torch leaves this check to whoever packs
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: got a "
                f"{tuple(tensor.shape)} tensor of {tensor.dtype} at version {tensor._version}, expected version "
                f"{version}. Find it with torch.autograd.set_detect_anomaly(True)."
            )
        return tensor

"""Running statistics of BatchNorm and InstanceNorm: not updated by recomputation, and in micro-batch order if asked.

Note: during a forward whose statistics are not to go straight into a module's buffers, these are exchanged for
temporary ones. With zeros and momentum 1 the temporary ones then hold the statistics of that forward alone. They are
recorded, and replayed on all ranks when the micro-step ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.modules.batchnorm import _NormBase

from zerocore import _core
from zerocore._hooks import ModuleHook
from zerocore._other_state import broadcast
from zerocore.errors import UnsupportedError

_NAMES = ("running_mean", "running_var", "num_batches_tracked")


class _Record(NamedTuple):
    """One forward: the module's number, what it adds to num_batches_tracked, and the statistics of its batch."""

    module: int
    counted: int
    mean: torch.Tensor
    var: torch.Tensor


class _Own(NamedTuple):
    """What a module has while its forward runs on temporary buffers."""

    buffers: dict[str, torch.Tensor | None]
    momentum: float | None
    recorded: bool


class RunningStatistics:
    """Watches the modules of `model` that keep running statistics, from attach() to close().

    Args:
        model: may be changed until attach().
        comm: the engine's.
        ordered: the policy `buffers="ordered"`; otherwise only recomputation is kept out.

    Raises:
        UnsupportedError: ordered, and the model holds a SyncBatchNorm.
    """

    def __init__(self, model: torch.nn.Module, comm: _core.Communicator, *, ordered: bool) -> None:
        self._model = model
        self._comm = comm
        self._ordered = ordered
        self._all = list(model.modules())
        self._modules: list[_NormBase] = []
        for name, module in model.named_modules():
            if ordered and isinstance(module, torch.nn.SyncBatchNorm):
                raise UnsupportedError(
                    f"[engine] module {name or 'model'}: got a SyncBatchNorm, which mixes the ranks' batches, but "
                    "buffers='ordered' expects statistics of one micro-batch. Use BatchNorm, or buffers='rank0'."
                )
            if isinstance(module, _NormBase) and module.track_running_stats and module.running_mean is not None:
                self._modules.append(module)
        self._own: dict[int, _Own] = {}  # of modules whose forward is running
        self._records: list[_Record] = []  # of the open micro-step, in order
        self._in_forward = False  # of the whole model, with gradients
        self._updated_alone = False  # without gradients, so in torch's way and on this rank only
        self._hooks: list[Any] = []

    def attach(self) -> None:
        if self._ordered and self._modules:
            # A module inside may run without gradients in a forward that has them: reentrant checkpointing does that.
            self._hook(self._model, self._before_model, self._after_model)
        for index, module in enumerate(self._modules):
            self._hook(module, functools.partial(self._before, index), functools.partial(self._after, index))

    def end_micro_step(self, *, counts: bool) -> None:
        """Replays the records of all ranks, rank by rank. Collective. counts: this rank had a micro-batch."""
        if not self._ordered or not self._modules:
            return
        records, self._records = self._records if counts else [], []
        if self._comm.size > 1:
            records = self._exchange(records)
        with torch.no_grad():
            for record in records:
                self._replay(record)

    def drop(self) -> None:
        """Forgets the forwards of the open micro-step."""
        self._records = []

    def rank0_buffers(self) -> list[torch.Tensor]:
        """The buffers of the model that the ranks take over from rank 0 at each step."""
        replayed = {id(buffer) for buffer in self._replayed()} if self._ordered else set()
        buffers = {id(buffer): buffer for module in self._all for buffer in module._buffers.values()}
        return [buffer for key, buffer in buffers.items() if buffer is not None and key not in replayed]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for index in list(self._own):
            self._restore(index)

    def _hook(self, module: torch.nn.Module, before: Callable[..., None], after: Callable[..., None]) -> None:
        self._hooks.append(module.register_forward_pre_hook(ModuleHook(before)))
        self._hooks.append(module.register_forward_hook(ModuleHook(after), always_call=True))

    # Forwards

    def _before_model(self, module: torch.nn.Module, args: Any) -> None:
        self._in_forward = torch.is_grad_enabled()

    def _after_model(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._in_forward = False

    def _before(self, index: int, module: _NormBase, args: Any) -> None:
        self._restore(index)  # where a KeyboardInterrupt went past _after
        if not (module.training and module.track_running_stats):
            return
        if torch._C._current_graph_task_id() != -1:  # inside a backward: checkpointing computes it again
            self._exchange_buffers(index, torch.clone, recorded=False)
        elif self._ordered and (self._in_forward or torch.is_grad_enabled()):
            self._exchange_buffers(index, torch.zeros_like, recorded=True)
            module.momentum = 1.0
        else:
            self._updated_alone = True

    def _after(self, index: int, module: _NormBase, args: Any, output: Any) -> None:
        own = self._own.get(index)
        if own is None:
            return
        mean, var, count = (module._buffers[name] for name in _NAMES)
        self._restore(index)
        if own.recorded and output is not None:  # None: it raised
            assert mean is not None and var is not None
            self._records.append(_Record(index, 0 if count is None else int(count), mean, var))

    def _exchange_buffers(self, index: int, make: Callable[[torch.Tensor], torch.Tensor], *, recorded: bool) -> None:
        module = self._modules[index]
        own = {name: module._buffers[name] for name in _NAMES}
        self._own[index] = _Own(own, module.momentum, recorded)
        module._buffers.update({name: None if buffer is None else make(buffer) for name, buffer in own.items()})

    def _restore(self, index: int) -> None:
        own = self._own.pop(index, None)
        if own is not None:
            self._modules[index]._buffers.update(own.buffers)
            self._modules[index].momentum = own.momentum

    # Replay

    def _replayed(self) -> list[torch.Tensor]:
        buffers = [module._buffers[name] for module in self._modules for name in _NAMES]
        return [buffer for buffer in buffers if buffer is not None]

    def _replay(self, record: _Record) -> None:
        """One update as torch makes it, each operation rounded in the buffer's dtype."""
        module = self._modules[record.module]
        running_mean, running_var, tracked = (module._buffers[name] for name in _NAMES)
        assert running_mean is not None and running_var is not None
        if tracked is not None:
            tracked += record.counted
        momentum = module.momentum
        if momentum is None:
            if tracked is None or record.counted == 0:
                return  # torch's factor is 0 then: InstanceNorm does not count
            momentum = 1.0 / float(tracked)
        for running, new in ((running_mean, record.mean), (running_var, record.var)):
            m = torch.full_like(running, momentum)
            running.copy_(m * new + (1 - m) * running)

    def _exchange(self, records: list[_Record]) -> list[_Record]:
        """The records of rank 0, then those of rank 1, and so on: as fp64, which holds every dtype's values exactly."""
        parts = [torch.empty(0, dtype=torch.float64)]
        for index, counted, mean, var in records:
            head = torch.tensor([index + 1, counted], dtype=torch.float64)
            parts += [head, mean.double().cpu().flatten(), var.double().cpu().flatten()]
        mine = torch.cat(parts)
        numel, updated_alone = self._comm.all_reduce(
            [mine.numel(), self._updated_alone], _core.ReduceOp.max, "size of batch statistics"
        )
        self._updated_alone = False
        if updated_alone:
            broadcast(self._replayed(), self._comm, "running statistics")
        if numel == 0:
            return []
        message = bytearray(8 * numel)  # the zero behind a shorter one's end is no module's number
        torch.frombuffer(message, dtype=torch.float64)[: mine.numel()] = mine
        gathered = self._comm.gather_bytes(bytes(message), "batch statistics")
        return [record for each in gathered for record in self._unpack(each)]

    def _unpack(self, message: bytes) -> list[_Record]:
        numbers = torch.frombuffer(bytearray(message), dtype=torch.float64)
        records = []
        at = 0
        while at < numbers.numel() and numbers[at] != 0:
            index, counted = int(numbers[at]) - 1, int(numbers[at + 1])
            like = self._modules[index]._buffers["running_mean"]
            assert like is not None
            end = at + 2 + 2 * like.numel()
            mean, var = numbers[at + 2 : end].view(2, *like.shape).to(like.device, like.dtype)
            records.append(_Record(index, counted, mean, var))
            at = end
        return records

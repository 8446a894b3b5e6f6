"""Torch optimizers without a native twin: their own code runs on this rank's shards.

That is right for elementwise optimizers, whose state is a number or a tensor like the parameter.
"""

from __future__ import annotations

from typing import Any

import torch

from zerocore import _core
from zerocore._device import Host
from zerocore._exchange import gather_json
from zerocore.errors import UnsupportedError

# Those of torch that look at whole matrices, at all parameters, or at gradients of another kind.
_NOT_ELEMENTWISE = tuple(
    getattr(torch.optim, name) for name in ("Adafactor", "LBFGS", "Muon", "SparseAdam") if hasattr(torch.optim, name)
)
_ELEMENTS = "elements"  # a state like the parameter, in what ranks tell each other


def check(source: torch.optim.Optimizer, name: str) -> None:
    """Refuses an optimizer that cannot run on shards.

    Raises:
        UnsupportedError: it is known not to be elementwise, or holds state already.
    """
    if isinstance(source, _NOT_ELEMENTWISE):
        raise UnsupportedError(
            f"[optimizer] got {name}, expected an optimizer that treats each element alike: this one needs whole "
            'parameters, and would compute something else on shards. Use another one; "muon" is one of the config\'s.'
        )
    if source.state:
        raise UnsupportedError(
            f"[optimizer] {name} already holds state of {len(source.state)} parameters, expected a fresh optimizer "
            "that makes its state in its first step: it will run on shards."
        )


class ForeignOptimizer:
    """Steps a torch optimizer over 1-D views of the masters that this rank owns.

    Args:
        params: (the core's number, name, parameter) of each parameter that is trained.
    """

    def __init__(
        self,
        source: torch.optim.Optimizer,
        core: _core.StepEngine,
        params: list[tuple[int, str, torch.nn.Parameter]],
        device: Host,
    ) -> None:
        self._source = source
        self._core = core
        self._names = {index: name for index, name, _ in params}
        self._index_of = {id(param): index for index, _, param in params}
        self._shards: dict[int, torch.nn.Parameter] = {}
        self._grads: dict[int, torch.Tensor] = {}
        self._begins: dict[int, int] = {}
        for index, _, _ in params:
            begin, end = core.owned_range(index, _core.StateKind.master)
            if begin < end:
                self._begins[index] = begin
                master = _own(device, core.state_memory(index, _core.StateKind.master, begin, end))
                self._shards[index] = shard = torch.nn.Parameter(master)
                shard._zc_core = core  # type: ignore[attr-defined]  # the source keeps the shard
                self._grads[index] = _own(device, core.state_memory(index, _core.StateKind.grad, begin, end))

    def step(self) -> None:
        """One step of the parameters that were used, from the gradients in the core's accumulators. Local."""
        used = self._core.used_params()
        groups = self._source.param_groups
        whole = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = [
                    self._shards[index]
                    for index in (self._index_of.get(id(param)) for param in group["params"])
                    if index is not None and index in self._shards
                ]
            for index, shard in self._shards.items():
                shard.grad = self._grads[index] if used[index] else None
            self._source.step()
        finally:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params
            for shard in self._shards.values():
                shard.grad = None

    def bytes(self) -> int:
        """What its state takes."""
        tensors = [v for state in self._source.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        return sum(each.numel() * each.element_size() for each in tensors)

    # Checkpoints

    def describe(self, comm: _core.Communicator) -> dict[int, tuple[list[str], dict[str, Any]]]:
        """What there is of each parameter's state: the names of tensors, and numbers with their dtypes. Collective.

        Raises:
            UnsupportedError: on all ranks, when a state is neither.
        """
        mine: dict[str, Any] = {}
        for index, shard in self._shards.items():
            state = self._source.state.get(shard, {})
            mine[str(index)] = {name: _plain(value, shard) for name, value in state.items()}
        merged: dict[str, Any] = {}
        for rank, theirs in enumerate(gather_json(comm, mine, "save_checkpoint")):
            for index, state in theirs.items():
                for name, value in state.items():
                    if value is None:
                        raise UnsupportedError(
                            f"[ckpt] save_checkpoint: the optimizer's state {name!r} of {self._names[int(index)]} is "
                            "neither a number nor an fp32 tensor of the parameter's shape, so it cannot be saved. Use "
                            "another optimizer."
                        )
                if merged.setdefault(index, state) != state:
                    raise UnsupportedError(
                        f"[ckpt] save_checkpoint: the optimizer's state of {self._names[int(index)]}: got {state} on "
                        f"rank {rank} and {merged[index]} on another one, expected the same numbers: it is not "
                        "elementwise. Use another optimizer."
                    )
        return {
            int(index): (
                [name for name, value in state.items() if value == _ELEMENTS],
                {name: tuple(value) for name, value in state.items() if value != _ELEMENTS},
            )
            for index, state in merged.items()
        }

    def memory(self, index: int, name: str, begin: int, end: int) -> tuple[int, int]:
        """Where elements [begin, end) of a parameter's state lie: (address, bytes). This rank must own them."""
        if begin == end:
            return 0, 0
        state = self._source.state[self._shards[index]][name]
        return state.data_ptr() + (begin - self._begins[index]) * 4, (end - begin) * 4

    def new_state(self, index: int, tensors: list[str], numbers: dict[str, Any]) -> dict[str, Any]:
        """A parameter's state as describe() told of it, its tensors yet to be filled; empty without elements here."""
        if index not in self._shards:
            return {}
        state: dict[str, Any] = {name: torch.zeros_like(self._shards[index].detach()) for name in tensors}
        for name, (dtype, value) in numbers.items():
            state[name] = value if dtype is None else torch.tensor(value, dtype=getattr(torch, dtype))
        return state

    def set_state(self, index: int, state: dict[str, Any]) -> None:
        """Replaces a parameter's state by a new_state(); an empty one is that before the first step."""
        if index in self._shards:
            self._source.state.pop(self._shards[index], None)
            if state:
                self._source.state[self._shards[index]] = state


def _own(device: Host, memory: tuple[int, int]) -> torch.Tensor:
    """A tensor over the core's memory, which lives as long as the core's engine."""
    address, num_bytes = memory
    return device.tensor_at(address, torch.float32, num_bytes)


def _plain(value: Any, shard: torch.Tensor) -> Any:
    """A state as ranks tell each other of it: _ELEMENTS, [dtype or None, number]; None: something else."""
    if isinstance(value, torch.Tensor):
        if value.dim() == 0:
            return [str(value.dtype).removeprefix("torch."), value.item()]
        alike = value.shape == shard.shape and value.dtype == torch.float32 and value.is_contiguous()
        return _ELEMENTS if alike else None
    return [None, value] if isinstance(value, (bool, int, float)) else None

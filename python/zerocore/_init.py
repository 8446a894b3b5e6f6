"""Parameters that are sharded as their modules are constructed."""

from __future__ import annotations

import itertools
import threading
from collections.abc import MutableMapping
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from zerocore import _core, _released, _tensor
from zerocore._other_state import broadcast
from zerocore.errors import ConfigError

_WAY_OUT = (
    "Outside `with zerocore.zero.Init():` read or write it inside `with zerocore.zero.GatheredParameters([parameter], "
    "modifier_rank=0):`, on every rank, or hand the model to an engine."
)

_PLAIN_USES = 2  # references to a parameter's storage: its own and the one that asks

open_inits: list[Any] = []  # innermost last


class InitShards(_released.NotPickled):
    """The home of parameters between their construction and the engine: each is cut evenly over the ranks.

    Args:
        dtype: what floating-point parameters are kept in; None: their own.
    """

    def __init__(self, comm: _core.Communicator, dtype: torch.dtype | None) -> None:
        self.comm = comm
        self.is_open = False
        self._dtype = dtype
        self._shards: MutableMapping[torch.Tensor, torch.Tensor] = WeakTensorKeyDictionary()
        self._names: MutableMapping[torch.Tensor, str] = WeakTensorKeyDictionary()
        self._order: MutableMapping[torch.Tensor, tuple[int, str]] = WeakTensorKeyDictionary()  # the same on all ranks
        self._numbers: Any = WeakIdKeyDictionary()  # of modules, in order of construction
        self._next_number = itertools.count()
        self._thread = threading.current_thread()
        # Whole at the moment, each with the module that is being constructed around it, if any.
        self._whole: dict[int, tuple[torch.nn.Parameter, torch.nn.Module | None]] = {}

    # While modules are constructed

    def new_param(self, module: torch.nn.Module, name: str, param: torch.nn.Parameter) -> None:
        """`module` has got a parameter; it is sharded when something else is constructed."""
        number = self._number_of(module)
        unfit = param.dtype not in _tensor.DTYPES or param.device.type != "cpu" or param.numel() == 0
        if param in self._shards or unfit:
            return
        self._check_thread(f"got parameter {name} of a {type(module).__name__}")
        if not _fills_a_gap(module, name, param):
            self.shard_all(but_of=module)
        if id(param) not in self._whole and param not in self._shards:  # one that is tied was known before
            self._names[param] = f"{type(module).__name__}.{name}"
            self._order[param] = (number, name)
            self._whole[id(param)] = (param, module)

    def _number_of(self, module: torch.nn.Module) -> int:
        if module not in self._numbers:
            self._numbers[module] = next(self._next_number)
        number: int = self._numbers[module]
        return number

    def _check_thread(self, got: str) -> None:
        thread = threading.current_thread()
        if self.is_open and thread is not self._thread:
            raise ConfigError(
                f"[zero] Init: {got} in thread {thread.name}, expected all of them in {self._thread.name}, which "
                "opened the block: ranks must shard and gather in one order. Build and load the model in that thread; "
                "for Hugging Face unset HF_ENABLE_PARALLEL_LOADING."
            )

    def shard_all(self, *, but_of: torch.nn.Module | None = None, used: set[int] | None = None) -> None:
        """Shards what is whole, except the parameters of one module and those whose storage is in use."""
        for param, module in sorted(self._whole.values(), key=lambda entry: self._order[entry[0]]):
            if (but_of is not None and module is but_of) or (used and param.untyped_storage()._cdata in used):
                continue
            storage = param.untyped_storage()
            if self.is_open and torch._C._storage_Use_Count(storage._cdata) > _PLAIN_USES:
                continue  # somebody holds a view: later
            self._shard(param)

    def _shard(self, param: torch.nn.Parameter) -> None:
        """Every rank keeps its part of rank 0's values. Collective."""
        with torch.no_grad():
            values = param.detach()
            if not _tensor.is_dense(values):
                values = values.contiguous()
            if self._dtype is not None:
                values = values.to(self._dtype)
            if self.comm.rank > 0 and not values.untyped_storage().resizable():
                values = values.clone()  # what is received must not go into the memory of others: a mapped file
            broadcast([values], self.comm, f"shard parameter {self._names[param]}")
            flat = values.as_strided((values.numel(),), (1,))
            numel = self._shard_numel(param)
            first = min(self.comm.rank * numel, flat.numel())
            memory = self.comm.allocate(numel * values.element_size())
            shard = torch.frombuffer(memory, dtype=values.dtype, count=numel)
            part = flat[first : first + numel]
            shard[: part.numel()] = part
            self._shards[param] = shard
            # Storage of its own, which can be emptied and refilled; the engine may find the strides it had.
            own = torch.empty(numel * self.comm.size, dtype=values.dtype)
            param.data = _tensor.shaped(own[: values.numel()], values)
        self._whole.pop(id(param), None)
        _released.set_home(param, self)
        _released.mark_released(param)
        own.untyped_storage().resize_(0)

    def _make_whole(self, param: torch.nn.Parameter) -> None:
        """Gathers the parameter's values into its storage. Collective."""
        shard = self._shards.pop(param)
        _released.mark_whole(param)
        storage = param.untyped_storage()
        storage.resize_(shard.numel() * self.comm.size * shard.element_size())
        flat = torch.empty(0, dtype=shard.dtype).set_(storage, 0, (shard.numel() * self.comm.size,))  # type: ignore[call-overload]
        first = self.comm.rank * shard.numel()
        flat[first : first + shard.numel()] = shard
        self.comm.all_gather(_tensor.view(flat), f"gather parameter {self._names[param]}").wait()
        self._whole[id(param)] = (param, None)

    def _shard_numel(self, param: torch.nn.Parameter) -> int:
        return -(-param.numel() // self.comm.size)

    # Home

    def name_of(self, param: torch.nn.Parameter) -> str:
        return self._names[param]

    def use_while_released(self, given: list[Any], operation: str) -> None:
        if not self.is_open:
            raise _released.refuse(given, operation, _WAY_OUT)
        wanted = _released.released_in(given)
        self._check_thread(f"got {operation} of {wanted[0]!r}")
        used = {
            tensor.untyped_storage()._cdata
            for tensor in _tensor.tensors_in(given)
            if not isinstance(tensor, _released.Released) and tensor.layout is torch.strided
        }
        self.shard_all(used=used)
        for param in wanted:
            if isinstance(param, _released.Released):  # not yet, if it stands twice among them
                self._make_whole(param)

    def hold_param(self, param: torch.nn.Parameter) -> None:
        if isinstance(param, _released.Released):
            self._make_whole(param)

    def drop_param(self, param: torch.nn.Parameter) -> None:
        self._shard(param)

    def forget(self, param: torch.nn.Parameter) -> None:
        self._shards.pop(param, None)
        self._whole.pop(id(param), None)


def _fills_a_gap(module: torch.nn.Module, name: str, param: torch.nn.Parameter) -> bool:
    """Whether Hugging Face's from_pretrained() makes a parameter that the checkpoint lacks.

    It does so in an order that differs between ranks, so that nothing can be sharded meanwhile.
    """
    before = module._parameters.get(name)
    return before is not None and before.is_meta and not getattr(param, "_is_hf_initialized", False)

"""Parameters whose values are elsewhere: they keep shape, dtype and numel, and refuse every other use.

Note: a released parameter is made by switching its class and emptying its storage, in place. Whoever holds it (the
module, an optimizer, autograd) holds the same object before and after. An emptied storage alone would not do: many
operations read through it and return garbage, or crash.
"""

from __future__ import annotations

import copy
import enum
import functools
from typing import Any, Protocol

import torch

from zerocore import _tensor
from zerocore.errors import Error

_READ_ATTRIBUTES = (
    "shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "is_leaf", "grad", "grad_fn",
    "retains_grad", "output_nr", "names", "is_cpu", "is_cuda", "is_sparse", "is_sparse_csr", "is_quantized", "is_meta",
    "is_mkldnn", "is_nested", "is_mps", "is_xla", "is_xpu", "is_ipu", "is_vulkan", "is_maia", "is_mtia", "_version",
    "_backward_hooks", "_post_accumulate_grad_hooks", "grad_dtype",
)  # fmt: skip
_WRITTEN_ATTRIBUTES = ("requires_grad", "grad", "_backward_hooks", "_post_accumulate_grad_hooks")
_METHODS = (
    "size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "is_contiguous", "is_floating_point",
    "is_complex", "is_signed", "is_inference", "get_device", "requires_grad_", "register_hook",
    "register_post_accumulate_grad_hook", "new_empty", "new_zeros", "new_ones", "new_full", "__len__", "__hash__",
)  # fmt: skip
_FUNCTIONS = (
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "numel",
    "is_floating_point", "is_complex", "is_tensor",
)  # fmt: skip


def _allowed() -> set[Any]:
    found = {getattr(torch.Tensor, name).__get__ for name in _READ_ATTRIBUTES if hasattr(torch.Tensor, name)}
    found |= {getattr(torch.Tensor, name).__set__ for name in _WRITTEN_ATTRIBUTES if hasattr(torch.Tensor, name)}
    found |= {getattr(torch.Tensor, name) for name in _METHODS if hasattr(torch.Tensor, name)}
    return found | {getattr(torch, name) for name in _FUNCTIONS}


_ALLOWED = _allowed()

# Whether detach(), and so a module's state_dict(), gives a tensor that goes on refusing where it would refuse itself.
# For libraries that ask a sharded model's state dict for names and shapes (compat.py).
detach_keeps_refusing = False


class Home(Protocol):
    """Where the values of released parameters are."""

    def name_of(self, param: torch.nn.Parameter) -> str: ...

    def use_while_released(self, given: list[Any], operation: str) -> None:
        """Somebody uses released parameters of this home, among `given`: makes them whole, or raises."""

    def hold_param(self, param: torch.nn.Parameter) -> None:
        """Makes the parameter whole until drop_param(). Collective."""

    def drop_param(self, param: torch.nn.Parameter) -> None: ...

    def forget(self, param: torch.nn.Parameter) -> None:
        """The released parameter gets another home."""


class NotPickled:
    """What hangs on a parameter but must not be saved with it."""

    def __reduce__(self) -> Any:
        return type(None), ()


def home_of(param: torch.nn.Parameter) -> Home | None:
    """The home of a parameter that may be released at times; None for a plain one."""
    return getattr(param, "_zc_home", None)


def set_home(param: torch.nn.Parameter, home: Home | None) -> None:
    """Gives a parameter a home, in place of one it may have."""
    before = home_of(param)
    if before is not None and before is not home:
        before.forget(param)
    param._zc_home = home  # type: ignore[attr-defined]


class ZeroParamStatus(enum.Enum):
    """Where a parameter's values are: DeepSpeed's names."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class Released(torch.nn.Parameter):
    """The behaviour that a released parameter's class adds to its own."""

    _zc_class: type  # its own
    _zc_home: Home

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _ALLOWED:
            if func is torch.Tensor.detach and detach_keeps_refusing:
                return args[0]._detached()
            given = [*args, *kwargs.values()]
            for home in {id(p._zc_home): p._zc_home for p in released_in(given)}.values():
                home.use_while_released(given, _name_of(func))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def _detached(self) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            alias = self.detach()
        alias.__class__ = _released_class(torch.Tensor)
        alias._zc_home = _Detached(self)  # type: ignore[attr-defined]
        return alias

    # What code for DeepSpeed reads to see whether a parameter must be gathered first.

    @property
    def ds_id(self) -> int:
        return id(self)

    @property
    def ds_status(self) -> ZeroParamStatus:
        return ZeroParamStatus.NOT_AVAILABLE

    @property
    def ds_shape(self) -> torch.Size:
        return self.shape

    @property
    def ds_numel(self) -> int:
        return self.numel()

    def __deepcopy__(self, memo: Any) -> Any:
        self._zc_home.use_while_released([self], "copy.deepcopy()")
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._zc_home.use_while_released([self], "pickling, as torch.save() does,")
        return self.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"released parameter {self._zc_home.name_of(self)} of shape {tuple(self.shape)}, {self.dtype}"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


class _Detached(NotPickled):
    """The home of what detach() has made of a released parameter, and which stays released."""

    def __init__(self, param: Released) -> None:
        self._name = param._zc_home.name_of(param)

    def name_of(self, param: torch.nn.Parameter) -> str:
        return self._name

    def use_while_released(self, given: list[Any], operation: str) -> None:
        raise refuse(given, operation, "Take values from engine.state_dict(), on every rank.")


def _name_of(func: Any) -> str:
    """What the user wrote to get here, about."""
    name = getattr(func, "__name__", str(func))
    return f".{func.__self__.__name__}" if name in ("__get__", "__set__", "__delete__") else f"{name}()"


@functools.cache
def _released_class(cls: type) -> type:
    return type(cls)(f"Released{cls.__name__}", (Released, cls), {"__module__": __name__, "_zc_class": cls})


def released_in(values: Any) -> list[Released]:
    """The released parameters among `values`, looking into containers."""
    return [tensor for tensor in _tensor.tensors_in(values) if isinstance(tensor, Released)]


# Note: type(param) instead of isinstance(), for which torch.nn.Parameter's metaclass takes a microsecond.


def mark_released(param: torch.nn.Parameter) -> None:
    """Makes every use but that of its shape an error. The caller empties the storage."""
    cls = type(param)
    if "_zc_class" not in cls.__dict__:
        param.__class__ = _released_class(cls)


def mark_whole(param: torch.nn.Parameter) -> None:
    """Gives a released parameter its own class back. The caller has filled the storage."""
    own = type(param).__dict__.get("_zc_class")
    if own is not None:
        param.__class__ = own


def refuse(given: list[Any], operation: str, way_out: str) -> Error:
    """The error for a use of the released parameters among `given`."""
    param = released_in(given)[0]
    return Error(
        f"[zero] {param!r}: its values are spread over the ranks; got {operation}, expected a use inside the forward "
        f"of the module it belongs to. {way_out}"
    )

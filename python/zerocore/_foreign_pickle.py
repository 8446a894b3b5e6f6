"""Files of torch.save, read without running anything that stands in them.

A pickle names functions and classes to call. Here only those that build tensors and plain containers are what they are
called; for every other name there is a stand-in that keeps what it is given and does nothing. So a checkpoint full of
DeepSpeed's own objects is read without DeepSpeed, and a pickle that names os.system gives a stand-in.
"""

from __future__ import annotations

import collections
import pickle
import types
import zipfile
from pathlib import Path
from typing import Any

import torch

from zerocore._files import named_errors
from zerocore.errors import CheckpointError, IoError, UnsupportedError


class StandIn:
    """An object of a class, or what a function would have returned, that is not known here.

    Attributes:
        called: the name in the pickle.
        arguments: what it was called with.
        state: its attributes, where it has any.
    """

    called = ""
    arguments: tuple[Any, ...]
    state: dict[str, Any]

    def __new__(cls, *arguments: Any, **keywords: Any) -> StandIn:
        self = super().__new__(cls)
        self.arguments = arguments
        self.state = keywords
        return self

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def __call__(self, *arguments: Any, **keywords: Any) -> StandIn:
        return StandIn(*arguments, **keywords)

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):  # (dict, slots)
            if isinstance(part, dict):
                self.state.update(part)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Items of an unknown container are not kept."""

    def append(self, value: Any) -> None:
        """Elements of an unknown container are not kept."""

    def extend(self, values: Any) -> None:
        """Elements of an unknown container are not kept."""

    def add(self, value: Any) -> None:
        """Elements of an unknown container are not kept."""


def _reconstructor(kind: Any, base: Any, state: Any) -> Any:
    """copyreg's, for stand-ins: an object of class `kind`, whose attributes follow."""
    return kind() if isinstance(kind, type) and issubclass(kind, StandIn) else StandIn(kind, base, state)


def _tensor_of_type(build: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """torch's, for a tensor of a subclass or with attributes: the plain tensor."""
    return build(*arguments)


def _parameter(data: Any, *settings: Any) -> Any:
    """torch's, for a parameter: its tensor."""
    return data


_ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("copyreg", "_reconstructor"): _reconstructor,
    ("torch", "Size"): torch.Size,
    ("torch._tensor", "_rebuild_from_type_v2"): _tensor_of_type,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return type(name, (StandIn,), {"called": f"{module}.{name}"})


_as_pickle_module = types.SimpleNamespace(Unpickler=_Unpickler, __name__=__name__)


def load(path: Path) -> Any:
    """What torch.save() wrote. Tensors are mapped, not read; storages that do not fit the file are an error.

    Raises:
        CheckpointError: it is damaged.
        UnsupportedError: it has torch's format from before version 1.6, or is TorchScript.
        IoError: it cannot be read.
    """
    try:
        with named_errors(path, area="import"), zipfile.ZipFile(path) as archive:
            names = [name.rpartition("/")[2] for name in archive.namelist()]
    except zipfile.BadZipFile:
        raise CheckpointError(
            f"[import] {path} is damaged, or older than torch 1.6: it is no zip file, expected what torch.save() "
            "writes. Load it with the torch that wrote it and save it again."
        ) from None
    if "data.pkl" not in names or "constants.pkl" in names:
        raise UnsupportedError(
            f"[import] {path}: got another zip file or TorchScript, expected what torch.save() writes."
        )
    try:
        with named_errors(path, area="import"):
            return torch.load(
                str(path), map_location="cpu", pickle_module=_as_pickle_module, weights_only=False, mmap=True
            )
    except IoError:
        raise
    except Exception as error:  # whatever nonsense in a pickle leads to
        raise CheckpointError(f"[import] {path} is damaged: {type(error).__name__}: {error}") from None

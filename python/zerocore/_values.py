"""Python values as the JSON types that a manifest holds, and back."""

from __future__ import annotations

import ctypes
import hashlib
import json
import numbers
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from zerocore.errors import CheckpointError, ConfigError

_TENSOR = "$tensor"  # stands in a client state where a tensor was
_TUPLE, _ITEMS, _COUNTER = "$tuple", "$items", "$counter"  # stand in a state where JSON has no such type


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

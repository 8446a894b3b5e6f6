"""Hooks on modules that a copied or pickled model does not take along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class ModuleHook:
    """Calls a function, but does nothing in copies of the module it hangs on."""

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return None if self._call is None else self._call(*args)

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        return ModuleHook, ()

"""What the parts of Engine, each a base class in a file of its own, find in it."""

from __future__ import annotations

import torch

from zerocore import _core
from zerocore._params import ModelParams
from zerocore.config import ResolvedConfig


class EnginePart(torch.nn.Module):
    """A part of Engine, which has what is declared here."""

    module: torch.nn.Module
    config: ResolvedConfig
    comm: _core.Communicator
    _params: ModelParams

    @property
    def rank(self) -> int:
        raise NotImplementedError

    def _check_all_here(self, call: str) -> None:
        raise NotImplementedError

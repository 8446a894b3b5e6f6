"""The engine's calls that give or take the whole model, whatever its stage keeps of it where."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import _IncompatibleKeys

from zerocore import zero
from zerocore._engine_state import Names, extra_names, hand_out, is_extra, plain_name
from zerocore._model_file import ModelFile
from zerocore._part import EnginePart
from zerocore.errors import ConfigError

logger = logging.getLogger("zerocore")


class WholeModel(EnginePart):
    """unsharded(), state_dict() and their like."""

    def unsharded(
        self, module: torch.nn.Module | None = None, *, modifier_rank: int | None = None
    ) -> zero.GatheredParameters:
        """A block in which all parameters of `module`, by default of the whole model, are whole. Collective.

        It takes the memory of all of them on every rank. See zero.GatheredParameters for `modifier_rank`.
        """
        return zero.GatheredParameters(self.module if module is None else module, modifier_rank=modifier_rank)

    def state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:  # type: ignore[override]
        """Copies of what a state dict of the plain model would hold, under the same names. Collective.

        Parameters are gathered one unit after the other, so that beside the result only one unit is whole. They are in
        the dtype in which they are kept.

        Args:
            rank0_only: the other ranks take part and get an empty dict.
        """
        self._check_all_here("state_dict")
        found: dict[str, Any] = self.module.state_dict(keep_vars=True)
        values: dict[int, torch.Tensor] = {}
        for key, value in self._params.copies(v for v in found.values() if isinstance(v, torch.Tensor)):
            if self.rank == 0 or not rank0_only:
                values[key] = value
        if rank0_only and self.rank != 0:
            return {}
        return {name: values.get(id(value), value) for name, value in found.items()}

    def iter_state_dict(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of state_dict() one by one, for a model that is larger than a rank's memory. Collective.

        Every rank must go through all of them. A tied tensor comes once for each of its names.
        """
        self._check_all_here("iter_state_dict")
        names: dict[int, list[str]] = {}
        tensors = {name: v for name, v in self.module.state_dict(keep_vars=True).items() if isinstance(v, torch.Tensor)}
        for name, value in tensors.items():
            names.setdefault(id(value), []).append(name)
        for key, value in self._params.copies(tensors.values()):
            for name in names[key]:
                yield name, value

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads what state_dict() has returned, or the plain model's; rank 0's values count. Collective.

        Masters take the values as they are given, unrounded. The optimizer's state stays. What get_extra_state() of a
        module gave is handed to its set_extra_state(), each rank's own.

        Args:
            strict: names that are missing or unexpected are an error.

        Returns:
            The names that were missing, and those that were not expected, as torch's does.
        """
        if assign:
            raise ConfigError("[engine] load_state_dict: got assign=True, expected False: values are copied.")
        self._check_all_here("load_state_dict")
        own = self.module.state_dict(keep_vars=True)
        extra = extra_names(self.module)
        expected = dict.fromkeys(name for name in own if not is_extra(name) or plain_name(name) in extra)
        expected |= dict.fromkeys(sorted(extra - {plain_name(name) for name in expected}))  # set, and never got
        missing = [name for name in expected if name not in state_dict]
        unexpected = [name for name in state_dict if name not in expected]
        if strict and (missing or unexpected):
            raise ConfigError(
                f"[engine] load_state_dict: got {len(unexpected)} names that the model does not have (first "
                f"{unexpected[:3]}) and no value for {len(missing)} (first {missing[:3]}), expected the model's own "
                "names. Load a state of this model, or pass strict=False."
            )
        given = [name for name in expected if name in state_dict]
        tensors = {name: own[name] for name in given if not is_extra(name) and isinstance(own[name], torch.Tensor)}
        for name, target in tensors.items():
            value = state_dict[name]
            if tuple(value.shape) != tuple(target.shape):
                raise ConfigError(
                    f"[engine] load_state_dict: {name}: got shape {tuple(value.shape)}, expected "
                    f"{tuple(target.shape)}. Load a state of this model."
                )
        made = {plain_name(name): state_dict[name] for name in given if name not in tensors}
        made_tensors = Names(self.module).made
        for name, target in tensors.items():
            self._params.load(target, state_dict[name])
            if plain_name(name) in made_tensors:  # the module keeps it as something else
                made[plain_name(name)] = target
        for _, take, value in hand_out(self.module, made):
            take(value)
        return _IncompatibleKeys(missing, unexpected)

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Saves the model's weights and buffers in one file, in the dtype in which it is used. Collective.

        Rank 0 writes what is gathered unit by unit. A name that ends in .safetensors gives safetensors, written tensor
        by tensor, in which a tied tensor stands once, under its first name; any other gives torch.save's format, for
        which rank 0 holds all of it. From a checkpoint, `zerocore export` makes the same without a job.

        Args:
            save_dir: made if need be.
            save_filename: the file in it; one that stands is replaced when the new one is whole.
            exclude_frozen_parameters: leave out what is not trained.

        Returns:
            False, with a warning, when nothing was saved: in stage 3 without `zero.gather_16bit_weights_on_save`.

        Raises:
            IoError: on every rank, when it could not be written.
        """
        path = Path(save_dir) / save_filename
        if self.config.zero.stage == 3 and not self.zero_gather_16bit_weights_on_model_save():
            if self.rank == 0:
                logger.warning(
                    "[engine] save_16bit_model: %s was not saved: in stage 3 it takes "
                    "zero.gather_16bit_weights_on_save=True (zero_optimization."
                    "stage3_gather_16bit_weights_on_model_save).",
                    path,
                )
            return False
        ModelFile(self, exclude_frozen=exclude_frozen_parameters).save(path)
        return True

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether save_16bit_model() gathers the weights in stage 3."""
        return self.config.zero.gather_16bit_weights_on_save

    # What Accelerate calls, in any stage: a state dict of the whole model on rank 0, None on the others. Collective.

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        return ModelFile(self, exclude_frozen=exclude_frozen_parameters).gather()

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

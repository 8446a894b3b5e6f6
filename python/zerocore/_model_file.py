"""A model's weights whole on rank 0, gathered unit by unit: as a state dict, or in one file."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zerocore import _core
from zerocore._engine_state import dtype_name, plain_name
from zerocore._exchange import gather_json
from zerocore._files import named_errors
from zerocore._safetensors import Writer
from zerocore.errors import IoError

if TYPE_CHECKING:
    from zerocore._whole_model import WholeModel

logger = logging.getLogger("zerocore")


class ModelFile:
    """What a state dict of the model would hold, in the dtype in which the model is used. Collective.

    Args:
        exclude_frozen: without the parameters that the engine does not train, as save_checkpoint() leaves them out.
    """

    def __init__(self, engine: WholeModel, *, exclude_frozen: bool) -> None:
        self._engine = engine
        self._tensors: dict[str, torch.Tensor] = {}  # the model's own, by name; a tied one under each of its names
        self._others: dict[str, Any] = {}
        for name, value in engine.module.state_dict(keep_vars=True).items():
            if not isinstance(value, torch.Tensor):
                self._others[plain_name(name)] = value
            elif not (
                exclude_frozen and isinstance(value, torch.nn.Parameter) and not engine._params.is_trained(value)
            ):
                self._tensors[plain_name(name)] = value
        self._names: dict[int, list[str]] = {}
        for name, tensor in self._tensors.items():
            self._names.setdefault(id(tensor), []).append(name)

    def gather(self) -> dict[str, Any] | None:
        """All of it on rank 0, None on the others. Tied tensors are one."""
        keeps = self._engine.rank == 0
        values = {key: copy for key, copy in self._copies() if keeps}
        return self._named(values) if keeps else None

    def save(self, path: Path) -> None:
        """Rank 0 writes it: as safetensors, one tensor after the other, where the name says so, else by torch.save.

        The file appears whole or not at all.

        Raises:
            IoError: on every rank, when it could not be written.
            UnsupportedError: safetensors have no such dtype.
        """
        engine = self._engine
        listed = self._listed() if path.suffix == ".safetensors" else None
        copies = self._copies()
        failure = None
        if engine.rank == 0:
            try:
                with named_errors(path):
                    self._write(path, copies, listed)
            except IoError as error:
                failure = [error.errno, str(error)]
        for _ in copies:  # the other ranks take part, and rank 0 where it could not go on writing
            pass
        failure = gather_json(engine.comm, failure, "save_16bit_model")[0]
        if failure is not None:
            raise IoError(failure[0], failure[1])

    def _listed(self) -> list[tuple[str, str, tuple[int, ...]]]:
        return [
            (names[0], dtype_name(self._dtype(names[0]), names[0]), tuple(self._tensors[names[0]].shape))
            for names in self._names.values()
        ]

    def _write(
        self,
        path: Path,
        copies: Iterator[tuple[int, torch.Tensor]],
        listed: list[tuple[str, str, tuple[int, ...]]] | None,
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.saving")
        temporary.unlink(missing_ok=True)  # of a save that was killed
        try:
            if listed is None:
                write_pickle(temporary, self._named(dict(copies)))
            else:
                self._write_safetensors(temporary, copies, listed)
            os.replace(temporary, path)
            _core.sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)

    def _write_safetensors(
        self,
        path: Path,
        copies: Iterator[tuple[int, torch.Tensor]],
        listed: list[tuple[str, str, tuple[int, ...]]],
    ) -> None:
        if self._others:
            logger.warning("[engine] %s: not written, for it is no tensor: %s", path, ", ".join(self._others))
        metadata = {"format": "pt"} | {tie: names[0] for names in self._names.values() for tie in names[1:]}
        with Writer(path, listed, metadata) as writer:
            for key, copy in copies:
                dense = copy.contiguous()
                if num_bytes := dense.numel() * dense.element_size():
                    data = (ctypes.c_char * num_bytes).from_address(dense.data_ptr())
                    writer.write(self._names[key][0], 0, memoryview(data))

    def _named(self, values: dict[int, torch.Tensor]) -> dict[str, Any]:
        return {name: values[id(tensor)] for name, tensor in self._tensors.items()} | self._others

    def _dtype(self, name: str) -> torch.dtype:
        params, tensor = self._engine._params, self._tensors[name]
        index = params.find(tensor)
        return tensor.dtype if index is None else params.used_dtype(index)

    def _copies(self) -> Iterator[tuple[int, torch.Tensor]]:
        for key, copy in self._engine._params.copies(self._tensors.values()):
            yield key, copy.to("cpu", self._dtype(self._names[key][0]))


def write_pickle(path: Path, values: dict[str, Any]) -> None:
    """torch.save(), to the disk."""
    with open(path, "wb") as file:
        try:
            torch.save(values, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # torch ends the file even so, and complains about that
                raise error.__context__ from None
            raise
        file.flush()
        os.fsync(file.fileno())

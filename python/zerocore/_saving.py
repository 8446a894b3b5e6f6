"""The engine's calls that save and load checkpoints."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from zerocore._accumulation import Accumulation
from zerocore._checkpoint import Checkpoints, Loaded
from zerocore._part import EnginePart
from zerocore._restore import What
from zerocore.errors import ConfigError

logger = logging.getLogger("zerocore")


class Saving(EnginePart):
    """save_checkpoint(), load_checkpoint(), resume()."""

    _accumulation: Accumulation
    _checkpoints: Checkpoints

    def _check_whole(self) -> None:
        raise NotImplementedError

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> str:
        """Saves all that resuming needs to `save_dir/tag`, which then exists whole or not at all. Collective.

        It loads on any number of ranks and in any stage. With `checkpoint.async_save` it returns when the state is
        copied, and a thread writes; its failure is raised by the next save, `wait_for_checkpoint()` or `close()`.
        docs/checkpoints.md has the format.

        Args:
            save_dir: a folder that all ranks see; made if need be.
            tag: the checkpoint's folder in it; by default global_step<N>. One that stands already is replaced.
            client_state: what the user wants back from load_checkpoint(): JSON types and tensors. Rank 0's counts.
            save_latest: let the file `save_dir/latest` name this checkpoint.
            exclude_frozen_parameters: leave out what is not trained; for adapters on a model that is kept elsewhere.

        Returns:
            The checkpoint's folder.

        Raises:
            ConfigError: in the middle of a step, or with a client state of other types.
            IoError: on every rank, when one of them could not write: errno says why. What was saved before stands,
                and training can go on.
        """
        self._check_all_here("save_checkpoint")
        if self._params.gradients.in_micro_step or self._accumulation.micro_steps > 0:
            raise ConfigError(
                f"[ckpt] save_checkpoint: got a call with gradients of {self._accumulation.micro_steps} micro-steps "
                "pending, expected one right after a step() that updates. Save on an accumulation boundary."
            )
        self._check_whole()
        path = self._checkpoints.save(
            save_dir,
            tag=tag,
            client_state={} if client_state is None else client_state,
            save_latest=save_latest,
            exclude_frozen=exclude_frozen_parameters,
        )
        return str(path)

    def wait_for_checkpoint(self) -> None:
        """Waits until the last save_checkpoint() is on disk. Collective.

        Raises:
            IoError: it could not be written.
        """
        self._checkpoints.wait()

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
        *,
        strict: bool = False,
    ) -> Loaded:
        """Loads a checkpoint, saved on any number of ranks and in any stage. Collective.

        Each rank reads what it keeps; all that is read is checked. Without a tag it is the one that `load_dir/latest`
        names, or the newest; one that is damaged is named in a warning and the one before it is loaded. What is in the
        checkpoint or the model but not in both is listed in a warning.

        Args:
            tag: load this one and no other.
            load_module_strict: parameters or buffers that are missing, unexpected or of another shape are an error.
            load_optimizer_states: moments, step counts, hyperparameters and loss scale too.
            load_lr_scheduler_states: the scheduler too.
            load_module_only: parameters and buffers only: no counters, optimizer, scheduler, data position.
            custom_load_fn: called as custom_load_fn(src=state dict, dst=module) to load the parameters, on all ranks,
                the model whole; rank 0's values count.
            strict: anything that is damaged or not loaded is an error.

        Returns:
            (folder of the checkpoint, client state); (None, None) where there is no checkpoint.

        Raises:
            CheckpointError: it is damaged; or all are.
            ConfigError: it does not fit the model.
            IoError: reading failed.
        """
        self._check_all_here("load_checkpoint")
        if self._params.gradients.in_micro_step:
            raise ConfigError(
                "[ckpt] load_checkpoint: got a call between backward() and step(), expected one outside of a "
                "micro-step. Call zero_grad() or step() first."
            )
        what = What(
            module_strict=load_module_strict,
            optimizer_states=load_optimizer_states and not load_module_only,
            scheduler_states=load_lr_scheduler_states and not load_module_only,
            counters=not load_module_only,
            custom_load_fn=custom_load_fn,
            strict=strict,
        )
        loaded = self._checkpoints.load(load_dir, tag=tag, what=what)
        if loaded.path is None and self.rank == 0:
            logger.warning("[ckpt] load_checkpoint: got no checkpoint in %s, nothing was loaded.", load_dir)
        return loaded

    def resume(
        self, dir: str | os.PathLike[str], *, client_state: Callable[[], dict[str, Any]] | None = None
    ) -> Loaded:
        """Goes on from the newest whole checkpoint in `dir`, or starts afresh where there is none. Collective.

        From then on SIGTERM, to any rank, ends the job well: the step is finished, a checkpoint is saved to `dir`, and
        every rank exits with code 0.

        Args:
            dir: where the job saves its checkpoints.
            client_state: called for the client state of a checkpoint that is saved because of SIGTERM.

        Returns:
            As load_checkpoint(); (None, None) at a fresh start.

        Raises:
            CheckpointError: there are checkpoints, but none is whole.
            ConfigError: the checkpoint does not fit the model.
        """
        what = What(
            module_strict=True,
            optimizer_states=True,
            scheduler_states=True,
            counters=True,
            custom_load_fn=None,
            strict=False,
        )
        return self._checkpoints.resume(dir, what=what, client_state=client_state)

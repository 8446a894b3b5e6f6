"""An engine's checkpoints: save, load, resume, and stopping on request."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from zerocore._engine_state import Names, collect, describe
from zerocore._exchange import broadcast_json, gather_json
from zerocore._load import MANIFEST, Checkpoint, candidates
from zerocore._restore import Restore, What, client_state
from zerocore._save import Saver, Target, check_tag
from zerocore._values import ClientState
from zerocore.errors import CheckpointError, ConfigError, IoError, UnsupportedError

if TYPE_CHECKING:
    from zerocore._engine import Engine

logger = logging.getLogger("zerocore")


class Loaded(NamedTuple):
    """The folder of the checkpoint that was loaded, None if there was none, and the client state in it."""

    path: str | None
    client_state: Any


class Checkpoints:
    """Saves and loads one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._saver: Saver | None = None
        self._stop_dir: Path | None = None  # where to save when asked to stop; None: stopping is not ours
        self._stop_state: Callable[[], Any] | None = None
        self.stop_asked = False

    def save(
        self, save_dir: Any, *, tag: str | None, client_state: Any, save_latest: bool, exclude_frozen: bool
    ) -> Path:
        """Saves. Collective. Returns the checkpoint's folder."""
        engine = self._engine
        tag = check_tag(f"global_step{engine.global_steps}" if tag is None else str(tag))
        client = ClientState(client_state)
        target = Target(
            dir=Path(save_dir).absolute(),
            tag=tag,
            save_latest=save_latest,
            keep_last=engine.config.checkpoint.keep_last,
        )
        self._check_agreement(target, client, exclude_frozen)
        if self._saver is None:
            self._saver = Saver(engine._host_comm.split(0, engine.rank))
        names = Names(engine.module)
        items = collect(engine, names, client, exclude_frozen=exclude_frozen)
        self._saver.save(
            target,
            [source for item in items for source in item.sources],
            describe(engine, names, items, client, exclude_frozen=exclude_frozen),
            background=engine.config.checkpoint.async_save,
        )
        return Path(save_dir) / tag

    def wait(self) -> None:
        """Waits for a save in the background and raises its failure."""
        if self._saver is not None:
            self._saver.wait()

    def snapshot_bytes(self) -> int:
        return 0 if self._saver is None else self._saver.snapshot_bytes()

    def load(self, load_dir: Any, *, tag: str | None, what: What) -> Loaded:
        """Loads. Collective: rank 0 chooses, and all ranks read what it chose, or none does."""
        self.wait()
        engine = self._engine
        tried: list[str] = []
        while True:
            chosen = self._choose(Path(load_dir), tag, tried, strict=what.strict)
            if chosen is None:
                return Loaded(None, None)
            path, manifest = chosen
            read: list[Any] = []
            failure = self._together(functools.partial(self._read, path, manifest, what, read))
            if failure is None:
                restore, state = read
                restore.finish()
                engine._settle()
                return Loaded(str(path), state)
            if tag is not None or what.strict:
                raise CheckpointError(failure)
            if engine.rank == 0:
                logger.warning("%s Trying an older one.", failure)
            tried.append(path.name)

    def _read(self, path: Path, manifest: bytes, what: What, out: list[Any]) -> None:
        """Reads one checkpoint's tensors into the engine; adds what is left to do, and the client state. Local."""
        checkpoint = Checkpoint(path, manifest)
        state = client_state(checkpoint)
        self._engine._outcomes.settle()  # a step's outcome that is not known yet is not that of what is loaded
        restore = Restore(self._engine, checkpoint, what)
        self._engine._broken_by = f"{path} could be loaded in part only"
        restore.read()
        out += [restore, state]

    def resume(self, dir: Any, *, what: What, client_state: Callable[[], Any] | None) -> Loaded:
        """Loads the newest whole checkpoint, if there is one, and from now on stops on SIGTERM. Collective."""
        loaded = self.load(dir, tag=None, what=what)
        self._stop_dir, self._stop_state = Path(dir).absolute(), client_state
        _sigterm.give_to(self)
        if self._engine.rank == 0:
            if loaded.path is None:
                logger.info("[ckpt] no checkpoint in %s: starting afresh", dir)
            else:
                logger.info("[ckpt] resumed from %s, step %d", loaded.path, self._engine.global_steps)
        return loaded

    def stop(self) -> None:
        """Saves and ends the process with exit code 0, after a step in which a rank was asked to. Collective.

        Other engines that have called resume() are saved too, each to its folder, as they stand.
        """
        others = [each for each in _sigterm.owners if each is not self and each._stop_dir != self._stop_dir]
        for each in [*others, self]:
            each._save_for_stop()
        raise SystemExit(0)

    def _save_for_stop(self) -> None:
        engine = self._engine
        assert self._stop_dir is not None
        in_step = engine._params.gradients.in_micro_step or engine._accumulation.micro_steps > 0
        if in_step or engine._broken_by is not None:  # of another engine than the one that has made a step
            if engine.rank == 0:
                logger.warning("[ckpt] SIGTERM: the engine that saves to %s is not at a step's end.", self._stop_dir)
            return
        with contextlib.suppress(IoError):  # an earlier save's failure, of which a warning told: this one counts
            self.wait()
        state = {} if self._stop_state is None else self._stop_state()
        path = self.save(self._stop_dir, tag=None, client_state=state, save_latest=True, exclude_frozen=False)
        self.wait()
        if engine.rank == 0:
            print(
                f"zerocore: stopped on SIGTERM after step {engine.global_steps}; saved {path}",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        """Waits for a save in the background, and leaves SIGTERM alone again."""
        _sigterm.take_from(self)
        self._stop_dir = None
        self.wait()

    def _check_agreement(self, target: Target, client: ClientState, exclude_frozen: bool) -> None:
        """All ranks must save the same. Rank 0's client state is what is saved."""
        mine = [str(target.dir), target.tag, target.save_latest, exclude_frozen]
        said = gather_json(self._engine.comm, [mine, client.digest()], "save_checkpoint")
        for rank, (theirs, _) in enumerate(said):
            if theirs != said[0][0]:
                raise ConfigError(
                    "[ckpt] save_checkpoint: got (folder, tag, save_latest, exclude_frozen_parameters) "
                    f"{said[0][0]} on rank 0 and {theirs} on rank {rank}, expected the same on all ranks. Do not "
                    "make a tag of the time or the rank."
                )
        if len({digest for _, digest in said}) > 1 and self._engine.rank == 0:
            logger.warning(
                "[ckpt] save_checkpoint: the ranks have different client states; rank 0's is saved. Keep what differs "
                "by rank out of it."
            )

    def _choose(self, folder: Path, tag: str | None, tried: list[str], *, strict: bool) -> tuple[Path, bytes] | None:
        """Rank 0's choice among the checkpoints that have not been tried: folder and manifest. Collective."""
        said: dict[str, Any] = {}
        if self._engine.rank == 0:
            try:
                found = _first_whole(folder, tag, tried, strict=strict)
                said = {"path": None if found is None else str(found.path)}
                said["manifest"] = "" if found is None else found.manifest_bytes.decode()
            except (CheckpointError, UnsupportedError, ConfigError, OSError) as error:
                said = {"error": type(error).__name__, "text": str(error), "errno": getattr(error, "errno", None)}
        said = broadcast_json(self._engine.comm, said, "load_checkpoint")
        if "error" in said:
            kinds = {kind.__name__: kind for kind in (CheckpointError, UnsupportedError, ConfigError)}
            if said["error"] in kinds:
                raise kinds[said["error"]](said["text"])
            raise IoError(said["errno"], said["text"])
        return None if said["path"] is None else (Path(said["path"]), said["manifest"].encode())

    def _together(self, work: Callable[[], None]) -> str | None:
        """Runs `work` on all ranks. Why it failed on one of them because of what is on disk, or None. Collective."""
        failure = None
        try:
            work()
        except (CheckpointError, OSError, MemoryError) as error:
            failure = str(error) or "out of memory"
        for rank, text in enumerate(gather_json(self._engine.comm, failure, "load_checkpoint")):
            if text is not None:
                return f"[ckpt] rank {rank}: {text}" if self._engine.world_size > 1 else str(text)
        return None


def _is_deepspeeds(path: Path) -> bool:
    return path.is_dir() and any(path.glob("*_model_states.pt"))


class _Sigterm:
    """This process's handler of SIGTERM, while an engine has asked for it; then the one of before again.

    It tells the engine that asked last: of several, that is the one whose step comes last, as a rule.
    """

    def __init__(self) -> None:
        self.owners: list[Checkpoints] = []
        self._before: Any = None

    def give_to(self, owner: Checkpoints) -> None:
        self.owners = [*(each for each in self.owners if each is not owner), owner]
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "[ckpt] resume: got a call in another thread than the main one, which cannot handle signals: SIGTERM "
                "will not save. Call it in the main thread."
            )
            return
        handler = signal.getsignal(signal.SIGTERM)
        if handler == self._handle:
            return
        if callable(handler):
            logger.warning(
                "[ckpt] resume: SIGTERM saves now, instead of calling %r, until the engine is closed.", handler
            )
        self._before = signal.signal(signal.SIGTERM, self._handle)

    def take_from(self, owner: Checkpoints) -> None:
        self.owners = [each for each in self.owners if each is not owner]
        if not self.owners and threading.current_thread() is threading.main_thread():
            self._restore()

    def _restore(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)

    def _handle(self, number: int, frame: Any) -> None:
        if self.owners:
            self.owners[-1].stop_asked = True
        else:  # the last was closed in another thread
            self._restore()
            os.kill(os.getpid(), number)


_sigterm = _Sigterm()


def _first_whole(folder: Path, tag: str | None, tried: list[str], *, strict: bool) -> Checkpoint | None:
    """The checkpoint to load; those before it in line that are damaged are named.

    Raises:
        CheckpointError: it is damaged and `tag` or `strict` asked for it, or all are.
    """
    if tag is not None:
        return Checkpoint(folder / check_tag(str(tag)))
    if (folder / MANIFEST).exists():
        raise ConfigError(
            f"[ckpt] {folder}: got a checkpoint, expected the folder that holds it. Give {str(folder.parent)!r}"
            f", and tag={folder.name!r} to load this one."
        )
    in_line = [each for each in candidates(folder) if each.name not in tried]
    for path in in_line:
        try:
            return Checkpoint(path)
        except (CheckpointError, OSError) as error:
            if strict:
                raise
            logger.warning("%s Trying an older one.", error)
    if any(_is_deepspeeds(path) for path in in_line):
        raise CheckpointError(
            f"[ckpt] {folder}: got a checkpoint of DeepSpeed, expected one of zerocore. Convert it: `zerocore "
            "import-deepspeed` writes one into another folder."
        )
    if in_line or tried:
        raise CheckpointError(
            f"[ckpt] {folder}: got no whole checkpoint, {len(in_line) + len(tried)} damaged ones. Look at the warnings "
            "before this, restore the folder from a copy, or give an empty folder to start afresh."
        )
    return None

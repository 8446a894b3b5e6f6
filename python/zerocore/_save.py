"""Writes a checkpoint, all ranks together, so that it exists whole or not at all. No torch in it.

Note: the order of things. Every rank writes its file into `<dir>/.<tag>.saving`, and has it on disk (fsync) before it
says so. When all have said so, rank 0 writes the manifest and its checksum, syncs the folder, and makes the checkpoint
by one rename; `latest` is replaced last. A folder of that tag that stands already is exchanged for the new one by the
same rename, then deleted. Whatever instant the job or the machine dies at, a loader finds the old checkpoint or the new
one, whole. What is left lying is deleted at the next save.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zerocore import _channel, _core
from zerocore._exchange import address_of, gather_json
from zerocore._files import named_errors
from zerocore._hash import hash_address
from zerocore._load import CHECKSUM, LATEST, MANIFEST, checksum_line, latest_name, newest_first, restore_replaced
from zerocore._manifest import CHUNK_BYTES, File, Manifest, Piece
from zerocore._safetensors import make_header
from zerocore.errors import ConfigError, IoError

logger = logging.getLogger("zerocore")

_DEFAULT_TAG = re.compile(r"global_step\d+")
_committing = threading.Lock()  # two engines of a process may save into one folder, which has one `latest`
_OURS = re.compile(r"manifest\..*|rank_\d{5}\.safetensors")
_LEFT_OVER = re.compile(r"\..*\.(saving|deleting|replaced)")


class Source(NamedTuple):
    """Elements [begin, end) of one part of an entry, in this rank's memory."""

    entry: str
    part: str
    dtype: str
    shape: Sequence[int]  # under which they stand in the file: of the whole tensor, or flat
    begin: int
    end: int
    address: int
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """Where a checkpoint goes."""

    dir: Path
    tag: str
    save_latest: bool = True
    keep_last: int | None = None


Pieces = dict[tuple[str, str], list[Piece]]  # by entry and part, in the order of their elements
MakeManifest = Callable[[list[File], Pieces], Manifest]


def check_tag(tag: str) -> str:
    """The tag, if it can be a folder's name.

    Raises:
        ConfigError: it cannot.
    """
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]*", tag) or tag == LATEST:
        raise ConfigError(
            f"[ckpt] tag: got {tag!r}, expected letters, digits and any of _ . = + - (not first), and another name "
            f"than {LATEST}. It names a folder."
        )
    return tag


class Saver:
    """Saves checkpoints, one at a time, in the caller's thread or in one of its own.

    Args:
        comm: used by this object alone.
        chunk_bytes: of a file, with one checksum; as the manifests say.
    """

    def __init__(self, comm: _core.Communicator, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._comm = comm
        self._chunk_bytes = chunk_bytes
        self._snapshot: Any = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._lock: int | None = None  # see _lock_folder(); on rank 0, while a save goes on

    def save(self, target: Target, sources: list[Source], make_manifest: MakeManifest, *, background: bool) -> None:
        """Saves. Collective; with `background` it returns as soon as the sources are copied.

        Raises:
            IoError: on every rank, when one of them could not write. No checkpoint that was there is touched.
        """
        self.wait()
        self._together("prepare a checkpoint", lambda: self._prepare(target) if self._comm.rank == 0 else None)
        if not background:
            self._write(target, sources, make_manifest)
            return
        copied = self._copy(sources)

        def run() -> None:
            try:
                self._write(target, copied, make_manifest)
            except BaseException as error:
                self._failure = error
                logger.warning("[ckpt] saving %s in the background failed: %s", target.dir / target.tag, error)

        self._thread = threading.Thread(target=run, name="zerocore-save")  # the process ends after it
        self._thread.start()

    def wait(self) -> None:
        """Waits for a save in the background; raises what it failed with, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def snapshot_bytes(self) -> int:
        """Host memory kept for saves in the background."""
        return 0 if self._snapshot is None else int(self._snapshot.bytes)

    def _prepare(self, target: Target) -> None:
        _prepare(target)
        self._lock = _lock_folder(_saving(target))

    def _copy(self, sources: list[Source]) -> list[Source]:
        """The sources, copied into memory that is kept for the next time."""
        total = sum(source.bytes for source in sources)
        if self._snapshot is None or self._snapshot.bytes < total:
            self._snapshot = None  # freed before the larger one is made
            self._snapshot = _core.HugeBuffer(total)
        _core.copy_segments([(s.address, s.bytes) for s in sources], self._snapshot.address)
        copied = []
        address = self._snapshot.address
        for source in sources:
            copied.append(source._replace(address=address))
            address += source.bytes
        return copied

    def _write(self, target: Target, sources: list[Source], make_manifest: MakeManifest) -> None:
        try:
            folder = _saving(target)
            name = f"rank_{self._comm.rank:05}.safetensors"
            written = self._together(
                "write a checkpoint", lambda: _write_file(folder / name, sources, chunk_bytes=self._chunk_bytes)
            )

            def commit() -> None:
                if self._comm.rank == 0:
                    files, pieces = _assemble(written)
                    _commit(target, make_manifest(files, pieces))

            self._together("commit a checkpoint", commit)
        finally:
            lock, self._lock = self._lock, None
            if lock is not None:
                fcntl.flock(lock, fcntl.LOCK_UN)  # also for processes that were forked meanwhile
                os.close(lock)

    def _together(self, label: str, work: Callable[[], Any]) -> list[Any]:
        """Runs `work` on every rank. What it returned on each; or, where one failed, its failure on all of them."""
        result, error = None, None
        try:
            result = work()
        except OSError as failed:
            error = [failed.errno, str(failed)]
        except MemoryError as failed:
            error = [errno.ENOMEM, f"[ckpt] out of memory ({failed})"]
        except Exception as failed:  # a fault, ours or of the disk: the others shall not wait for this rank
            logger.exception("[ckpt] rank %d could not %s", self._comm.rank, label)
            error = [errno.EIO, f"[ckpt] {type(failed).__name__}: {failed}."]
        outcomes = gather_json(self._comm, [result, error], label)
        for rank, (_, failed_with) in enumerate(outcomes):
            if failed_with is not None:
                number, text = failed_with
                raise IoError(
                    number,
                    f"[ckpt] rank {rank} could not {label}: {text} The checkpoints that were there stand, and training "
                    "can go on.",
                )
        return [each for each, _ in outcomes]


def _saving(target: Target) -> Path:
    return target.dir / f".{target.tag}.saving"


def _prepare(target: Target) -> None:
    with named_errors(target.dir):
        made = [each for each in (target.dir, *target.dir.parents) if not each.exists()]
        target.dir.mkdir(parents=True, exist_ok=True)
        for each in made:
            _core.sync_folder(each.parent)
        restore_replaced(target.dir)
        _check_ours(target.dir / target.tag)
        for left in target.dir.iterdir():
            if _LEFT_OVER.fullmatch(left.name):
                _remove_left_over(left)
        _saving(target).mkdir()


def _remove_left_over(path: Path) -> None:
    """Deletes what a save that died has left, and nothing that another engine or job is saving right now."""
    lock = None
    try:
        lock = _lock_folder(path)
        shutil.rmtree(path)
    except (BlockingIOError, FileNotFoundError):
        pass  # in use; or gone: it was another's to delete
    finally:
        if lock is not None:
            os.close(lock)


def _lock_folder(path: Path) -> int | None:
    """Marks a folder as being written, until what it returns is closed. None on file systems that cannot tell.

    Raises:
        BlockingIOError: somebody else has marked it.
    """
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder)
        raise
    except OSError:
        os.close(folder)
        return None
    return folder


def _check_ours(path: Path) -> None:
    """What a checkpoint replaces is deleted, so it must be one, or nothing. DeepSpeed's have the same names."""
    if not path.is_dir() or (path / MANIFEST).exists():
        return
    if not all(_OURS.fullmatch(each.name) for each in path.iterdir()):  # what has lost its manifest is ours still
        raise IoError(
            errno.EEXIST,
            f"[ckpt] {path} is no checkpoint of zerocore: got a folder with other files, expected a free name. Move "
            "it away, or save under another tag or in another folder.",
        )


def _write_file(path: Path, sources: list[Source], *, chunk_bytes: int) -> dict[str, Any]:
    tensors: list[tuple[str, str, Sequence[int]]] = []
    pieces: list[list[Any]] = []
    for s in sources:
        if pieces and pieces[-1][:2] == [s.entry, s.part] and pieces[-1][3] == s.begin:  # they make up one tensor
            pieces[-1][3] = s.end
            tensors[-1] = (*tensors[-1][:2], (s.end - pieces[-1][2],))
        else:
            pieces.append([s.entry, s.part, s.begin, s.end])
            tensors.append((f"{s.part}/{s.entry}", s.dtype, s.shape))
    header = bytearray(make_header(tensors, {"format": "pt"}))
    segments = [(address_of(header), len(header)), *((s.address, s.bytes) for s in sources)]
    hashes = _core.write_file(path, segments, hash=hash_address(), chunk_bytes=chunk_bytes)
    return {
        "name": path.name,
        "bytes": sum(num_bytes for _, num_bytes in segments),
        "header_bytes": len(header),
        "chunks": [f"{each:016x}" for each in hashes],
        "pieces": pieces,
    }


def _assemble(written: list[dict[str, Any]]) -> tuple[list[File], Pieces]:
    files = []
    pieces: Pieces = {}
    for number, file in enumerate(written):
        for entry, part, begin, end in file.pop("pieces"):
            piece = Piece(file=number, key=f"{part}/{entry}", begin=begin, end=end)
            pieces.setdefault((entry, part), []).append(piece)
        files.append(File(**file))
    for each in pieces.values():
        each.sort(key=lambda piece: piece.begin)
    return files, pieces


def _commit(target: Target, manifest: Manifest) -> None:
    folder = _saving(target)
    final = target.dir / target.tag
    with named_errors(folder), _committing:
        data = manifest.dump()
        _core.write_new_file(folder / MANIFEST, data)
        _core.write_new_file(folder / CHECKSUM, checksum_line(data))
        _core.sync_folder(folder)
        replaced = _core.commit_folder(folder, final)
        if target.save_latest:
            _core.replace_file(target.dir / LATEST, f"{target.tag}\n".encode())
    _channel.report("saved", step=manifest.global_steps, path=str(final))
    _prune(target, replaced)


def _prune(target: Target, replaced: Path | None) -> None:
    """Deletes what the checkpoint has replaced, and those that keep_last does not keep. The new one stands already."""
    try:
        if replaced is not None:
            shutil.rmtree(replaced)
        if target.keep_last is None:
            return
        ours = [each for each in newest_first(target.dir) if _DEFAULT_TAG.fullmatch(each.name)]
        dying = [
            old.rename(old.with_name(f".{old.name}.deleting"))
            for old in ours[target.keep_last :]
            if old.name not in (target.tag, latest_name(target.dir))
        ]
        _core.sync_folder(target.dir)  # nothing half-deleted has the name of a checkpoint, a power cut or not
        for each in dying:
            shutil.rmtree(each)
    except OSError as error:
        logger.warning("[ckpt] old checkpoints in %s could not be deleted: %s", target.dir, error)

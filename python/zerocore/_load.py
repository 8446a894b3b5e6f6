"""Finds, checks and reads checkpoints. No torch in it.

Nothing is trusted: the manifest has a checksum, every byte that is read is compared with the manifest's, sizes are
compared with the files' own before any memory is taken, and no name leads out of the folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import xxhash

from zerocore import _core
from zerocore import _safetensors as safetensors
from zerocore._exchange import address_of
from zerocore._files import regular_size, small_file
from zerocore._hash import hash_address
from zerocore._manifest import Entry, Manifest, Part, parse_manifest
from zerocore.errors import CheckpointError, IoError, UnsupportedError

MANIFEST = "manifest.json"
CHECKSUM = "manifest.xxh3"
LATEST = "latest"
_MAX_MANIFEST_BYTES = 1 << 31
_MAX_LATEST_BYTES = 4096


def checksum_line(manifest: bytes) -> bytes:
    """What stands in the checksum's file; `xxhsum -c` reads it."""
    return f"XXH3_{xxhash.xxh3_64_intdigest(manifest):016x}  {MANIFEST}\n".encode()


class Wanted(NamedTuple):
    """Elements [begin, end) of a part of an entry, and where they go."""

    entry: Entry
    part: Part
    begin: int
    end: int
    address: int


class Checkpoint:
    """One checkpoint, its manifest checked and its files there in the right sizes.

    Args:
        path: its folder.
        manifest: its manifest, where that has been read and checked already.

    Raises:
        CheckpointError: it is damaged, or is none.
        UnsupportedError: a newer version of zerocore wrote it.
    """

    def __init__(self, path: Path, manifest: bytes | None = None) -> None:
        self.path = path
        data = _checked_manifest(path) if manifest is None else manifest
        self.manifest_bytes = data
        self.manifest: Manifest = parse_manifest(data, path=str(path / MANIFEST))
        for file in self.manifest.files:
            have = regular_size(path / file.name)
            if have != file.bytes:
                raise CheckpointError(
                    f"[ckpt] {path / file.name} is damaged: got {have} bytes, expected {file.bytes}. Use another "
                    "checkpoint."
                )
        self._headers: dict[int, dict[str, safetensors.Entry]] = {}

    def entries(self) -> dict[str, Entry]:
        """All entries by name."""
        return {entry.name: entry for entry in self.manifest.entries}

    def read(self, wanted: list[Wanted]) -> None:
        """Reads just what is wanted; every chunk that is touched is checked.

        Raises:
            CheckpointError: what is read is damaged. The memory may be written to in part.
            IoError: reading failed.
        """
        by_file: dict[int, list[tuple[int, int, int]]] = {}
        for each in wanted:
            for file, offset, num_bytes, address in self._ranges(each):
                by_file.setdefault(file, []).append((offset, num_bytes, address))
        for file, ranges in by_file.items():
            self._read_file(file, ranges)

    def read_part(self, entry: Entry, part: Part) -> bytearray:
        """A whole part, in the order of its elements.

        Raises:
            CheckpointError, IoError: as read().
        """
        num_bytes = entry.numel * safetensors.ITEM_BYTES[part.dtype]
        for piece in part.pieces:  # before memory is taken
            self._data_begin(part, piece.file, piece.key, piece.end - piece.begin)
        if num_bytes > sum(file.bytes for file in self.manifest.files):
            raise CheckpointError(f"[ckpt] {self.path} is damaged: {entry.name} is larger than the files.")
        data = bytearray(num_bytes)
        self.read([Wanted(entry, part, 0, entry.numel, address_of(data))])
        return data

    def verify(self) -> None:
        """Reads everything and checks it.

        Raises:
            CheckpointError, IoError: as read().
        """
        for problem in self.problems():
            raise problem

    def problems(self) -> Iterator[CheckpointError | IoError]:
        """Reads everything; what is wrong with each file, and with each entry whose pieces are not where it says."""
        sound = set()
        for number, file in enumerate(self.manifest.files):
            try:
                _core.verify_file(self.path / file.name, file.bytes, file.hashes(), **self._options())
                self._header(number)
                sound.add(number)
            except (CheckpointError, IoError) as error:
                yield error
        for entry in self.manifest.entries:
            try:
                for part in entry.parts:
                    for piece in part.pieces:
                        if piece.file in sound:
                            self._data_begin(part, piece.file, piece.key, piece.end - piece.begin)
            except CheckpointError as error:
                yield error

    def _ranges(self, wanted: Wanted) -> Iterator[tuple[int, int, int, int]]:
        item = safetensors.ITEM_BYTES[wanted.part.dtype]
        for piece in wanted.part.pieces:
            if piece.box is not None:
                raise UnsupportedError(
                    f"[ckpt] {self.path}: {wanted.entry.name} was saved by a model-parallel job: got a box of it, "
                    "expected the whole. Load it with a version that knows model parallelism."
                )
            first, last = max(piece.begin, wanted.begin), min(piece.end, wanted.end)
            data = self._data_begin(wanted.part, piece.file, piece.key, piece.end - piece.begin)
            if first < last:
                offset = data + (first - piece.begin) * item
                yield piece.file, offset, (last - first) * item, wanted.address + (first - wanted.begin) * item

    def _data_begin(self, part: Part, file: int, key: str, numel: int) -> int:
        """Where a piece's bytes begin in its file."""
        entry = self._header(file).get(key)
        num_bytes = numel * safetensors.ITEM_BYTES[part.dtype]
        if entry is None or entry.dtype != part.dtype or entry.end - entry.begin != num_bytes:
            raise CheckpointError(
                f"[ckpt] {self.path / self.manifest.files[file].name} is damaged: got {entry} under {key!r}, expected "
                f"{numel} elements of {part.dtype}. Use another checkpoint."
            )
        return self.manifest.files[file].header_bytes + entry.begin

    def _header(self, number: int) -> dict[str, safetensors.Entry]:
        if number not in self._headers:
            file = self.manifest.files[number]
            data = bytearray(file.header_bytes)  # no more than the file has
            self._read_file(number, [(0, len(data), address_of(data))])
            self._headers[number] = safetensors.parse_header(
                bytes(data), file_bytes=file.bytes, file=str(self.path / file.name)
            )
        return self._headers[number]

    def _read_file(self, number: int, ranges: list[tuple[int, int, int]]) -> None:
        file = self.manifest.files[number]
        _core.read_ranges(self.path / file.name, file.bytes, file.hashes(), ranges, **self._options())

    def _options(self) -> dict[str, int]:
        return {
            "hash": hash_address(),
            "chunk_bytes": self.manifest.chunk_bytes,
        }


def _checked_manifest(path: Path) -> bytes:
    data = small_file(path / MANIFEST, _MAX_MANIFEST_BYTES)
    if small_file(path / CHECKSUM, _MAX_LATEST_BYTES) != checksum_line(data):
        raise CheckpointError(
            f"[ckpt] {path / MANIFEST} is damaged: it does not have the checksum in {CHECKSUM}. Use another checkpoint."
        )
    return data


def restore_replaced(dir: Path) -> None:
    """Gives a checkpoint its name back where a save died between two renames (see zc/ckpt/commit.h)."""
    for replaced in dir.glob(".*.saving.replaced"):
        name = dir / replaced.name.removeprefix(".").removesuffix(".saving.replaced")
        if not name.exists():
            replaced.rename(name)


def newest_first(dir: Path) -> list[Path]:
    """The folders in `dir` that look like checkpoints, by the number of steps in their manifests."""
    found = []
    try:
        folders = [each for each in dir.iterdir() if not each.name.startswith(".") and (each / MANIFEST).exists()]
    except FileNotFoundError:
        return []
    for folder in folders:
        try:
            data = small_file(folder / MANIFEST, _MAX_MANIFEST_BYTES)
            steps = parse_manifest(data, path=str(folder / MANIFEST)).global_steps
        except (CheckpointError, UnsupportedError, OSError):
            steps = -1  # damaged: whoever opens it says so
        found.append((steps, folder.stat().st_mtime_ns, folder))
    return [folder for _, _, folder in sorted(found, reverse=True)]


def candidates(dir: Path) -> list[Path]:
    """The checkpoints in `dir` in the order in which to try them: the one that `latest` names, then newest first."""
    restore_replaced(dir)
    found = newest_first(dir)
    name = latest_name(dir)
    if name is None:
        return found
    named = [each for each in found if each.name == name]
    if not named and name and "/" not in name and not name.startswith("."):
        named = [dir / name]  # gone: opening it says so
    return named + [each for each in found if each.name != name]


def latest_name(dir: Path) -> str | None:
    """What `dir/latest` says; None where there is none that can be read."""
    try:
        return small_file(dir / LATEST, _MAX_LATEST_BYTES).decode().strip()
    except (OSError, CheckpointError, UnicodeDecodeError):
        return None


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in the folder `path`; or, of the checkpoints in it, the one that `latest` names, or the newest.

    Raises:
        CheckpointError: there is none, or that one is damaged.
    """
    if (path / MANIFEST).exists():
        return Checkpoint(path)
    return Checkpoint(some_candidates(path)[0])


def some_candidates(dir: Path) -> list[Path]:
    """The same as candidates(), of which there must be one.

    Raises:
        CheckpointError: there is none.
    """
    found = candidates(dir)
    if not found:
        raise CheckpointError(
            f"[ckpt] {dir}: got no checkpoint, expected one, or a folder with checkpoints. Give the folder that holds "
            f"{MANIFEST}, or the one above it."
        )
    return found

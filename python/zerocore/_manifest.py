"""The manifest of a checkpoint: which part of which tensor lies in which file. docs/checkpoints.md has the format."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from zerocore._safetensors import ITEM_BYTES
from zerocore.errors import CheckpointError, UnsupportedError

FORMAT = "zerocore-checkpoint"
VERSION = 1
CHUNK_BYTES = 4 << 20  # of a file, with one checksum

Count = Annotated[int, Field(ge=0, le=2**62)]


def _plain_name(name: str) -> str:
    """A file's name without a folder: nothing in a manifest can name a path outside of the checkpoint."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors", name):
        raise ValueError("expected a plain file name that ends in .safetensors")
    return name


def _known_dtype(name: str) -> str:
    if name not in ITEM_BYTES:
        raise ValueError(f"expected one of {', '.join(ITEM_BYTES)}")
    return name


DType = Annotated[str, AfterValidator(_known_dtype)]


_NAMES = {"client": r"client/\d{1,9}", "rng": r"rng/[a-z]+/\d{1,9}"}
Role = Literal["trained", "frozen", "buffer", "client", "rng"]


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class File(_Model):
    """One file: its size, the size of its header with the length before it, and checksums of its chunks."""

    name: Annotated[str, AfterValidator(_plain_name)]
    bytes: Count
    header_bytes: Count
    chunks: list[Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]]

    def hashes(self) -> list[int]:
        return [int(chunk, 16) for chunk in self.chunks]


class Piece(_Model):
    """Elements [begin, end) of a box of a tensor, flat, under `key` in file number `file`.

    box: (first index, size) in each dimension; None: the whole tensor.
    """

    file: Count
    key: str
    begin: Count
    end: Count
    box: list[tuple[Count, Count]] | None = None


class Part(_Model):
    """One named tensor that belongs to an entry: "master", "value", or a state of the optimizer."""

    name: str
    dtype: DType
    pieces: list[Piece]


class Entry(_Model):
    """One parameter, buffer or other tensor.

    dtype: in which the model keeps it. ties: its other names in the model. step: updates made to it. group: its
    optimizer group. order: its dimensions from the outermost in memory to the innermost, in which the flat elements
    are counted; None: as they stand in `shape`. numbers: in the state of an optimizer without a native twin, each with
    the dtype of its tensor.
    """

    name: str
    shape: list[Count]
    dtype: DType
    role: Role
    ties: list[str] = []
    step: Count | None = None
    group: Count | None = None
    order: list[Count] | None = None
    numbers: dict[str, tuple[str | None, bool | int | float]] = {}
    parts: list[Part]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def part(self, name: str) -> Part | None:
        return next((part for part in self.parts if part.name == name), None)

    @model_validator(mode="after")
    def _complete(self) -> Entry:
        if self.order is not None and sorted(self.order) != list(range(len(self.shape))):
            raise ValueError("order is no permutation of the dimensions")
        if len({part.name for part in self.parts}) != len(self.parts):
            raise ValueError("a part stands twice")
        for part in self.parts:
            if any(piece.box is not None for piece in part.pieces):
                continue  # of a model-parallel job: checked where it is read
            at = 0
            for piece in part.pieces:
                if piece.begin != at or piece.end <= piece.begin:
                    raise ValueError(f"{part.name}: the pieces leave a gap or overlap at element {at}")
                at = piece.end
            if at != self.numel:
                raise ValueError(f"{part.name}: the pieces hold {at} elements of {self.numel}")
        return self


class Job(_Model):
    """Who wrote the checkpoint; for people, but for `threads`, on which torch's bits depend. 0: not known."""

    world_size: Count
    stage: Count
    precision: dict[str, Any]
    threads: Count
    zerocore: str
    torch: str


class Optimizer(_Model):
    """The type, and each parameter group's hyperparameters."""

    type: str
    groups: list[dict[str, Any]]


class Data(_Model):
    """Where the training loader is."""

    epoch: Count
    step: Count


class State(_Model):
    """What is no tensor. loss_scaler: scale, iteration, last overflow, overflows left until the scale halves."""

    global_samples: Count = 0
    skipped_steps: Count = 0
    micro_steps: Count = 0
    loop: str = "UNDECIDED"
    train_batch_size: Annotated[int, Field(ge=1)]
    loss_scaler: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], int, int, int] | None = None
    scheduler: Any = None
    data: Data | None = None
    extra_state: dict[str, Any] = {}


class Manifest(_Model):
    """A whole checkpoint."""

    format: Literal["zerocore-checkpoint"]
    version: Literal[1]
    job: Job
    global_steps: Count
    frozen_excluded: bool = False
    chunk_bytes: Annotated[int, Field(ge=4096, le=1 << 30, multiple_of=4096)]
    files: list[File]
    entries: list[Entry]
    optimizer: Optimizer | None = None
    state: State
    client_state: Any = None

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        if len({file.name for file in self.files}) != len(self.files):
            raise ValueError("a file stands twice")
        if len({entry.name for entry in self.entries}) != len(self.entries):
            raise ValueError("an entry stands twice")
        for file in self.files:
            if len(file.chunks) != -(-file.bytes // self.chunk_bytes):
                raise ValueError(f"{file.name}: got {len(file.chunks)} checksums for {file.bytes} bytes")
            if not 8 <= file.header_bytes <= file.bytes:
                raise ValueError(f"{file.name}: got a header of {file.header_bytes} in {file.bytes} bytes")
        for entry in self.entries:
            pattern = _NAMES.get(entry.role)
            if pattern is not None and not re.fullmatch(pattern, entry.name):
                raise ValueError(f"{entry.name!r} is no name of a tensor of role {entry.role}")
            for part in entry.parts:
                for piece in part.pieces:
                    if piece.file >= len(self.files):
                        raise ValueError(f"{entry.name}: got file number {piece.file} of {len(self.files)}")
        return self

    def of_role(self, *roles: str) -> Iterator[Entry]:
        return (entry for entry in self.entries if entry.role in roles)

    def dump(self) -> bytes:
        # Not pydantic's own JSON: it has no word for numbers that are not finite, which a client state may hold.
        return json.dumps(self.model_dump(exclude_defaults=True), separators=(",", ":")).encode()


def parse_manifest(data: bytes, *, path: str) -> Manifest:
    """Checks and reads a manifest.

    Raises:
        CheckpointError: it is damaged or contradicts itself.
        UnsupportedError: a later version of zerocore wrote it.
    """
    try:
        return Manifest.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole"
        if first["loc"] == ("version",) and type(first["input"]) is int and first["input"] > VERSION:
            raise UnsupportedError(
                f"[ckpt] {path}: got format version {first['input']}, expected at most {VERSION}. Install a newer "
                "zerocore to read it."
            ) from None
        raise CheckpointError(f"[ckpt] {path} is damaged: {where}: {first['msg']}. Use another checkpoint.") from None

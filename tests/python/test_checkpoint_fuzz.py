"""Checkpoints that somebody made wrong, with checksums that are right: a clean error each, or a load that is sound."""

from __future__ import annotations

import copy
import json
import random
import resource
import shutil
import time
from pathlib import Path

import pytest
import torch
import xxhash
from test_checkpoint import build, train
from zerocore._load import Checkpoint, checksum_line
from zerocore._manifest import parse_manifest
from zerocore.errors import CheckpointError, ConfigError, IoError, UnsupportedError

pytestmark = pytest.mark.usefixtures("one_thread")

CLEAN = (CheckpointError, ConfigError, UnsupportedError, IoError)
CASES = 200
ROOM_BYTES = 256 << 20  # for one load, above what the process has
NASTY = [
    *[None, True, 0, -1, 1, 3, 2**31, 2**63, 2**64, 10**30, 0.5, -0.0, 1e308, float("inf"), float("nan")],
    *[
        "",
        "x",
        "../../outside.safetensors",
        "/etc/passwd",
        "..",
        ".",
        "a/b",
        "\0",
        "F64",
        "frozen",
        "master",
        "é" * 300,
    ],
    *[[], [1], [[]], [0, 2**40], {}, {"a": 1}, {"$tensor": 99}, {"$tensor": "x"}],
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("saved")
    engine = build("odd", stage=2, dtype="fp16", groups=True, scheduler=True)
    train(engine, "odd", 1, dtype="fp16")
    path = engine.save_checkpoint(folder, client_state={"t": torch.arange(5), "n": [1, {"x": 2.5}]})
    engine.close()
    return Path(path)


def places(value, path=()):
    """Every place in a JSON value."""
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, (*path, key))


def change(value, rng):
    """Changes one place: another value, nothing, twice, or something from elsewhere."""
    value = copy.deepcopy(value)
    every = [path for path in places(value) if path]
    *parents, key = rng.choice(every)
    holder = value
    for each in parents:
        holder = holder[each]
    how = rng.randrange(5)
    if how == 0:
        del holder[key]
    elif how == 1 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    elif how == 2:
        *parents, other = rng.choice(every)
        found = value
        for each in (*parents, other):
            found = found[each] if not isinstance(found, (int, float, str, type(None))) else found
        holder[key] = copy.deepcopy(found)
    elif how == 3 and isinstance(holder[key], int):
        holder[key] += rng.choice([-1, 1, 2**20, -(2**20)])
    else:
        holder[key] = copy.deepcopy(rng.choice(NASTY))
    return value


def damage(path, rng):
    """Makes one checkpoint wrong, somewhere in its manifest or in a header, and its checksums right again."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    if rng.random() < 0.4:
        file = manifest["files"][0]
        data = (path / file["name"]).read_bytes()
        header = json.loads(data[8 : file["header_bytes"]])
        for _ in range(rng.choice([1, 1, 3])):
            header = change(header, rng)
        text = json.dumps(header).encode().ljust(file["header_bytes"] - 8)
        length = len(text) if rng.random() < 0.9 else rng.choice([0, 7, 2**31, 2**63, len(text) + 1])
        data = length.to_bytes(8, "little") + text + data[file["header_bytes"] :]
        (path / file["name"]).write_bytes(data)
        size = manifest["chunk_bytes"]
        chunks = [data[at : at + size] for at in range(0, len(data), size)]
        file |= {"bytes": len(data), "chunks": [f"{xxhash.xxh3_64_intdigest(c):016x}" for c in chunks]}
    else:
        for _ in range(rng.choice([1, 1, 1, 4])):
            manifest = change(manifest, rng)
    text = json.dumps(manifest).encode()
    if rng.random() < 0.05:
        text = rng.choice([b"", b"[]", b"null", b"{", b"[" * 100_000, text[:-1], b"\xff" + text, text + text])
    (path / "manifest.json").write_bytes(text)
    (path / "manifest.xxh3").write_bytes(checksum_line(text))


@pytest.fixture
def little_memory():
    """Whoever believes a size in a file runs out of memory."""
    own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (own + ROOM_BYTES, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


def test_malformed_checkpoints_end_in_clean_errors(saved, tmp_path, little_memory):
    engine = build("odd", stage=3, dtype="fp16", groups=True, scheduler=True)
    refused = {}
    for case in range(CASES):
        rng = random.Random(case)
        path = tmp_path / "run" / "x"
        shutil.copytree(saved, path)
        damage(path, rng)
        before = sorted(tmp_path.rglob("*"))
        start = time.monotonic()
        for load in (
            lambda path=path: Checkpoint(path).verify(),
            lambda path=path: engine.load_checkpoint(path.parent, tag="x"),
            lambda path=path: engine.load_checkpoint(path.parent, load_module_strict=False),
        ):
            try:
                load()
            except CLEAN as error:
                assert str(error).startswith("[ckpt] "), error
                refused[case] = type(error).__name__
            except Exception as error:
                raise AssertionError(f"case {case}") from error
        assert time.monotonic() - start < 10, case
        assert sorted(tmp_path.rglob("*")) == before, case
        shutil.rmtree(path.parent)
    assert len(refused) > CASES / 2  # the others changed a name, a number or a value that is as good
    engine.load_checkpoint(saved.parent)
    train(engine, "odd", 1, dtype="fp16")
    engine.close()


def test_the_unchanged_checkpoint_is_fine(saved):
    """What the cases above start from."""
    Checkpoint(saved).verify()
    text = (saved / "manifest.json").read_bytes()
    assert parse_manifest(text, path="x").dump() == text
    newer = json.loads(text) | {"version": 2}
    with pytest.raises(UnsupportedError, match="got format version 2, expected at most 1"):
        parse_manifest(json.dumps(newer).encode(), path="x")

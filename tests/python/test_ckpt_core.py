"""The core's checkpoint calls from Python: hashes, errors, and that others run meanwhile."""

import errno
import os
import pickle
import threading
from pathlib import Path

import pytest
import xxhash
from zerocore import _core, _hash
from zerocore.errors import CheckpointError, Error, IoError, UnsupportedError

CHUNK = 8192
HASH = {"hash": _hash.hash_address(), "chunk_bytes": CHUNK}


def buffer_of(data):
    buffer = _core.HugeBuffer(len(data))
    memoryview(buffer)[:] = data
    return buffer


@pytest.fixture
def data():
    return bytes(i * 7 % 251 for i in range(3 * CHUNK + 5))


@pytest.fixture
def written(data, tmp_path):
    """(path, hashes) of a file with `data`."""
    buffer = buffer_of(data)
    return tmp_path / "file", _core.write_file(tmp_path / "file", [(buffer.address, buffer.bytes)], **HASH)


def test_a_file_comes_back_with_the_hashes_of_xxhash(written, data):
    path, hashes = written
    assert path.read_bytes() == data
    chunks = [data[i : i + CHUNK] for i in range(0, len(data), CHUNK)]
    assert hashes == [xxhash.xxh3_64_intdigest(chunk) for chunk in chunks]
    out = _core.HugeBuffer(20)
    ranges = [(CHUNK - 3, 10, out.address), (len(data) - 10, 10, out.address + 10)]
    _core.read_ranges(path, len(data), hashes, ranges, **HASH, num_threads=2)
    assert bytes(memoryview(out)) == data[CHUNK - 3 : CHUNK + 7] + data[-10:]
    _core.verify_file(os.fsencode(path), len(data), hashes, **HASH)


def test_segments_are_written_and_copied_one_after_the_other(tmp_path):
    first, second, out = buffer_of(b"abc"), buffer_of(b"defg"), _core.HugeBuffer(7)
    segments = [(first.address, 3), (second.address, 0), (second.address, 4)]
    _core.write_file(tmp_path / "file", segments, **HASH)
    assert (tmp_path / "file").read_bytes() == b"abcdefg"
    _core.copy_segments(segments, out.address)
    assert bytes(memoryview(out)) == b"abcdefg"


def test_damage_is_a_checkpoint_error(written, data):
    path, hashes = written
    with pytest.raises(CheckpointError, match=r"is damaged: bytes 8,192\.\.16,384 do not have the checksum") as caught:
        _core.verify_file(path, len(data), [hashes[0], hashes[1] ^ 1, *hashes[2:]], **HASH)
    assert isinstance(caught.value, Error) and not isinstance(caught.value, OSError)
    with pytest.raises(CheckpointError, match="is missing"):
        _core.verify_file(path.parent / "other", len(data), hashes, **HASH)


def test_io_errors_carry_errno_and_file_name(written, tmp_path):
    path, _ = written
    with pytest.raises(IoError, match=r"^\[ckpt\] create .*: File exists \(errno 17\)") as caught:
        _core.write_file(path, [], **HASH)
    assert (caught.value.errno, caught.value.filename) == (errno.EEXIST, str(path))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(OSError, match="No such file or directory") as caught:
        _core.replace_file(tmp_path / "none" / "latest", b"tag")
    assert caught.value.errno == errno.ENOENT


def test_names_need_not_be_utf8(tmp_path):
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    _core.replace_file(folder / "latest", b"tag")
    with pytest.raises(IoError) as caught:
        _core.write_new_file(folder / "latest", b"other")
    assert caught.value.filename == str(folder / "latest")


def test_a_folder_is_committed(tmp_path):
    for name in ("first", "second"):
        (tmp_path / "new").mkdir()
        _core.write_new_file(tmp_path / "new" / "file", name.encode())
        old = _core.commit_folder(tmp_path / "new", tmp_path / "tag")
        assert (tmp_path / "tag" / "file").read_bytes() == name.encode()
    assert old == tmp_path / "new"
    assert (old / "file").read_bytes() == b"first"
    _core.commit_folder(old, tmp_path / "another")
    assert _core.commit_folder(Path(tmp_path / "another"), str(tmp_path / "third")) is None
    _core.sync_folder(tmp_path)


def test_other_threads_run_during_a_write(tmp_path):
    buffer = _core.HugeBuffer(64 << 20)
    begun, done = threading.Event(), threading.Event()

    def write():
        begun.set()
        _core.write_file(tmp_path / "file", [(buffer.address, buffer.bytes)], hash=HASH["hash"])
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    begun.wait()
    turns = 0
    while not done.is_set():
        turns += 1
        done.wait(0.001)
    thread.join()
    assert turns > 2


def test_a_hash_that_cannot_be_called_is_named(monkeypatch):
    monkeypatch.setattr(xxhash._xxhash, "__file__", _core.__file__)
    with pytest.raises(UnsupportedError, match=r"xxhash .* XXH3_64bits"):
        _hash.hash_address.__wrapped__()

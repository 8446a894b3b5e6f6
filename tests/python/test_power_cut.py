"""The failing disk and its replay themselves, and what the core's calls leave when they are cut short by either."""

import errno
import os
import shutil
import subprocess
import sys

import power_cut
import pytest

PREPARE = """
import os, shutil, sys
from pathlib import Path
from zerocore import _core, _hash

def shard(path, data):
    buffer = _core.HugeBuffer(len(data))
    memoryview(buffer)[:] = data
    _core.write_file(path, [(buffer.address, len(data))], hash=_hash.hash_address(), chunk_bytes=8192, num_threads=2)

root = Path(sys.argv[1])
"""

DATA = {"old": bytes(range(250)) * 100, "new": bytes(range(249, -1, -1)) * 101}


def run(root, script, **how):
    """Runs Python that works in `root`, with faults."""
    environment = {**os.environ, **power_cut.faults(root, **how)}
    command = [sys.executable, "-c", PREPARE + script, str(root)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def journal_of(root, script):
    """(the disk before, the operations) of a script that goes well."""
    disk = power_cut.Disk(root)
    path = root.parent / "journal"
    path.unlink(missing_ok=True)
    done = run(root, script, journal=path)
    assert done.returncode == 0, done.stderr
    return disk, power_cut.read_journal(path)


def states(root, script, tmp_path):
    """Yields folders with all that a power cut during the script may leave, from nothing done to all done."""
    disk, operations = journal_of(root, script)
    for number in range(len(operations) + 1):
        yield from cuts(disk, tmp_path, number)
        if number < len(operations):
            disk.apply(operations[number])


def cuts(disk, tmp_path, number):
    for name, names, data in power_cut.cases(number):
        folder = tmp_path / f"cut_{number}_{name}"
        disk.build(folder, names=names, data=data)
        yield folder
        shutil.rmtree(folder)


@pytest.fixture
def root(tmp_path):
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


EVERYTHING = f"""
(root / "a").write_bytes(b"0123456789" * 1000)
with open(root / "kept", "r+b", buffering=0) as f:
    f.seek(3); f.write(b"xyz"); os.pwrite(f.fileno(), b"tail", 5000); os.ftruncate(f.fileno(), 5002)
with open(root / "kept", "ab") as f: f.write(b"appended")
with open(root / "emptied", "wb") as f: f.write(b"short")
os.makedirs(root / "x/y")
os.chdir(root / "x"); Path("here").write_bytes(b"relative"); os.chdir("/")
os.rename(root / "a", root / "x/y/b"); os.replace(root / "x/here", root / "gone")
shard(root / "x/shard", {DATA["new"]!r})
_core.write_new_file(root / "x/manifest", b"{{}}")
_core.commit_folder(root / "x", root / "folder")
_core.replace_file(root / "latest", b"folder")
os.rmdir(root / "x/within"); shutil.rmtree(root / "x")
"""


def test_the_journal_replays_to_what_is_there(root, tmp_path):
    (root / "kept").write_bytes(bytes(100))
    (root / "emptied").write_bytes(bytes(100))
    (root / "gone").write_bytes(b"replaced by a rename")
    (root / "folder" / "within").mkdir(parents=True)
    (root / "folder" / "file").write_bytes(b"old")
    disk, operations = journal_of(root, EVERYTHING)
    before = power_cut.tree(root)
    for operation in operations:
        disk.apply(operation)
    disk.build(tmp_path / "replayed", names=power_cut.all_of_it, data=power_cut.all_of_it)
    assert power_cut.tree(tmp_path / "replayed") == before
    assert before["folder/shard"] == DATA["new"] and before["latest"] == b"folder"


def test_what_was_not_synced_is_found_lost(root, tmp_path):
    (root / "file").write_bytes(b"old")
    careless = "(root / 'new').write_bytes(b'new'); os.replace(root / 'new', root / 'file')"
    assert {(folder / "file").read_bytes() for folder in states(root, careless, tmp_path)} == {b"old", b"new", b""}
    unsynced_name = "_core.write_new_file(root / 'other', b'data')"
    found = {tuple(power_cut.tree(folder).items()) for folder in states(root, unsynced_name, tmp_path)}
    assert (("file", b"new"),) in found and (("file", b"new"), ("other", b"data")) in found


def test_parts_of_a_write_may_survive(root, tmp_path):
    found = {
        power_cut.tree(folder).get("file", b"").count(1)
        for folder in states(root, "(root / 'file').write_bytes(bytes([1]) * 3 * 4096)", tmp_path)
    }
    assert found > {0, 3 * 4096}


def test_a_replaced_file_is_the_old_or_the_new(root, tmp_path):
    (root / "latest").write_bytes(b"old")
    found = [(folder / "latest").read_bytes() for folder in states(root, REPLACE, tmp_path)]
    assert set(found) == {b"old", b"new"} and found[0] == b"old"
    assert set(last_cut(found)) == {b"new"}


def last_cut(found):
    """What was found after the call had returned, when all must be on the disk."""
    return found[-len(power_cut.cases(0)) :]


REPLACE = "_core.replace_file(root / 'latest', b'new')"

COMMIT = f"""
(root / "next").mkdir()
shard(root / "next/shard", {DATA["new"]!r})
_core.write_new_file(root / "next/manifest", b"new")
print(_core.commit_folder(root / "next", root / "tag"))
"""


def make_old(root):
    (root / "tag").mkdir()
    (root / "tag/shard").write_bytes(DATA["old"])
    (root / "tag/manifest").write_bytes(b"old")


def which(folder):
    """'old' or 'new' of a folder that is wholly so; fails the test for any other."""
    content = power_cut.tree(folder)
    assert set(content) == {"shard", "manifest"}
    version = content["manifest"].decode()
    assert content["shard"] == DATA[version]
    return version


def test_a_committed_folder_is_the_old_or_the_new(root, tmp_path):
    make_old(root)
    found = [which(folder / "tag") for folder in states(root, COMMIT, tmp_path)]
    assert found[0] == "old" and "new" in found
    assert set(last_cut(found)) == {"new"}


def test_a_first_folder_is_there_wholly_or_not_at_all(root, tmp_path):
    found = {"tag" in os.listdir(folder) and which(folder / "tag") for folder in states(root, COMMIT, tmp_path)}
    assert found == {False, "new"}


def exchange_number(root):
    """The operation of COMMIT that exchanges the folders."""
    _, operations = journal_of(root, COMMIT)
    calls = [operation[0] for operation in operations if operation[0] != "sync_begin"]
    shutil.rmtree(root)
    root.mkdir()
    make_old(root)
    return calls.index("exchange") + 1


def test_where_folders_cannot_be_exchanged_the_old_or_the_new_is_found(root, tmp_path):
    make_old(root)
    at = exchange_number(root)
    disk = power_cut.Disk(root)
    done = run(root, COMMIT, at=at, action="fail", error=errno.EINVAL, journal=tmp_path / "nfs")
    assert done.stdout.strip() == str(root / "next.replaced"), done.stderr
    assert which(root / "next.replaced") == "old" and which(root / "tag") == "new"
    found = set()
    for number, operation in enumerate(power_cut.read_journal(tmp_path / "nfs")):
        disk.apply(operation)
        for folder in cuts(disk, tmp_path, number):
            place = "tag" if (folder / "tag").exists() else "next.replaced"
            found.add((place, which(folder / place)))
    assert found == {("tag", "old"), ("next.replaced", "old"), ("tag", "new")}


def test_a_process_killed_at_any_operation_leaves_the_old_or_the_new(root):
    make_old(root)
    number, found = 1, []
    while True:
        done = run(root, COMMIT, at=number, action="tear" if number % 2 else "kill")
        found.append(which(root / "tag"))
        if done.returncode == 0:
            break
        assert done.returncode == -9, done.stderr
        shutil.rmtree(root)
        root.mkdir()
        make_old(root)
        number += 1
    assert number > 10 and set(found) == {"old", "new"} and found == sorted(found, reverse=True)


def test_a_full_disk_is_named_at_every_operation(root):
    make_old(root)
    number, found = 1, []
    while (done := run(root, COMMIT, at=number, action="fail_on", error=errno.ENOSPC)).returncode != 0:
        assert "No space left on device" in done.stderr.splitlines()[-1]
        found.append(which(root / "tag"))
        assert found[-1] == "old" or "[ckpt] sync" in done.stderr  # of the folder, after the exchange
        shutil.rmtree(root)
        root.mkdir()
        make_old(root)
        number += 1
    assert number > 10 and found.count("new") == 1


def test_short_writes_are_completed(root):
    for number in range(1, 12):
        done = run(root, COMMIT, at=number, action="short")
        assert done.returncode == 0, done.stderr
        assert which(root / "tag") == "new"
        shutil.rmtree(root)
        root.mkdir()


def test_only_the_folder_is_touched(root, tmp_path):
    script = f"Path({str(tmp_path / 'outside')!r}).write_bytes(b'x'); Path({str(root) + 'less'!r}).write_bytes(b'x')"
    assert run(root, script, at=1, action="kill").returncode == 0

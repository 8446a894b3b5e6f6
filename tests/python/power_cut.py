"""Disks that fail and power that is cut, for tests of what must survive both.

A process that runs in the environment of `faults()` has its operations on one folder counted, failed, killed and
journalled by tests/cpp/ckpt/faulty_fs.cpp. `Disk` replays the journal into what could be on the disk when the power is
cut after any of them. It promises no more than POSIX does: what was written to a file since its last fsync, and what
happened to a folder's entries since the folder's, may have reached the disk or not, each on its own.
"""

import ctypes
import itertools
import os
import random
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = 4096


def library():
    """The newest build of faulty_fs.cpp without sanitizers."""
    built = [path for preset in ("dev", "ci") for path in ROOT.glob(f"build/{preset}/tests/cpp/libzc_faulty_fs.so")]
    if not built:
        raise FileNotFoundError("libzc_faulty_fs.so was not built: use make test, or configure with ZC_BUILD_TESTS=ON")
    return max(built, key=lambda path: path.stat().st_mtime)


def faults(root, *, at=0, action="", error=0, journal=""):
    """The variables of faulty_fs.cpp, which says what they mean; with LD_PRELOAD for a process of its own."""
    return {
        "LD_PRELOAD": str(library()),
        "ZC_FAULTY_ROOT": str(Path(root).resolve()),
        "ZC_FAULTY_AT": str(at),
        "ZC_FAULTY_ACTION": action,
        "ZC_FAULTY_ERRNO": str(error),
        "ZC_FAULTY_JOURNAL": str(journal),
    }


def begin(**variables):
    """In a process with the library loaded: from here on these variables hold, and operations count from 1."""
    os.environ.update({"ZC_FAULTY_ROOT": "", **variables})
    ctypes.CDLL(None).zc_faulty_begin()


def count():
    """How many operations there were since begin()."""
    return int(ctypes.CDLL(None).zc_faulty_count())


def read_journal(path):
    """A list of (operation, *fields, data of a write)."""
    operations = []
    journal = Path(path).read_bytes()
    at = 0
    while at < len(journal):
        end = journal.index(b"\n", at)
        name, *fields = os.fsdecode(journal[at:end]).split("\t")
        at = end + 1
        if name == "write":
            size = int(fields[2])
            fields[2] = journal[at : at + size]
            at += size
        operations.append((name, *fields))
    return operations


class Node:
    """A file or a folder: what is on the disk for sure, and the changes since, each of which may be there or not."""

    def __init__(self, durable):
        self.durable = durable
        self.pending = []
        self.syncs = []  # how many changes each sync under way will make durable

    def begin_sync(self):
        self.syncs.append(len(self.pending))

    def end_sync(self):
        count = self.syncs.pop(0)
        self.durable = self.after(self.durable, self.pending[:count])
        del self.pending[:count]
        self.syncs = [max(other - count, 0) for other in self.syncs]

    def state(self, keep):
        """What is there when those changes are that `keep` (a function of parts of them) chooses."""
        return self.after(self.durable, [change for whole in self.pending for change in self.parts(whole) if keep()])


class File(Node):
    """Bytes; a change is (offset, data) or ("size" or "extend", length)."""

    @staticmethod
    def parts(change):
        """The pages of a write: a power cut may tear it between them."""
        offset, data = change
        if isinstance(offset, str):
            return [change]
        cuts = [0, *range(PAGE - offset % PAGE, len(data), PAGE), len(data)]
        return [(offset + a, data[a:b]) for a, b in itertools.pairwise(cuts)]

    @staticmethod
    def after(durable, changes):
        content = bytearray(durable)
        for offset, data in changes:
            if isinstance(offset, str):
                length = data if offset == "size" else max(data, len(content))
                del content[length:]
                content.extend(bytes(length - len(content)))
            else:
                content.extend(bytes(max(offset + len(data) - len(content), 0)))
                content[offset : offset + len(data)] = data
        return bytes(content)


class Folder(Node):
    """Nodes by name; a change is a dict of the names that one operation set, with None for those that it removed."""

    @staticmethod
    def parts(change):
        return [change]

    @staticmethod
    def after(durable, changes):
        entries = dict(durable)
        for change in changes:
            entries |= change
        return {name: node for name, node in entries.items() if node is not None}

    def now(self):
        return self.state(lambda: True)


class Disk:
    """What may be on the disk under a folder. Made before the process runs: all that is there then is durable."""

    def __init__(self, root):
        self.nodes = {}
        self.root = self._load(Path(root))

    def _load(self, path):
        if path.is_dir():
            node = Folder({child.name: self._load(child) for child in path.iterdir()})
        else:
            node = File(path.read_bytes())
        self.nodes[path.stat().st_ino] = node
        return node

    def _folder(self, path):
        folder = self.root
        for name in Path(path).parent.parts:
            folder = folder.now()[name]
        return folder, Path(path).name

    def apply(self, operation):
        """Goes on by one operation of the journal."""
        name, *fields = operation
        if name in ("create", "mkdir"):
            node = self.nodes[int(fields[0])] = File(b"") if name == "create" else Folder({})
            folder, entry = self._folder(fields[1])
            folder.pending.append({entry: node})
        elif name == "remove":
            folder, entry = self._folder(fields[1])
            folder.pending.append({entry: None})
        elif name in ("rename", "exchange"):
            (folder_a, a), (folder_b, b) = map(self._folder, fields)
            node_a, node_b = folder_a.now()[a], folder_b.now()[b] if name == "exchange" else None
            if folder_a is folder_b:
                folder_a.pending.append({a: node_b, b: node_a})
            else:
                folder_a.pending.append({a: node_b})
                folder_b.pending.append({b: node_a})
        elif name == "write":
            self.nodes[int(fields[0])].pending.append((int(fields[1]), fields[2]))
        elif name in ("size", "extend"):
            self.nodes[int(fields[0])].pending.append((name, int(fields[1])))
        elif name == "sync_begin":
            self.nodes[int(fields[0])].begin_sync()
        elif name == "sync":
            self.nodes[int(fields[0])].end_sync()
        else:
            raise ValueError(f"the journal has an operation {name!r}")

    def build(self, to, *, names, data):
        """Makes the folder `to` as the disk may look after a power cut.

        Args:
            to: a path where nothing is.
            names: of the changes to folders since their fsync, which have reached the disk: a function that is called
                once for each, in their order.
            data: of the changes to files, likewise, once for each page.
        """
        self._build(self.root, Path(to), names, data)

    def _build(self, node, to, names, data):
        if isinstance(node, File):
            to.write_bytes(node.state(data))
            return
        to.mkdir()
        for name, child in node.state(names).items():
            self._build(child, to / name, names, data)


def all_of_it():
    return True


def none_of_it():
    return False


def some_of_it(seed):
    toss = random.Random(seed)
    return lambda: toss.random() < 0.5


def cases(seed, *, num_random=3):
    """(a name, names, data) for Disk.build: the extremes, and some at random."""
    return [
        ("nothing_kept", none_of_it, none_of_it),
        ("names_kept_data_lost", all_of_it, none_of_it),
        ("names_lost_data_kept", none_of_it, all_of_it),
        ("all_kept", all_of_it, all_of_it),
        *(
            (f"some_kept_{i}", some_of_it(f"names {seed} {i}"), some_of_it(f"data {seed} {i}"))
            for i in range(num_random)
        ),
    ]


def tree(root):
    """{relative path: bytes, or None for a folder} of all below."""
    root = Path(root)
    return {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes() for path in sorted(root.rglob("*"))
    }

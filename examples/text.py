"""Text to train on, as bytes: Python's own standard library, or any folder."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

# Of the standard library: what is not part of it, its tests, and tables.
NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


def load_text(folder: Path | None = None) -> tuple[bytes, bytes]:
    """Training and validation text: every 20th file is held out. By default the standard library's own source."""
    if folder is None:
        folder, pattern, unwanted = Path(sysconfig.get_path("stdlib")), "*.py", NOT_SOURCE.__contains__
    else:
        pattern, unwanted = "*", lambda part: part.startswith(".")
    relative = sorted(path.relative_to(folder) for path in folder.rglob(pattern) if path.is_file())
    files = [folder / path for path in relative if not any(map(unwanted, path.parts))]
    held_out = set(files[19::20] or files[-1:])
    train = b"\n".join(path.read_bytes() for path in files if path not in held_out)
    validation = b"\n".join(path.read_bytes() for path in files if path in held_out)
    return train, validation


class Windows(torch.utils.data.Dataset):
    """A text cut into windows of `seq` bytes. Sample i is (bytes, the byte after each), int64, (seq,)."""

    def __init__(self, text: bytes, *, seq: int):
        self.text, self.seq = torch.frombuffer(bytearray(text), dtype=torch.uint8), seq

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.seq

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.text[i * self.seq : (i + 1) * self.seq + 1].long()
        return window[:-1], window[1:]

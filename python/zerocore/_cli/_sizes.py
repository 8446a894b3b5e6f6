"""Sizes as arguments: 500MB, 5GB, 80G, 2GiB."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS |= {_letter: 1000**_power, f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}


def size(text: str) -> int:
    """Bytes; for argparse, which reports the ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", text.strip().upper())
    if match is None or match[2] not in _UNITS or float(match[1]) == 0:
        raise ValueError(text)
    return int(float(match[1]) * _UNITS[match[2]])


size.__name__ = "size like 500MB or 5GB"  # for messages

"""The hash of checkpoints: XXH3 with 64 bits, as a function that the core can call."""

from __future__ import annotations

import ctypes
import functools
import importlib

import xxhash

from zerocore.errors import UnsupportedError


@functools.cache
def hash_address() -> int:
    """The address of `uint64_t XXH3_64bits(const void *data, size_t bytes)`, for `hash=` of the core's calls.

    The xxhash package's extension module exports the function, or is linked to the library that does.

    Raises:
        UnsupportedError: neither is so, or the function is another one.
    """
    try:
        function = ctypes.CDLL(importlib.import_module("xxhash._xxhash").__file__).XXH3_64bits
    except (AttributeError, OSError) as error:
        raise UnsupportedError(_what_is_wrong(str(error))) from None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    function.restype = ctypes.c_uint64
    sample = bytes(range(256)) * 3  # longer than XXH3's short forms
    if function(sample, len(sample)) != xxhash.xxh3_64_intdigest(sample):
        raise UnsupportedError(_what_is_wrong("its XXH3_64bits gives other values than its Python function"))
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _what_is_wrong(got: str) -> str:
    return (
        f"[ckpt] the checksum function of the package xxhash {xxhash.VERSION} cannot be called: got {got}, expected a "
        "module that exports XXH3_64bits. Install it from PyPI: pip install --force-reinstall xxhash"
    )

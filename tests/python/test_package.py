"""What `import zerocore` does, and what it does not."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import zerocore


def run(code):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=True
    )


def test_import_is_quick_and_has_no_side_effects():
    out = run(
        """
        import sys, threading, time, torch
        before, threads = set(sys.modules), threading.active_count()
        times = []
        start = time.process_time()
        import zerocore
        print(time.process_time() - start)
        loaded = set(sys.modules) - before
        assert not any(name.startswith(("mpi4py", "pydantic", "zerocore._core")) for name in loaded), loaded
        assert threading.active_count() == threads
        assert not torch.cuda.is_initialized()
        """
    ).stdout
    assert float(out) < 0.3


def test_what_needs_no_torch_imports_none():
    """The launcher, its channel and the checkpoint tools start on every rank, or on machines without torch's memory."""
    out = run(
        """
        import sys, time
        start = time.process_time()
        import zerocore
        print(time.process_time() - start)
        import zerocore._comm, zerocore._core, zerocore._departure, zerocore._launch, zerocore.config, zerocore.errors
        assert not any(name.split(".")[0] in ("torch", "numpy", "mpi4py") for name in sys.modules)
        """
    ).stdout
    assert float(out) < 0.3


def test_the_whole_package_loads_quickly_too():
    """CPU seconds, so that a busy machine does not count; `Engine` loads everything."""
    out = run(
        """
        import time, torch, torch.utils.data
        start = time.process_time()
        import zerocore
        zerocore.Engine
        print(time.process_time() - start)
        """
    ).stdout
    assert float(out) < 0.3


def test_public_names():
    for name in zerocore.__all__:
        assert getattr(zerocore, name) is not None
    assert set(zerocore.__all__) <= set(dir(zerocore))
    with pytest.raises(AttributeError, match="no attribute 'Engin'"):
        zerocore.Engin  # noqa: B018

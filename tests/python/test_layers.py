"""The layers of docs/design.md: a file includes its own layer and those before it, and nothing else of the project."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "cpp" / "zc"
CUDA = ROOT / "cuda" / "zc" / "cuda"  # may include all layers of the core; nothing includes it but bindings and tests
LAYERS = ["base", "math", "device", "comm", "io", "optim", "zero", "ckpt", "engine"]

PLUGIN = CORE / "comm" / "mpi_plugin.cpp"
PLUGIN_API = CORE / "comm" / "mpi_plugin_api.h"
PLUGIN_INCLUDES = {"<mpi.h>", '"zc/comm/mpi_plugin_api.h"'}

SOURCES = sorted(path for path in CORE.rglob("*") if path.suffix in {".h", ".cpp"})
BINDINGS = sorted((ROOT / "python" / "src").iterdir())
PACKAGE = sorted((ROOT / "python" / "zerocore").rglob("*.py"))


def includes(path):
    """The included names with their quotes or brackets."""
    return re.findall(r'^\s*#\s*include\s*("[^"]+"|<[^>]+>)', path.read_text(), re.M)


def is_standard(name):
    """C++ and the system's headers have no folder but a few; those of libraries do, or are named in FOREIGN."""
    return name[0] == "<" and (
        re.fullmatch(r"<((sys|arpa|netinet|linux)/)?[a-z0-9_]+(\.h)?>", name) and name not in FOREIGN
    )


FOREIGN = {"<mpi.h>", "<Python.h>"}


def allowed_layers(layer):
    return LAYERS[: LAYERS.index(layer) + 1]


def test_every_folder_is_a_layer():
    assert sorted(path.name for path in CORE.iterdir() if path.is_dir()) == sorted(LAYERS)


@pytest.mark.parametrize("layer", LAYERS)
def test_core_includes_earlier_layers_only(layer):
    wrong = []
    for path in SOURCES:
        if path.relative_to(CORE).parts[0] != layer or path == PLUGIN:
            continue
        for name in includes(path):
            own = re.fullmatch(r'"zc/(\w+)/\w+\.h"', name)
            if not (own and own[1] in allowed_layers(layer)) and not is_standard(name):
                wrong.append(f"{path.relative_to(ROOT)}: {name}")
    assert not wrong


def test_cuda_includes_the_core_and_itself():
    files = sorted(CUDA.iterdir())
    wrong = [
        f"{path.name}: {name}"
        for path in files
        for name in includes(path)
        if not re.fullmatch(rf'"zc/({"|".join([*LAYERS, "cuda"])})/\w+\.h"', name) and not is_standard(name)
    ]
    assert not wrong


def test_cuda_calls_are_in_two_sources():
    """Everything else compiles, and runs in tests, without CUDA."""
    pattern = re.compile(r"\bcuda[A-Z]\w+\(|<<<|<cuda_runtime")
    found = {path.name for path in CUDA.iterdir() if pattern.search(path.read_text())}
    assert found == {"launch.cu", "cuda_runtime.cpp"}


def test_mpi_plugin_holds_no_code_of_the_core():
    wrong = [name for name in includes(PLUGIN) if name not in PLUGIN_INCLUDES and not is_standard(name)]
    assert not wrong
    assert all(is_standard(name) for name in includes(PLUGIN_API))


def test_bindings_take_no_torch_and_no_mpi():
    allowed = re.compile(r'<pybind11/[\w/]+\.h>|"zc/\w+/\w+\.h"|"\w+\.h"')
    wrong = [
        f"{path.name}: {name}"
        for path in BINDINGS
        for name in includes(path)
        if not is_standard(name) and not allowed.fullmatch(name)
    ]
    assert not wrong


def test_bindings_call_no_python_from_the_core():
    assert not [path for path in SOURCES if "pybind11" in path.read_text()]


def imported(path):
    """The top-level names a Python file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0]


def test_config_and_errors_need_no_torch():
    """Configurations are read and checked where no torch is loaded: by tools, and before a job starts."""
    modules = [ROOT / "python/zerocore/errors.py", *(ROOT / "python/zerocore/config").glob("*.py")]
    assert not [path.name for path in modules if {"torch", "mpi4py", "numpy"} & set(imported(path))]


def test_mpi4py_is_imported_in_one_place():
    assert {path.name for path in PACKAGE if "mpi4py" in set(imported(path))} == {
        "_comm.py",
        "mpi.py",
    }  # the launcher looks up its library


def test_find_package_is_called_in_third_party_only():
    folders = [
        ROOT / "CMakeLists.txt",
        *(ROOT / name for name in ("cpp", "cuda", "python", "tests", "bench", "third_party")),
    ]
    files = [f for folder in folders for f in ([folder] if folder.is_file() else folder.rglob("CMakeLists.txt"))]
    assert [str(f.relative_to(ROOT)) for f in files if re.search(r"^\s*find_package\(", f.read_text(), re.M)] == [
        "third_party/CMakeLists.txt"
    ]

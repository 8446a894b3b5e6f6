"""What was built: the shared libraries' dependencies, and that lists kept by hand are complete."""

import ast
import re
import subprocess
from pathlib import Path

import pytest
import zerocore._core

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = Path(zerocore._core.__file__).parent
PLUGINS = sorted(INSTALLED.glob("libzc_mpi_*.so"))


def dynamic_section(path):
    """The entries of an ELF file's dynamic section that name libraries or paths: {tag: [values]}."""
    text = subprocess.run(["readelf", "-dW", path], capture_output=True, text=True, check=True).stdout
    entries = {}
    for tag, value in re.findall(r"\((NEEDED|RPATH|RUNPATH)\).*\[(.*)\]", text):
        entries.setdefault(tag, []).append(value)
    return entries


def test_core_needs_no_torch_no_mpi_and_no_python_library():
    entries = dynamic_section(zerocore._core.__file__)
    assert set(entries) == {"NEEDED"}
    assert not [name for name in entries["NEEDED"] if re.search(r"torch|c10|mpi|python", name)]


def test_core_exports_its_entry_point_only():
    command = ["nm", "-D", "--defined-only", zerocore._core.__file__]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [line.split()[-1] for line in symbols.splitlines()] == ["PyInit__core"]


def test_a_plugin_was_built():
    """Without one every test on several ranks would fail with a message of its own; this names the cause."""
    assert PLUGINS, "the build found no MPI: see the line '-- MPI' of its configuration"


@pytest.mark.parametrize("path", PLUGINS, ids=lambda path: path.name)
def test_plugin_takes_the_libmpi_that_is_loaded_already(path):
    entries = dynamic_section(path)
    assert [name for name in entries["NEEDED"] if re.match(r"libmpi(ch)?\.so", name)]
    assert set(entries) == {"NEEDED"}, "a search path would bring in a second libmpi"


@pytest.mark.parametrize("folder", ["cpp", "cuda", "python", "tests/cpp", "bench"])
def test_every_source_is_in_its_list(folder):
    listed = set(re.findall(r"[\w/]+\.(?:cpp|cu)\b", (ROOT / folder / "CMakeLists.txt").read_text()))
    sources = [path for path in (ROOT / folder).rglob("*") if path.suffix in {".cpp", ".cu"}]
    present = {str(path.relative_to(ROOT / folder)) for path in sources}
    assert present - listed == ({"zc/comm/mpi_plugin.cpp"} if folder == "cpp" else set())


def names(nodes):
    """Of the classes, functions and attributes that a part of the stub declares."""
    defined = {node.name for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    return defined | {node.target.id for node in nodes if isinstance(node, ast.AnnAssign)}


def test_stub_names_what_the_module_has():
    stub = ast.parse((ROOT / "python/zerocore/_core.pyi").read_text()).body
    module = {name for name in vars(zerocore._core) if not name.startswith("_")}
    assert {name for name in names(stub) if not name.startswith("_")} == module
    for node in stub:
        real = getattr(zerocore._core, getattr(node, "name", ""), None)
        if isinstance(node, ast.ClassDef) and not hasattr(real, "__members__"):
            described = {name for name in names(node.body) if not name.startswith("_")}
            assert described == {name for name in vars(real) if not name.startswith("_")}, node.name

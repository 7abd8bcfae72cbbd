"""Who may import whom, and who may import torch."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import everyrank

PACKAGE = Path(everyrank.__file__).parent

# Each imports only what stands above it. A folder counts as one place; inside it imports make no circle.
ORDER = [
    "_version",
    "errors",
    "fields",
    "workload",
    "layout",
    "record",
    "options",
    "progress",
    "launch",
    "runs",
    "backends",
    "world",
    "data",
    "datasets",
    "builtin",
    "parallel",
    "strategies",
    "loop",
    "measure",
    "script",
    "collectives",
    "checkpoint",
    "train",
    "prediction",
    "plan",
    "parity",
    "benchmark",
    "doctor",
    "audit",
    "rerun",
    "relations",
    "port",
    "repair",
    "report",
    "recipes",
    "eject",
    "api",
    "chaos",
    "testing",
    "pytest_plugin",
    "watch",
    "commands",
    "cli",
]
# The face of the package, and who starts it.
FACES = {"__init__", "__main__"}
TORCH_FREE = {
    "_version",
    "errors",
    "workload",
    "layout",
    "record",
    "options",
    "progress",
    "runs",
    "launch",
    "report",
    "api",
    "chaos",
    "testing",
    "commands",
    "cli",
    "__init__",
}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if "recipes" not in path.parts)


def name_of(path: Path) -> tuple[str, ...]:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts


def imports(path: Path, source: str) -> list[tuple[str, bool]]:
    """(module, whether at the top level) of every import that is not for type checkers alone."""
    tree = ast.parse(source)
    checking = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    top = {id(node) for node in tree.body}
    found: list[tuple[str, bool]] = []
    for node in ast.walk(tree):
        if id(node) in checking:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide who imports whom"
            found += [(f"{node.module}.{alias.name}", id(node) in top) for alias in node.names]
    return found


def test_every_room_has_a_place() -> None:
    """A new room, or a file beside the rooms, is put into the order."""
    assert {name_of(path)[0] for path in modules()} | {"recipes"} == set(ORDER) | FACES


def upward(path: Path, source: str) -> list[str]:
    """The rooms that this module imports although they stand below its own."""
    own = name_of(path)[0]
    rooms = [module.split(".")[1] for module, _ in imports(path, source) if module.startswith("everyrank.")]
    return [room for room in rooms if room != own and ORDER.index(room) > ORDER.index(own)]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    """A module imports only rooms above its own; `cli` imports everything and nobody imports `cli`."""
    if name_of(path)[0] not in FACES:
        assert upward(path, path.read_text()) == []


def test_an_import_that_goes_back_up_is_found() -> None:
    """Also inside a function; not one for type checkers alone."""
    errors, inside = PACKAGE / "errors.py", "def f():\n    from everyrank.cli import main\n"
    assert upward(errors, inside) == ["cli"]
    assert upward(PACKAGE / "cli.py", inside.replace("cli", "errors")) == []
    assert upward(errors, f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n{inside.partition(chr(10))[2]}") == []
    with pytest.raises(graphlib.CycleError):
        inside_order({"a": {"b"}, "b": {"c"}, "c": {"a"}})


def inside_order(graph: dict[str, set[str]]) -> list[str]:
    """The modules so that each comes after what it imports. Raises `graphlib.CycleError`."""
    return list(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("room", sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")))
def test_rooms_have_no_circles(room: str) -> None:
    """The modules of a room can be read in an order in which nothing is used before it has been read."""
    paths = {".".join(["everyrank", *name_of(path)]): path for path in modules() if name_of(path)[0] == room}
    graph: dict[str, set[str]] = {name: set() for name in paths}
    for name, path in paths.items():
        if path.name == "__init__.py":
            continue  # the face of a folder shows what is in it
        for module, _ in imports(path, path.read_text()):
            found = next((other for other in (module, module.rpartition(".")[0]) if other in paths), None)
            if found not in (None, name):
                graph[name].add(found)
    inside_order(graph)


def test_rooms_list_their_files() -> None:
    """The docstring of a room that names its files names all that are there, and no others."""
    for face in PACKAGE.rglob("__init__.py"):
        listed = re.findall(r"^ *(\w+(?:\.py|/)) ", ast.get_docstring(ast.parse(face.read_text())) or "", re.MULTILINE)
        if listed:
            files = {path.name for path in face.parent.glob("*.py")} - {"__init__.py"}
            folders = {f"{path.parent.name}/" for path in face.parent.glob("*/*.py")}
            assert sorted(listed) == sorted(files | folders), face


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_who_imports_torch(path: Path) -> None:
    """Modules that need no torch import none at the top."""
    if name_of(path)[0] in TORCH_FREE:
        assert not [
            module for module, at_top in imports(path, path.read_text()) if at_top and module.split(".")[0] == "torch"
        ]


def test_help_imports_no_torch() -> None:
    """What makes `everyrank --help` fast."""
    code = (
        "import sys, everyrank.cli\n"
        "try: everyrank.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'numpy', 'matplotlib', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"


def test_all_names_exist() -> None:
    """`__all__` of every module names what is there, in order."""
    import importlib

    for path in modules():
        # Ray is an extra, and `everyrank.watch` watches whoever imports it
        if path.name in ("__main__.py", "ray_driver.py", "ray_room.py") or path == PACKAGE / "watch.py":
            continue
        name = ".".join(("everyrank", *(part for part in name_of(path) if part != "__init__")))
        module = importlib.import_module(name)
        names = getattr(module, "__all__", [])
        assert len(set(names)) == len(names)
        for entry in names:
            assert hasattr(module, entry), f"{name} has no {entry}"


def test_no_environment_variable_as_a_message() -> None:
    """No module of ours writes the environment: what travels between our modules are arguments.

    Three write it for a while: torch's profiler can be asked for silence in no other way, gloo for an interface, and
    Horovod told which rank this is.
    """
    world = PACKAGE / "world"
    for path in modules():
        if path in (PACKAGE / "measure" / "profiling.py", world / "process_group.py", world / "horovod.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assign | ast.AugAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                assert not any("os.environ" in ast.unparse(target) for target in targets), path


def test_strategies_are_a_file_and_a_line() -> None:
    """Every row of the table has a file and a recipe, and every file of strategies/ is in a row."""
    from everyrank.layout import STRATEGIES

    files = {path.stem for path in (PACKAGE / "strategies").glob("*.py") if not path.stem.startswith("_")}
    rows = {row.module.rpartition(".")[2] for row in STRATEGIES.values()}
    assert files - {"step"} == rows | {"custom"}  # the step of them all, and the file of custom parallel code
    recipes = {path.stem for path in (PACKAGE / "recipes").glob("*.py")}
    others = {"ddp": "ddp_torchrun", "horovod": "horovod_ddp"}  # a horovod.py would import itself
    assert {others.get(name, name) for name in STRATEGIES} <= recipes


# One name for one thing in all rooms; these are what several files of a kind have by agreement.
SHARED = {
    "HELP": "a command's line in --help",
    "EXAMPLES": "the lines at the end of its --help",
    "LAUNCHER": "a launcher's row",
    "T": "a type variable",
    "add_arguments": "what a command takes",
    "main": "a module that is run",
    "prepare": "a strategy",
    "simulate": "a simulation",
    "run": "what a command does; in api.py, the call from Python",
    "workload": "a file of a workload, as a person would write one",
}


def public_names() -> dict[str, list[str]]:
    """Name -> the modules that define it, of functions, classes and constants at the top level."""
    found: dict[str, list[str]] = {}
    for path in modules():
        for node in ast.parse(path.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            names += [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
            for name in names:
                if not name.startswith("_"):
                    found.setdefault(name, []).append(".".join(name_of(path)))
    return found


def test_no_name_for_two_things() -> None:
    """A public name is defined in one place, so that whoever reads it anywhere knows what it is."""
    twice = {name: places for name, places in public_names().items() if len(places) > 1 and name not in SHARED}
    assert not twice
    assert len(public_names()["prepare"]) > 1, "the search finds names that are there twice"

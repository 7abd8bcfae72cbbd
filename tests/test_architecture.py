"""Import order of modules, modules without torch, public names and docstrings of packages."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import symtable
import sys
from pathlib import Path

import pytest

import everyrank

PACKAGE = Path(everyrank.__file__).parent

# Each package or module imports only those above it. Imports inside a package have no cycle.
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
# The package itself and `python -m everyrank` may import everything.
ENTRY_POINTS = {"__init__", "__main__"}
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
    """Return the files of all modules except recipes."""
    return sorted(path for path in PACKAGE.rglob("*.py") if "recipes" not in path.parts)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file. Several tests read all files."""
    return ast.parse(path.read_text())


def name_of(path: Path) -> tuple[str, ...]:
    """Return the parts of the module's name, without "everyrank"."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts


def imports(path: Path, source: str) -> list[tuple[str, bool]]:
    """Return (module, whether at the top level) of every import outside `if TYPE_CHECKING`."""
    tree = ast.parse(source)
    type_checking_nodes = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    top_level_nodes = {id(node) for node in tree.body}
    imported: list[tuple[str, bool]] = []
    for node in ast.walk(tree):
        if id(node) in type_checking_nodes:
            continue
        if isinstance(node, ast.Import):
            imported += [(alias.name, id(node) in top_level_nodes) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide who imports whom"
            imported += [(f"{node.module}.{alias.name}", id(node) in top_level_nodes) for alias in node.names]
    return imported


def test_order_lists_every_package_and_module() -> None:
    """A new package or top-level module must be added to ORDER."""
    assert {name_of(path)[0] for path in modules()} | {"recipes"} == set(ORDER) | ENTRY_POINTS


def imports_against_the_order(path: Path, source: str) -> list[str]:
    """Return the packages that this module imports although they are below its own in ORDER."""
    own_package = name_of(path)[0]
    packages = [module.split(".")[1] for module, _ in imports(path, source) if module.startswith("everyrank.")]
    return [
        package for package in packages if package != own_package and ORDER.index(package) > ORDER.index(own_package)
    ]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_follow_the_order(path: Path) -> None:
    """`cli` may import everything, and no module imports `cli`."""
    if name_of(path)[0] not in ENTRY_POINTS:
        assert imports_against_the_order(path, path.read_text()) == []


def test_imports_against_the_order_and_cycles_are_detected() -> None:
    """Imports inside functions count. Imports for type checkers do not."""
    errors, inside = PACKAGE / "errors.py", "def f():\n    from everyrank.cli import main\n"
    assert imports_against_the_order(errors, inside) == ["cli"]
    assert imports_against_the_order(PACKAGE / "cli.py", inside.replace("cli", "errors")) == []
    assert (
        imports_against_the_order(
            errors, f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n{inside.partition(chr(10))[2]}"
        )
        == []
    )
    with pytest.raises(graphlib.CycleError):
        topological_order({"a": {"b"}, "b": {"c"}, "c": {"a"}})


def topological_order(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules so that each comes after its imports. Raises `graphlib.CycleError`."""
    return list(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("package", sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")))
def test_packages_have_no_import_cycles(package: str) -> None:
    """`__init__.py` is excluded, because it imports all modules of its package."""
    paths = {".".join(["everyrank", *name_of(path)]): path for path in modules() if name_of(path)[0] == package}
    graph: dict[str, set[str]] = {name: set() for name in paths}
    for name, path in paths.items():
        if path.name == "__init__.py":
            continue  # it re-exports the names of its package
        for module, _ in imports(path, path.read_text()):
            imported = next(
                (candidate for candidate in (module, module.rpartition(".")[0]) if candidate in paths), None
            )
            if imported not in (None, name):
                graph[name].add(imported)
    topological_order(graph)


def test_package_docstrings_list_all_files() -> None:
    """A docstring of a package that lists files lists all of its files, and no others."""
    for init_path in PACKAGE.rglob("__init__.py"):
        listed = re.findall(
            r"^ *(\w+(?:\.py|/)) ", ast.get_docstring(ast.parse(init_path.read_text())) or "", re.MULTILINE
        )
        if listed:
            files = {path.name for path in init_path.parent.glob("*.py")} - {"__init__.py"}
            folders = {f"{path.parent.name}/" for path in init_path.parent.glob("*/*.py")}
            assert sorted(listed) == sorted(files | folders), init_path


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_without_torch_do_not_import_it(path: Path) -> None:
    """They may import torch inside functions."""
    if name_of(path)[0] in TORCH_FREE:
        assert not [
            module for module, at_top in imports(path, path.read_text()) if at_top and module.split(".")[0] == "torch"
        ]


REPOSITORY = Path(__file__).parents[1]
# folders on the path of tests or benchmarks, and the modules of everyrank
SEARCH_PATH = [REPOSITORY / "tests", REPOSITORY / "benchmarks", PACKAGE.parent]


@functools.cache
def names_defined_in(file: Path) -> set[str]:
    """Return the names that a module assigns, defines or imports at its top level."""
    symbols = symtable.symtable(file.read_text(), str(file), "exec").get_symbols()
    return {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}


def missing_names(source: str) -> list[str]:
    """Return the names that this source imports from a file of ours that does not define them."""
    missing: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom) or node.module in (None, "everyrank"):  # its names are loaded late
            continue
        path = Path(*node.module.split("."))
        for file in [folder / path.with_suffix(".py") for folder in SEARCH_PATH]:
            if file.exists():
                names = {alias.name for alias in node.names} - names_defined_in(file)
                missing += [f"{node.module}.{name}" for name in sorted(names)]
                break
    return missing


def test_imported_names_of_tests_and_benchmarks_exist() -> None:
    """`make test` does not import the integration tests and benchmarks, so it would not see a name that is gone."""
    files = [*(REPOSITORY / "tests").rglob("*.py"), *(REPOSITORY / "benchmarks").rglob("*.py")]
    assert {str(file): names for file in files if (names := missing_names(file.read_text()))} == {}
    assert missing_names("from processes import Cli, NoSuchName") == ["processes.NoSuchName"]


def test_help_imports_no_torch() -> None:
    """This keeps `everyrank --help` fast."""
    code = (
        "import sys, everyrank.cli\n"
        "try: everyrank.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'numpy', 'matplotlib', 'jinja2') if m in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout.splitlines()[-1] == "[]"


def test_names_in_all_exist_once() -> None:
    """Every name in `__all__` is unique and exists in its module."""
    import importlib

    for path in modules():
        # Ray is an extra, and importing `everyrank.watch` starts watching
        if path.name in ("__main__.py", "ray_driver.py", "ray_room.py") or path == PACKAGE / "watch.py":
            continue
        name = ".".join(("everyrank", *(part for part in name_of(path) if part != "__init__")))
        module = importlib.import_module(name)
        names = getattr(module, "__all__", [])
        assert len(set(names)) == len(names)
        for entry in names:
            assert hasattr(module, entry), f"{name} has no {entry}"


def test_modules_do_not_write_environment_variables() -> None:
    """Modules pass values as arguments.

    Three modules write variables temporarily: torch's profiler, gloo and Horovod have settings that nothing else sets.
    """
    world = PACKAGE / "world"
    for path in modules():
        if path in (PACKAGE / "measure" / "profiling.py", world / "process_group.py", world / "horovod.py"):
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Assign | ast.AugAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                assert not any("os.environ" in ast.unparse(target) for target in targets), path


def test_every_strategy_has_a_file_and_a_recipe() -> None:
    """Every strategy in the table has both, and every file of strategies/ is in the table."""
    from everyrank.layout import STRATEGIES

    files = {path.stem for path in (PACKAGE / "strategies").glob("*.py") if not path.stem.startswith("_")}
    rows = {row.module.rpartition(".")[2] for row in STRATEGIES.values()}
    assert files - {"step"} == rows | {"custom"}  # the step that all share, and custom parallel code
    recipes = {path.stem for path in (PACKAGE / "recipes").glob("*.py")}
    renamed_recipes = {"ddp": "ddp_torchrun", "horovod": "horovod_ddp"}  # a horovod.py would import itself
    assert {renamed_recipes.get(name, name) for name in STRATEGIES} <= recipes


# Each public name is defined once. These names are conventions of several files of one kind.
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
    """Return name -> defining modules, of functions, classes and constants at the top level."""
    modules_by_name: dict[str, list[str]] = {}
    for path in modules():
        for node in tree_of(path).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            names += [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
            for name in names:
                if not name.startswith("_"):
                    modules_by_name.setdefault(name, []).append(".".join(name_of(path)))
    return modules_by_name


def test_public_names_are_defined_once() -> None:
    """A public name has the same meaning in every module."""
    modules_by_name = public_names()
    defined_twice = {
        name: defining_modules
        for name, defining_modules in modules_by_name.items()
        if len(defining_modules) > 1 and name not in SHARED
    }
    assert not defined_twice
    assert len(modules_by_name["prepare"]) > 1, "the search must find names that are defined twice"

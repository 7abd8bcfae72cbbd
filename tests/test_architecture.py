"""Who may import whom, who may import torch, and how large a room may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import everyrank
from everyrank.launch import LAUNCHERS

PACKAGE = Path(everyrank.__file__).parent

# Each imports only what stands above it. A folder counts as one place; inside it there is an order of its own below.
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
    "collectives",
    "data",
    "datasets",
    "builtin",
    "parallel",
    "strategies",
    "simulations",
    "loop",
    "measure",
    "checkpoint",
    "train",
    "parity",
    "tasks",
    "doctor",
    "audit",
    "report",
    "recipes",
    "eject",
    "api",
    "chaos",
    "testing",
    "commands",
    "cli",
]
INSIDE = {
    "api": ["calls", "scaling"],
    "chaos": ["faults", "two_hosts", "inject", "attempt", "person", "compare", "disturb"],
    "workload": ["scan", "workload", "batch", "find"],
    "layout": ["options", "table", "layout", "reference", "contract"],
    "runs": ["about", "folder", "lock"],
    "launch": [
        "hosts",
        "rank_info",
        "signals",
        "launcher",
        "variables",
        "job",
        "sbatch",
        *LAUNCHERS,
        "environments",
        "node",
        "supervisor",
        "silence",
        *("autopsy.rank_state", "autopsy.look", "autopsy.verdict", "autopsy"),
        "reports",
        "output",
        "monitor",
        "processes",
        "worker",
        "fork_server",
        "ray_room",
        "ray_driver",
    ],
    "backends": [
        "said",
        "async_buffers",
        "lane",
        "spans",
        "callbacks",
        "engine",
        "recent",
        "transport",
        "flat",
        "group",
        "horovod",
        "shm.segment",
        "shm.calls",
        "shm.pieces",
        "shm.phases",
        "shm.collectives",
        "shm.messages",
        "shm.group",
        "shm",
        *("mpi.calls", "mpi.library", "mpi.whereabouts", "mpi.collectives", "mpi.messages", "mpi.group", "mpi"),
    ],
    "world": [
        "world",
        "group_of_one",
        "barrier",
        "collectives",
        "rendezvous",
        "heartbeat",
        "calls",
        "process_group",
        "horovod",
    ],
    "collectives": [
        "question",
        "links",
        *("algorithms.ring", "algorithms.halving", "algorithms.tree", "algorithms.server", "algorithms.hierarchical"),
        "algorithms",
        *("operations.case", "operations.collective", "operations.point_to_point", "operations.objects"),
        "operations",
        "cost",
        "sweep",
        "strides",
    ],
    "checkpoint": ["generators", "contents", "copies", "storage", "saver", "weights"],
    "loop": ["open_data", "finite", "updates", "evaluation"],
    "train": [
        "trackers",
        "kernels",
        "memberships",
        "log",
        "display",
        "announce",
        "throughput",
        "job",
        "about",
        "course",
        "on_epoch",
        "look",
        "stragglers",
        "guard",
        "saving",
        "training",
    ],
    "tasks": ["predictions", "train", "predict", "verify", "bench_results", "bench", "comm"],
    "data": ["slicing", "order", "seeds", "stream", "fetch", "uneven", "uneven_updates", "parts", "loader"],
    "datasets": ["download", "arrays", "transforms", "idx", "cifar", "folder", "shards", "text", "table"],
    "builtin": [
        *("convnet", "decoder", "resnet"),
        *("schedules", "classify", "digits", "text", "causal_lm", "mnist", "cifar", "imagenet"),
    ],
    "parallel": [
        "mesh",
        "flat",
        "precision",
        "micro_batch",
        "batch_gather",
        "loss",
        "ema",
        "local_sgd",
        "compress",
        "gradients",
        "trainable",
        "batch_norm",
        "file_backed",
        "init_model",
        "room",
        "tensor.plan",
        "tensor.view_check",
        "tensor.apply",
        "expert",
        *("dropout.masks", "dropout.exact", "dropout.attention", "dropout.apply"),
        "context.chunk",
        "context.attention",
        "context.apply",
        "context.parts",
        "parallelize",
        "ddp",
        "zero1",
        *("server.link", "server.synchronous", "server.asynchronous"),
        "horovod",
        "fsdp",
        "pipeline.balance",
        "pipeline.schedule",
        "pipeline.deferred",
        "pipeline.blocks",
        "pipeline.stage",
        "pipeline.run",
        "full_state",
        "own_precision",
        "own",
        "gather_on_use",
        "check_equal",
    ],
    "simulations": ["ranks", "replicas", "horovod", "local_sgd", "parameter_server"],
    "parity": [
        "rows",
        "samples",
        "case",
        "trace",
        "cache",
        "spread",
        "reference",
        "compare",
        "probes",
        "async_reads",
        "by_rank",
        "initial_state",
        "own_code",
        "module_events",
        "outputs",
        "backward",
        "diagnose",
        "check",
    ],
    "measure": [
        "clock",
        "provenance",
        "profiling",
        "memory",
        "comm_counter",
        "split",
        "timeline",
        "resources",
        "resource_log",
        "instrumented",
    ],
    "doctor": ["findings", "machine", "network", "software", "selftest", "launching", "examination"],
    "audit": [
        "finding",
        *("watch.overlay", "watch.imports"),
        *("watch.place", "watch.recorder", "watch.sync_batch_norm", "watch.pretend_cuda"),
        *("watch.gathers", "watch.noise", "watch.ratios", "watch.losses"),
        *("watch.gradients", "watch.modules", "watch.steps", "watch.collectives", "watch.loaders", "watch.saving"),
        "watch.frameworks",
        *("watch.kept", "watch.keeper", "watch.stand_in", "watch.union", "watch.replay", "watch.install"),
        "watch.inject.sitecustomize",
        "command_line",
        "script",
        "guardian",
        "start",
        "outside",
        "evidence",
        *("rules.data", "rules.batches", "rules.loss_terms", "rules.gradients", "rules.split_layers", "rules.clipping"),
        *("rules.replay", "rules.replicas"),
        *(
            "rules.evaluation",
            "rules.averages",
            "rules.collectives",
            "rules.randomness",
            "rules.schedule",
            "rules.saving",
            "rules.speed",
        ),
        "examine",
    ],
    "commands": [
        "typed",
        "launching",
        "suggestions",
        "shared",
        "train",
        "verify",
        "audit",
        "bench",
        "chaos",
        "predict",
        "checkpoint",
        "report",
        "comm",
        "autopsy",
        "doctor",
        "new",
        "eject",
    ],
    "eject": ["request", "facts", "imports", "flatten", "sources", "compose", "readme", "project"],
    "report": [
        "rows",
        "notes",
        "table",
        "beside",
        "terminal",
        "markdown",
        "drawing",
        "charts",
        "page",
        "audit",
        "chaos",
        "comm",
        "comm_page",
    ],
}
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


def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, whether at the top level, and not for type checkers alone) of every import."""
    tree = ast.parse(path.read_text())
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


def _inside(parts: list[str]) -> str | None:
    """The place of a module inside its room: of the longest name that has one."""
    names = [".".join(parts[2:end]) for end in range(len(parts), 2, -1)]
    return next((name for name in names if name in INSIDE[parts[1]]), None)


def test_every_module_has_a_place() -> None:
    """A new module is put into the order, not beside it."""
    known = set(ORDER) | FACES
    assert {name_of(path)[0] for path in modules()} <= known
    assert set(ORDER) <= {name_of(path)[0] for path in modules()} | {"recipes"}
    for path in modules():
        room, *rest = name_of(path)
        if rest and room in INSIDE and path.name != "__init__.py":
            assert ".".join(rest) in INSIDE[room], f"{path}: put it into INSIDE[{room!r}]"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    """A module imports only what stands above it; `cli` imports everything and nobody imports `cli`."""
    own = name_of(path)
    if own[0] in FACES:
        return
    for module, _ in imports(path):
        parts = module.split(".")
        if parts[0] != "everyrank":
            continue
        assert len(parts) > 1, f"{path}: imports everyrank itself, which imports all that it shows"
        other = parts[1]
        assert other in ORDER, f"{path}: imports {module}"
        if other != own[0]:
            assert ORDER.index(other) < ORDER.index(own[0]), f"{path} imports {module}, which stands below it"
        elif own[0] in INSIDE and len(own) > 1 and (place := _inside(parts)) is not None:
            order = INSIDE[own[0]]
            mine = ".".join(own[1:])
            if mine in order:  # the face of a folder has no place of its own
                assert order.index(place) < order.index(mine), f"{path} imports {module}, which stands below it"


def test_one_way_test_can_fail(tmp_path: Path) -> None:
    """The rule above sees an import that runs back up."""
    module = tmp_path / "errors.py"
    module.write_text("def f():\n    from everyrank.cli import main\n")
    assert imports(module) == [("everyrank.cli.main", False)]
    assert ORDER.index("cli") > ORDER.index("errors")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_who_imports_torch(path: Path) -> None:
    """Modules that need no torch import none at the top."""
    if name_of(path)[0] in TORCH_FREE:
        assert not [module for module, at_top in imports(path) if at_top and module.split(".")[0] == "torch"]


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
        if path.name in ("__main__.py", "ray_driver.py", "ray_room.py"):  # Ray, which the others import, is an extra
            continue
        name = ".".join(("everyrank", *(part for part in name_of(path) if part != "__init__")))
        module = importlib.import_module(name)
        names = getattr(module, "__all__", [])
        assert len(set(names)) == len(names)
        for entry in names:
            assert hasattr(module, entry), f"{name} has no {entry}"


def test_strategies_can_be_read_as_tutorials() -> None:
    """At most 120 lines of code a strategy; any other file holds one idea, whole."""
    for path in modules():
        lines = path.read_text().splitlines()
        if path.parent.name == "strategies" and not path.name.startswith("_"):
            code = [line for line in lines if line.strip()]
            assert len(code) <= 120, f"{path.name}: {len(code)} lines: can it still be read as a tutorial?"


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
    """Every line of the table is a file with a recipe, and every strategy file is in the table."""
    from everyrank.layout import STRATEGIES

    files = {path.stem for path in (PACKAGE / "strategies").glob("*.py") if not path.stem.startswith("_")}
    assert files == {*STRATEGIES, "own"}  # the file of all own parallel code, whose names are paths
    recipes = {path.stem for path in (PACKAGE / "recipes").glob("*.py")}
    others = {"ddp": "ddp_torchrun", "horovod": "horovod_ddp"}  # a horovod.py would import itself
    assert {others.get(name, name) for name in STRATEGIES} <= recipes


# One name for one thing in all rooms; these are what several files of a kind have by agreement.
SHARED = {
    "HELP": "a command's line in --help",
    "LAUNCHER": "a launcher's row",
    "T": "a type variable",
    "add_arguments": "what a command takes",
    "find": "a launcher's program",
    "main": "a module that is run",
    "prepare": "a strategy",
    "simulate": "a simulation",
    "render": "a launcher's commands",
    "run": "what a command does; in api/, the call from Python",
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


# Longer than 40 lines, and why.
LONG = {
    "strategies.ddp.prepare": "the same",
    "strategies.fsdp.prepare": "step and predict are read beside what they close over: the file is a tutorial",
    "strategies.horovod.prepare": "the same",
    "strategies.own.prepare": "the same",
    "strategies.pipeline.prepare": "the same",
    "strategies.zero1.prepare": "the same",
    "strategies.parameter_server.prepare": "the same",
    "builtin.imagenet.workload": "one argument a line, and the datasets that it describes",
    "builtin.text._workload": "one field of the workload a line",
}


def test_functions_are_short() -> None:
    """40 lines, signature and docstring aside: what is longer says why, or is two functions."""
    found: set[str] = set()
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                has_docstring = ast.get_docstring(node) is not None
                first = node.body[1] if has_docstring and len(node.body) > 1 else node.body[0]
                if (node.end_lineno or 0) - first.lineno + 1 > 40:
                    found.add(".".join([*name_of(path), node.name]))
    assert found == set(LONG)


def test_docstrings_say_something() -> None:
    """A docstring of a public name is a sentence about it, of three words at least."""
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                text = ast.get_docstring(node)
                assert text is None or len(text.split()) >= 3, f"{path}: {node.name}: {text!r}"

"""The table of launchers: each is one file with its row, and nothing outside of that file asks for its name."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import os
import pickle
from pathlib import Path
from typing import Annotated

import pytest

import everyrank
from everyrank.commands.launching import add_launching, launch_of
from everyrank.errors import CannotRunError, UsageError
from everyrank.launch import (
    LAUNCHERS,
    Launch,
    RankInfo,
    find_launcher,
    launchers,
    ray,
    run_ranks,
    slurm,
    spawn,
    torchrun,
    worker,
)
from everyrank.launch import launcher as launcher_table
from everyrank.launch.environments import is_rank_0_of_all, rank_info_from_environment
from everyrank.launch.job import WORKER
from everyrank.launch.launcher import Launcher, LauncherOptions
from everyrank.launch.node import main as node_main
from everyrank.options import Argument

PACKAGE = Path(everyrank.__file__).parent
LOOK_UPS = ("get", "pop", "startswith", "endswith", "removeprefix")


@pytest.fixture(autouse=True)
def _nobody_started_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests may run in somebody's allocation."""
    prefixes = ("SLURM", "OMPI_", "PMI_", "PMIX_", "MPI_", "MASTER_", "TORCHELASTIC_", "HOROVOD_")
    for name in [name for name in os.environ if name.startswith(prefixes)]:
        monkeypatch.delenv(name)


def names_asked_for(path: Path) -> list[str]:
    """Where a file compares with a launcher's name, or looks something up by it: `line 3: spawn`."""
    asked: list[ast.expr | None] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare):
            for side in (node.left, *node.comparators):
                asked += side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else [side]
        elif isinstance(node, ast.Dict):
            asked += node.keys
        elif isinstance(node, ast.Subscript):
            asked.append(node.slice)
        elif isinstance(node, ast.MatchValue):
            asked.append(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOOK_UPS:
            asked += node.args
    return [
        f"line {value.lineno}: {value.value}"
        for value in asked
        if isinstance(value, ast.Constant) and value.value in LAUNCHERS
    ]


def modules() -> list[Path]:
    """All but recipes and what eject writes, which stand alone, and backends, where `mpi` is the name of one."""
    return sorted(path for path in PACKAGE.rglob("*.py") if not {"recipes", "eject", "backends"} & set(path.parts))


def test_no_launcher_is_asked_for_by_name() -> None:
    """What depends on the launcher stands in its row: adding one is its file and its name in the table."""
    own = {PACKAGE / "launch" / f"{name}.py" for name in LAUNCHERS}
    # the last three read the command lines of the tools themselves, and by which one a rank was started
    asks = {*own, *(PACKAGE / path for path in ("audit/command_line.py", "script/rank.py", "script/watching.py"))}
    found = {str(path.relative_to(PACKAGE)): names for path in modules() if (names := names_asked_for(path))}
    assert {path: names for path, names in found.items() if PACKAGE / path not in asks} == {}
    # nor by another launcher
    for path in own:
        assert [name for name in names_asked_for(path) if not name.endswith(f" {path.stem}")] == []


@pytest.mark.parametrize(
    "code",
    [
        "if launch.launcher == 'spawn': pass",
        "if 'torchrun' != launch.launcher: pass",
        "if launch.launcher in ('slurm', 'pbs'): pass",
        "how = {'mpi': 1}[launch.launcher]",
        "render = RENDER['ray']",
        "match launcher:\n    case 'spawn': pass",
        "row = RENDER.get('ray')",
    ],
)
def test_the_test_above_sees_it(tmp_path: Path, code: str) -> None:
    """Every way of asking that there is."""
    path = tmp_path / "code.py"
    path.write_text(code)
    assert len(names_asked_for(path)) == 1


def test_each_launcher_is_a_file_with_its_row() -> None:
    """The table's names are files, and their rows have these names."""
    assert [row.name for row in launchers()] == list(LAUNCHERS)
    for name in LAUNCHERS:
        assert find_launcher(name) == importlib.import_module(f"everyrank.launch.{name}").LAUNCHER
    assert find_launcher("env") is None  # a person
    with pytest.raises(UsageError, match=r"--launcher pbs: .* spawn, torchrun, slurm, mpi, ray, horovodrun"):
        Launch("pbs")
    with pytest.raises(UsageError, match="did you mean torchrun"):
        Launch("torchun")


FLAGS = {
    "accepts_arguments": {"torchrun", "slurm", "mpi", "horovodrun"},
    "supports_nodes": {"spawn", "torchrun", "slurm", "mpi", "horovodrun"},
    "launch_per_node": {"spawn", "torchrun"},
    "needs_shared_folder": {"slurm", "mpi", "horovodrun"},
    "graceful_shutdown": {"slurm", "mpi", "ray", "horovodrun"},
    "terminates_on_failure": {"torchrun", "horovodrun"},
    "provides_rendezvous": {"torchrun"},
    "line_prefix": {"horovodrun"},
    "default_for_backend": {"mpi"},
    "marker_variable": {"torchrun"},
}


@pytest.mark.parametrize("flag", FLAGS)
def test_which_launchers_are_alike(flag: str) -> None:
    """What several have in common, side by side; the integration tests see each of these in a real start."""
    assert {row.name for row in launchers() if getattr(row, flag)} == FLAGS[flag]


def test_every_launch_has_its_launchers_options() -> None:
    """Their defaults where none are given; they travel to the ranks; those of another launcher are refused."""
    for row in launchers():
        launch = Launch(row.name)
        assert launch.options == row.options()
        assert pickle.loads(pickle.dumps(launch)) == launch
        assert dataclasses.replace(launch, processes=2).options == launch.options
    for launcher, options in (
        ("spawn", torchrun.TorchrunOptions()),
        ("torchrun", ray.RayOptions()),
        ("slurm", "per_node"),
    ):
        with pytest.raises(UsageError, match=f"the options of --launcher {launcher}"):
            Launch(launcher, options=options)
    with pytest.raises(UsageError, match="--restarts -1"):
        Launch("torchrun", options=torchrun.TorchrunOptions(restarts=-1))
    with pytest.raises(UsageError, match="--per-node mpi: give spawn or torchrun"):
        Launch("slurm", options=slurm.SlurmOptions("mpi"))


def test_the_launcher_that_starts_the_ranks() -> None:
    """Slurm leaves it to another one where it starts one task on each node."""
    assert Launch("slurm").rank_launcher.name == "slurm"
    for name in ("spawn", "torchrun"):
        assert Launch("slurm", options=slurm.SlurmOptions(name)).rank_launcher.name == name
        assert Launch(name).rank_launcher.name == name


def test_an_address_that_is_meant() -> None:
    """torchrun's agent has opened its store there; nodes of a small Slurm may be one machine."""
    trusted = {row.name: [host for host in ("127.0.0.1", "n0") if row.allow_loopback(host)] for row in launchers()}
    by_default: dict[str, list[str]] = {row.name: [] for row in launchers()}
    assert trusted == {**by_default, "torchrun": ["127.0.0.1", "n0"], "slurm": ["127.0.0.1"]}


def test_what_a_launcher_cannot_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One line each, before anything is started."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="there is no allocation"):
        run_ranks(Launch("slurm"), len)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(CannotRunError, match="srun was not found"):
        run_ranks(Launch("slurm"), len)
    with pytest.raises(UsageError, match="--nodes 2: not supported by --launcher ray"):
        Launch("ray", processes=2, nodes=2)


def test_a_shell_that_srun_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks like a rank: the line says how to get out of it."""
    shell = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1",
        "SLURM_NODEID": "0",
    }
    for name, value in shell.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r"slurm has already started.*unset SLURM_STEP_ID"):
        launched("--launcher", "spawn")


# --- one more launcher, as a user would add it


@dataclasses.dataclass(frozen=True)
class ToyOptions(LauncherOptions):
    """Options of the toy."""

    loud: Annotated[bool, Argument("toy: print more")] = False


class Toy(Launcher):
    """Starts its ranks as spawn does."""

    name = "toy"
    program = "toyrun"
    options = ToyOptions
    launch_per_node = True
    rank_variables = (("TOY_RANK", "TOY_LOCAL_RANK", "TOY_SIZE", "TOY_LOCAL_SIZE"),)

    def commands(self, launch: Launch, job_folder: Path) -> list[list[str]]:
        """The fork server of this host."""
        return spawn.LAUNCHER.commands(launch, job_folder)


TOY = Toy()


def add_launcher(monkeypatch: pytest.MonkeyPatch, launcher: Launcher) -> None:
    """Add a file and its name to the table, without writing them."""
    importing = importlib.import_module
    module = argparse.Namespace(LAUNCHER=launcher)
    monkeypatch.setattr(launcher_table, "LAUNCHERS", (*LAUNCHERS, launcher.name))
    monkeypatch.setattr(
        launcher_table.importlib,
        "import_module",
        lambda name: module if name.endswith(f".{launcher.name}") else importing(name),
    )


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more launcher, `toy`, which starts its ranks as spawn does."""
    add_launcher(monkeypatch, TOY)


def test_the_launcher_in_contributing_starts_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's code, with what it needs from other files."""
    page = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    code = page.partition("## A new launcher")[2].partition("```python\n")[2].partition("```")[0]
    names = {"Launcher": Launcher, "Launch": Launch, "Path": Path, "WORKER": WORKER}
    exec(code, names)
    launcher = names["LAUNCHER"]
    assert isinstance(launcher, Launcher)
    add_launcher(monkeypatch, launcher)
    launch = launched("--launcher", "nice", "--processes", "2", "--device", "cpu")
    priorities = run_ranks(launch, lambda info: (info.started_by, os.nice(0)))
    assert {rank: name for rank, (name, _) in priorities.items()} == {0: "nice", 1: "nice"}
    assert all(nice > os.nice(0) or nice == 19 for _, nice in priorities.values())
    with pytest.raises(UsageError, match="--nodes 2"):
        launched("--launcher", "nice", "--processes", "2", "--nodes", "2")


def launched(*words: str) -> Launch:
    parser = argparse.ArgumentParser()
    add_launching(parser)
    parser.set_defaults(workers=0)
    return launch_of(parser.parse_args(words))


@pytest.mark.usefixtures("toy")
def test_a_launcher_is_a_file_and_a_row() -> None:
    """With a row alone it has its flags, its options, its variables, and starts ranks."""
    launch = launched("--launcher", "toy", "--loud", "--processes", "2", "--device", "cpu")
    assert launch.options == ToyOptions(loud=True)
    with pytest.raises(UsageError, match=r"--loud.*--launcher toy"):
        launched("--loud")
    found = run_ranks(launch, lambda info: (info.rank, info.size, info.started_by))
    assert found == {rank: (rank, 2, "toy") for rank in range(2)}
    variables = {"TOY_RANK": "1", "TOY_LOCAL_RANK": "0", "TOY_SIZE": "2", "TOY_LOCAL_SIZE": "1"}
    info = rank_info_from_environment(variables)
    assert info is not None
    assert (info.rank, info.size, info.started_by) == (1, 2, "toy")
    assert not is_rank_0_of_all(variables)
    with pytest.raises(UsageError, match=r"RANK=0 .* toyrun set 1"):
        rank_info_from_environment({**variables, "RANK": "0"})
    with pytest.raises(UsageError, match=r"not TOY_LOCAL_RANK.*start with toyrun"):
        rank_info_from_environment({"TOY_RANK": "1", "TOY_SIZE": "2"})


# --- functions by name


def test_a_function_by_name_is_imported_in_the_rank() -> None:
    """So a process that only starts ranks needs none of what they import."""
    found = run_ranks(Launch(processes=1), "builtins:repr")
    assert found[0].startswith("RankInfo(rank=0, local_rank=0, size=1, local_size=1, started_by='spawn'")


def test_a_node_task_wants_a_launcher_that_starts_the_ranks_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """An invariant of ours: `slurm.Options` refuses the others before."""
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**variables, "MASTER_ADDR": "n0", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["node", "mpi", "2", "a folder"])
    with pytest.raises(AssertionError, match="mpi"):
        node_main()


def test_what_an_earlier_start_has_left_is_no_error_of_this_one(tmp_path: Path) -> None:
    """An elastic launcher may give a place of a host another rank: what the first of them left is taken away."""
    kinds = ("error", "exit", "result", "kept", "pid")

    def started(rank: int, local_rank: int) -> None:
        info = RankInfo(rank, local_rank, 4, 2, "torchrun", "")
        worker._delete_old_files(tmp_path, info)  # pyright: ignore[reportPrivateUsage]
        for kind in kinds:
            (tmp_path / f"rank{rank}.{kind}").write_text("{}")

    for rank, local_rank in ((2, 0), (3, 1)):  # the second of two hosts
        started(rank, local_rank)
    for rank, local_rank in ((0, 0), (1, 1)):  # and the first of them, later
        started(rank, local_rank)
    assert sorted(path.name for path in tmp_path.glob("rank*")) == sorted(
        f"rank{rank}.{kind}" for rank in (0, 1) for kind in kinds
    )


def test_torchrun_of_hosts_that_may_come_later() -> None:
    """A store for each start; and no limit of ours, for torchrun has one that a host may come later than."""
    for kind, options, is_elastic in (
        ("c10d", torchrun.TorchrunOptions("c10d", 1, 3), True),
        ("a lost host is replaced", torchrun.TorchrunOptions("c10d", None, 1), True),
        ("fixed", torchrun.TorchrunOptions("c10d"), False),
        ("static", torchrun.TorchrunOptions("static", None, 1), False),
    ):
        expected = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if is_elastic else {}
        assert (options.is_elastic, options.variables) == (is_elastic, expected), kind

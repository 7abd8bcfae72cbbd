"""The launcher table: each launcher is one file with one row, and no other code compares the launcher's name."""

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
    mpi,
    processes,
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
from everyrank.script.variables import rank_variables

PACKAGE = Path(everyrank.__file__).parent
LOOKUP_METHODS = ("get", "pop", "startswith", "endswith", "removeprefix")


@pytest.fixture(autouse=True)
def _no_launcher_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delete the variables of launchers, because these tests may run in an allocation."""
    prefixes = ("SLURM", "OMPI_", "PMI_", "PMIX_", "MPI_", "MASTER_", "TORCHELASTIC_", "HOROVOD_")
    for name in [name for name in os.environ if name.startswith(prefixes)]:
        monkeypatch.delenv(name)


def uses_of_launcher_names(path: Path) -> list[str]:
    """Return the lines of a file that compare a launcher's name, or look something up by it: `line 3: spawn`."""
    expressions: list[ast.expr | None] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare):
            for side in (node.left, *node.comparators):
                expressions += side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else [side]
        elif isinstance(node, ast.Dict):
            expressions += node.keys
        elif isinstance(node, ast.Subscript):
            expressions.append(node.slice)
        elif isinstance(node, ast.MatchValue):
            expressions.append(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOOKUP_METHODS:
            expressions += node.args
    return [
        f"line {expression.lineno}: {expression.value}"
        for expression in expressions
        if isinstance(expression, ast.Constant) and expression.value in LAUNCHERS
    ]


def modules() -> list[Path]:
    """Return all modules except standalone code (recipes, eject) and backends, one of which is named `mpi`."""
    return sorted(path for path in PACKAGE.rglob("*.py") if not {"recipes", "eject", "backends"} & set(path.parts))


def test_no_code_outside_its_file_uses_the_name_of_a_launcher() -> None:
    """A new launcher needs only its file, and its name in the table. The row has everything else."""
    launcher_files = {PACKAGE / "launch" / f"{name}.py" for name in LAUNCHERS}
    # the last three parse command lines of the tools, and detect which launcher has started a rank
    allowed_files = {
        *launcher_files,
        *(PACKAGE / path for path in ("audit/command_line.py", "script/rank.py", "script/watching.py")),
    }
    uses_by_file = {
        str(path.relative_to(PACKAGE)): uses for path in modules() if (uses := uses_of_launcher_names(path))
    }
    assert {path: uses for path, uses in uses_by_file.items() if PACKAGE / path not in allowed_files} == {}
    # a launcher's file may use only its own name
    for path in launcher_files:
        assert [use for use in uses_of_launcher_names(path) if not use.endswith(f" {path.stem}")] == []


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
def test_uses_of_launcher_names_finds_every_form(tmp_path: Path, code: str) -> None:
    """Each of these lines compares a launcher's name or looks something up by it."""
    path = tmp_path / "code.py"
    path.write_text(code)
    assert len(uses_of_launcher_names(path)) == 1


def test_each_launcher_is_a_file_with_a_row() -> None:
    """Each name in the table is the name of a file. The row in this file has the same name."""
    assert [row.name for row in launchers()] == list(LAUNCHERS)
    for name in LAUNCHERS:
        assert find_launcher(name) == importlib.import_module(f"everyrank.launch.{name}").LAUNCHER
    assert find_launcher("env") is None  # the user starts the ranks
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
def test_flags_of_launchers(flag: str) -> None:
    """Each attribute is true for these launchers. The integration tests check the attributes with real launches."""
    assert {row.name for row in launchers() if getattr(row, flag)} == FLAGS[flag]


def test_launch_has_the_options_of_its_launcher() -> None:
    """The options have defaults and can be pickled. Options of a different launcher are refused."""
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


def test_rank_launcher() -> None:
    """With --per-node, Slurm starts one task on each node, and a different launcher starts the ranks in it."""
    assert Launch("slurm").rank_launcher.name == "slurm"
    for name in ("spawn", "torchrun"):
        assert Launch("slurm", options=slurm.SlurmOptions(name)).rank_launcher.name == name
        assert Launch(name).rank_launcher.name == name


def test_loopback_addresses_that_launchers_allow() -> None:
    """torchrun's agent has opened its store at this address. Nodes of a small Slurm cluster may be one machine."""
    allowed_hosts = {
        row.name: [host for host in ("127.0.0.1", "n0") if row.allow_loopback(host)] for row in launchers()
    }
    no_hosts: dict[str, list[str]] = {row.name: [] for row in launchers()}
    assert allowed_hosts == {**no_hosts, "torchrun": ["127.0.0.1", "n0"], "slurm": ["127.0.0.1"]}


def test_launcher_that_cannot_start_ranks_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """There is no allocation, or no srun on PATH, or the launcher does not support --nodes."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="there is no allocation"):
        run_ranks(Launch("slurm"), len)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(CannotRunError, match="srun was not found"):
        run_ranks(Launch("slurm"), len)
    with pytest.raises(UsageError, match="--nodes 2: not supported by --launcher ray"):
        Launch("ray", processes=2, nodes=2)


def test_launcher_whose_program_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher without a `find` method looks for its program."""
    monkeypatch.setattr(Toy, "install_hint", "apt install toyrun")
    with pytest.raises(CannotRunError, match="--launcher toy: toyrun was not found on PATH; apt install toyrun"):
        TOY.find()
    monkeypatch.setattr(Toy, "program", "sh")
    assert Path(TOY.find()).is_file()


def test_launch_in_a_shell_started_by_srun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell has the variables of a rank. The error says which variable to unset."""
    shell_variables = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1",
        "SLURM_NODEID": "0",
    }
    for name, value in shell_variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r"slurm has already started.*unset SLURM_STEP_ID"):
        parse_launch("--launcher", "spawn")


# --- a new launcher, as a user would add it


@dataclasses.dataclass(frozen=True)
class ToyOptions(LauncherOptions):
    """Options of the launcher `toy`."""

    loud: Annotated[bool, Argument("toy: print more")] = False


class Toy(Launcher):
    """A launcher that starts its ranks like spawn."""

    name = "toy"
    program = "toyrun"
    options = ToyOptions
    launch_per_node = True
    rank_variables = (("TOY_RANK", "TOY_LOCAL_RANK", "TOY_SIZE", "TOY_LOCAL_SIZE"),)

    def commands(self, launch: Launch, job_folder: Path) -> list[list[str]]:
        """Return the commands of spawn."""
        return spawn.LAUNCHER.commands(launch, job_folder)


TOY = Toy()


def add_launcher(monkeypatch: pytest.MonkeyPatch, launcher: Launcher) -> None:
    """Add a launcher to the table, without writing its file."""
    import_module = importlib.import_module
    module = argparse.Namespace(LAUNCHER=launcher)
    monkeypatch.setattr(launcher_table, "LAUNCHERS", (*LAUNCHERS, launcher.name))
    monkeypatch.setattr(
        launcher_table.importlib,
        "import_module",
        lambda name: module if name.endswith(f".{launcher.name}") else import_module(name),
    )


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Add a new launcher, `toy`, which starts its ranks like spawn, and put its program on PATH."""
    add_launcher(monkeypatch, TOY)
    (tmp_path / "toyrun").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


def test_example_launcher_in_contributing_md_starts_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code on the page runs with the names that it imports from other files."""
    page = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    code = page.partition("## A new launcher")[2].partition("```python\n")[2].partition("```")[0]
    namespace = {"Launcher": Launcher, "Launch": Launch, "Path": Path, "WORKER": WORKER}
    exec(code, namespace)
    launcher = namespace["LAUNCHER"]
    assert isinstance(launcher, Launcher)
    add_launcher(monkeypatch, launcher)
    launch = parse_launch("--launcher", "nice", "--processes", "2", "--device", "cpu")
    names_and_priorities = run_ranks(launch, lambda info: (info.started_by, os.nice(0)))
    assert {rank: name for rank, (name, _) in names_and_priorities.items()} == {0: "nice", 1: "nice"}
    assert all(priority > os.nice(0) or priority == 19 for _, priority in names_and_priorities.values())
    with pytest.raises(UsageError, match="--nodes 2"):
        parse_launch("--launcher", "nice", "--processes", "2", "--nodes", "2")


def parse_launch(*args: str) -> Launch:
    """Parse launch flags into a Launch."""
    parser = argparse.ArgumentParser()
    add_launching(parser)
    parser.set_defaults(workers=0)
    return launch_of(parser.parse_args(args))


@pytest.mark.usefixtures("toy")
def test_new_launcher_needs_only_a_row() -> None:
    """With only its row, the launcher has its flags, options and variables, and starts ranks."""
    launch = parse_launch("--launcher", "toy", "--loud", "--processes", "2", "--device", "cpu")
    assert launch.options == ToyOptions(loud=True)
    with pytest.raises(UsageError, match=r"--loud.*--launcher toy"):
        parse_launch("--loud")
    results = run_ranks(launch, lambda info: (info.rank, info.size, info.started_by))
    assert results == {rank: (rank, 2, "toy") for rank in range(2)}
    variables = {"TOY_RANK": "1", "TOY_LOCAL_RANK": "0", "TOY_SIZE": "2", "TOY_LOCAL_SIZE": "1"}
    info = rank_info_from_environment(variables)
    assert info is not None
    assert (info.rank, info.size, info.started_by) == (1, 2, "toy")
    assert not is_rank_0_of_all(variables)
    with pytest.raises(UsageError, match=r"RANK=0 .* toyrun set 1"):
        rank_info_from_environment({**variables, "RANK": "0"})
    with pytest.raises(UsageError, match=r"not TOY_LOCAL_RANK.*start with toyrun"):
        rank_info_from_environment({"TOY_RANK": "1", "TOY_SIZE": "2"})


# --- functions given by name, node tasks and restarts


def test_function_given_by_name_is_imported_in_the_rank() -> None:
    """The process that starts the ranks does not import the modules of the function."""
    results = run_ranks(Launch(processes=1), "builtins:repr")
    assert results[0].startswith("RankInfo(rank=0, local_rank=0, size=1, local_size=1, started_by='spawn'")


def test_node_task_asserts_that_its_launcher_can_start_the_ranks_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users cannot reach this assertion, because `SlurmOptions` refuses other launchers."""
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**variables, "MASTER_ADDR": "n0", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["node", "mpi", "2", "a folder"])
    with pytest.raises(AssertionError, match="mpi"):
        node_main()


def test_files_of_an_earlier_start_are_deleted(tmp_path: Path) -> None:
    """An elastic launcher may give a local rank a different rank after a restart. The old rank's files are deleted."""
    kinds = ("error", "exit", "result", "kept", "pid")

    def start_rank(rank: int, local_rank: int) -> None:
        info = RankInfo(rank, local_rank, 4, 2, "torchrun", "")
        worker._delete_old_files(tmp_path, info)  # pyright: ignore[reportPrivateUsage]
        for kind in kinds:
            (tmp_path / f"rank{rank}.{kind}").write_text("{}")

    for rank, local_rank in ((2, 0), (3, 1)):  # at first, this is the second of two hosts
        start_rank(rank, local_rank)
    for rank, local_rank in ((0, 0), (1, 1)):  # after the restart, it is the first
        start_rank(rank, local_rank)
    assert sorted(path.name for path in tmp_path.glob("rank*")) == sorted(
        f"rank{rank}.{kind}" for rank in (0, 1) for kind in kinds
    )


def test_elastic_options_of_torchrun_create_a_store_for_each_start() -> None:
    """If hosts may join a running job, a variable disables the shared store."""
    for kind, options, is_elastic in (
        ("c10d", torchrun.TorchrunOptions("c10d", 1, 3), True),
        ("a lost host is replaced", torchrun.TorchrunOptions("c10d", None, 1), True),
        ("fixed", torchrun.TorchrunOptions("c10d"), False),
        ("static", torchrun.TorchrunOptions("static", None, 1), False),
    ):
        expected = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if is_elastic else {}
        assert (options.is_elastic, options.variables) == (is_elastic, expected), kind


def test_programs_that_do_not_answer_or_start_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example sbatch while the controller of Slurm is down, or the mpirun of a different architecture."""
    monkeypatch.setattr(launcher_table, "_ANSWER_SECONDS", 0.1)
    with pytest.raises(CannotRunError, match=r"^sleep 60: it did not end within 0\.1 s; "):
        launcher_table.run_program("sleep", "60")
    (tmp_path / "mpirun").write_bytes(b"\x7fELF")
    (tmp_path / "mpirun").chmod(0o755)
    with pytest.raises(CannotRunError, match=r"mpirun --version: Exec format error; "):
        mpi._is_open_mpi(str(tmp_path / "mpirun"))


def test_job_named_by_its_rendezvous_is_not_unique(tmp_path: Path) -> None:
    """Files of an earlier start with the same --rendezvous and --logs are then told apart by their times."""
    for nodes, is_unique in ((1, True), (2, False)):
        launch = Launch(processes=2, nodes=nodes, node_rank=0, rendezvous="n1:29500")
        assert processes._job(launch, b"", "torch", tmp_path, tmp_path).is_name_unique is is_unique


def test_node_of_a_cyclic_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """`srun --distribution=cyclic` on two nodes: ranks 0 and 2 are on the first."""
    for rank in range(4):
        monkeypatch.setenv("SLURM_NODEID", str(rank % 2))
        monkeypatch.setenv("SLURM_STEP_NUM_NODES", "2")
        variables = rank_variables(RankInfo(rank, rank // 2, 4, 2, "slurm", "tcp://n1:29500"), 5.0)
        assert (variables["GROUP_RANK"], variables["GROUP_WORLD_SIZE"]) == (str(rank % 2), "2")

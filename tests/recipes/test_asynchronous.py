"""The recipe of an asynchronous parameter server: convergence, exact replay, and killed processes."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from forkserver import ForkServer
from recipes import test_recipes
from recipes.test_recipes import DIGITS, NUM_ROWS, parse_output, recipe_text, run_commands, write_digits, write_recipe

pytestmark = pytest.mark.integration

NAME = "parameter_server_async"
COMMAND = f"python {NAME}.py --trainers 3 --replay --float64"


@pytest.fixture(scope="module", autouse=True)
def _forked_programs(python: ForkServer) -> Iterator[None]:
    """Start the recipe's processes through the fork server."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_recipes, "PROGRAM_FOLDER", python.programs)
        patch.setitem(test_recipes.COMMAND_ENVIRONMENT, "PYTHON_EXEC", str(python.programs / "python"))
        yield


def run_recipe(
    folder: Path, *changes: tuple[str, str], status: int = 0, num_rows: int = NUM_ROWS
) -> subprocess.CompletedProcess[str]:
    """Run the recipe after these replacements in its text."""
    text = recipe_text(NAME)
    for before, after in changes:
        assert text.count(before) == 1, f"{NAME} has changed; {before!r} no longer fits"
        text = text.replace(before, after)
    write_recipe(folder, NAME, text)
    write_digits(folder, num_rows)
    return run_commands(folder, COMMAND, status)


def replay_distance(result: subprocess.CompletedProcess[str]) -> float:
    """Return the largest difference of a parameter between training and replay."""
    match = re.search(r"^replay (\S+)$", result.stdout, re.MULTILINE)
    assert match is not None
    return float(match[1])


def test_training_converges_and_its_replay_is_exact(tmp_path: Path) -> None:
    """Every trainer makes all its updates. The same events in one process give the same parameters."""
    result = run_recipe(tmp_path, num_rows=len(DIGITS))
    output = parse_output(result.stdout)
    assert len(output.losses) == 4 * 3 * 15  # epochs, trainers, batches of each trainer
    assert sum(output.losses[-12:]) < 0.4 * sum(output.losses[:12])
    assert output.numbers["top1"] > 0.8
    assert replay_distance(result) <= 1e-12


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("pulled[trainer] = replayed.pull(trainer)", "pulled.setdefault(trainer, replayed.pull(trainer))"),
        ("            self.optimizer.step()", "            len(self.losses) == 9 or self.optimizer.step()"),
    ],
    ids=["another version", "an update is lost"],
)
def test_replay_after_a_mutation_differs(tmp_path: Path, before: str, after: str) -> None:
    """The server drops an update, or a trainer uses other parameters than the replay. The comparison detects both."""
    changes = [(before, after)]
    if "losses" in after:  # only the server loses an update, because the replay starts with nine losses
        changes = [
            (before, after),
            ("replayed, pulled = Server(model), {}", "replayed, pulled = Server(model), {}; replayed.losses = [0] * 9"),
        ]
    assert replay_distance(run_recipe(tmp_path, *changes)) > 1e-9


KILL_TRAINER_1 = (
    '            rpc.rpc_sync("server", push, (trainer, *gradient(model, flat_parameters, batch)))',
    '            rpc.rpc_sync("server", push, (trainer, *gradient(model, flat_parameters, batch)))\n'
    "            trainer == 1 and os.kill(os.getpid(), 9)",
)


def test_other_trainers_continue_when_one_is_killed(tmp_path: Path) -> None:
    """One of three trainers ends by SIGKILL after its first push. One line reports it. The others continue."""
    result = run_recipe(tmp_path, KILL_TRAINER_1)
    assert f"{NAME}.py: trainer 1 died with exit code -9; 2 of 3 finished\n" in result.stderr
    assert len(parse_output(result.stdout).losses) == 2 * 16 + 1
    assert replay_distance(result) <= 1e-12


def test_trainers_end_when_the_server_is_killed_by_sigkill(tmp_path: Path) -> None:
    """The server ends at its tenth event. Each trainer reports it and ends. `run_commands` waits for all."""
    kill_server = (
        "            self.flat_parameters.grad = flat_gradient\n",
        "            self.flat_parameters.grad = flat_gradient\n"
        "            len(self.events) > 9 and os.kill(os.getpid(), 9)\n",
    )
    result = run_recipe(tmp_path, kill_server, status=128 + 9)
    for trainer in range(3):
        assert f"trainer {trainer}: a call to the server failed: " in result.stderr

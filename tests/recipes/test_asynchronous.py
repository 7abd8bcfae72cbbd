"""The recipe of an asynchronous parameter server: it learns, its replay is exact, and a death ends what it has to."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from forkserver import ForkServer
from recipes import test_recipes
from recipes.test_recipes import DIGITS, NUM_ROWS, beside, read, text_of, typed, write_digits

pytestmark = pytest.mark.integration

NAME = "parameter_server_async"
COMMAND = f"python {NAME}.py --trainers 3 --replay --float64"


@pytest.fixture(scope="module", autouse=True)
def _forked_programs(python: ForkServer) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_recipes, "PROGRAMS", python.programs)
        patch.setitem(test_recipes.OURS, "PYTHON_EXEC", str(python.programs / "python"))
        yield


def run(
    folder: Path, *changes: tuple[str, str], status: int = 0, num_rows: int = NUM_ROWS
) -> subprocess.CompletedProcess[str]:
    text = text_of(NAME)
    for before, after in changes:
        assert text.count(before) == 1, f"it has changed; {before!r} no longer fits"
        text = text.replace(before, after)
    beside(folder, NAME, text)
    write_digits(folder, num_rows)
    return typed(folder, COMMAND, status)


def replayed(done: subprocess.CompletedProcess[str]) -> float:
    """The largest difference of a parameter."""
    found = re.search(r"^replay (\S+)$", done.stdout, re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_it_learns_and_its_replay_is_exact(tmp_path: Path) -> None:
    """Every update of every trainer is made; the same events in one process come to the same parameters."""
    done = run(tmp_path, num_rows=len(DIGITS))
    found = read(done.stdout)
    assert len(found.losses) == 4 * 3 * 15  # epochs, trainers, batches of each
    assert sum(found.losses[-12:]) < 0.4 * sum(found.losses[:12])
    assert found.numbers["top1"] > 0.8
    assert replayed(done) <= 1e-12


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("pulled[trainer] = replayed.pull(trainer)", "pulled.setdefault(trainer, replayed.pull(trainer))"),
        ("            self.optimizer.step()", "            len(self.losses) == 9 or self.optimizer.step()"),
    ],
    ids=["another version", "an update is lost"],
)
def test_a_replay_of_something_else_differs(tmp_path: Path, before: str, after: str) -> None:
    """The comparison can fail."""
    changes = [(before, after)]
    if "losses" in after:  # by the server alone: the replay counts on from nine
        changes = [
            (before, after),
            ("replayed, pulled = Server(model), {}", "replayed, pulled = Server(model), {}; replayed.losses = [0] * 9"),
        ]
    assert replayed(run(tmp_path, *changes)) > 1e-9


DIES = (
    '            rpc.rpc_sync("server", push, (trainer, *gradient(model, flat, batch)))',
    '            rpc.rpc_sync("server", push, (trainer, *gradient(model, flat, batch)))\n'
    "            trainer == 1 and os.kill(os.getpid(), 9)",
)


def test_others_go_on_when_a_trainer_is_killed(tmp_path: Path) -> None:
    """One of three, by SIGKILL after its first push: a line says so, and nobody else's updates are missing."""
    done = run(tmp_path, DIES)
    assert f"{NAME}.py: trainer 1 died (-9); the others continued" in done.stderr
    assert len(read(done.stdout).losses) == 2 * 16 + 1
    assert replayed(done) <= 1e-12


def test_trainers_end_when_the_server_is_killed(tmp_path: Path) -> None:
    """By SIGKILL at its tenth event: every trainer says who is gone, and ends (`typed` waits for all of them)."""
    dies = (
        "            self.flat.grad = message\n",
        "            self.flat.grad = message\n            len(self.events) > 9 and os.kill(os.getpid(), 9)\n",
    )
    done = run(tmp_path, dies, status=128 + 9)
    for trainer in range(3):
        assert f"trainer {trainer}: the server is gone: " in done.stderr

"""What docs/security.md says of pickles and folders, and that the tests that it names are there."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest

import everyrank
from everyrank.launch import Launch, RankInfo, run_ranks

PACKAGE = Path(everyrank.__file__).parent

# Who opens a pickle, and why that is right.
UNPICKLES = {
    "launch/fork_server.py": "the job, out of the folder of this user alone",
    "launch/worker.py": "the same",
    "launch/job.py": "what is called, which the job holds",
    "launch/ray_driver.py": "the job, as its own parent has written it",
    "launch/processes.py": "what ranks have kept in that folder",
    "launch/reports.py": "what they return",
    "launch/zygote.py": "a request of the process that has started it, through its own pipe",
    "script/function.py": "a test's function, which the process that starts the ranks has sent",
    "world/calls.py": "the dump of torch's Flight Recorder, which the same process has just made",
}
# Readers that know a few classes by name.
READERS = {"checkpoint/storage.py", "datasets/cifar.py"}
# torch.load of anything: what the audit's own ranks have written into the audit's own folder.
LOADS_ALL = {"audit/replay/run.py"}
# exec: the person's own sitecustomize, which the audit's stands in front of, and the script that `launch` is given.
RUNS_TEXT = {
    "audit/watch/inject/sitecustomize.py",
    "port/to_workload/slices.py",  # conditions of the script, without calls
    "rerun/inside/sources.py",
    "script/command.py",
}


def calls(path: Path) -> list[tuple[str, ast.Call]]:
    tree = ast.parse(path.read_text())
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def is_weights_only(call: ast.Call) -> bool:
    return any(
        word.arg == "weights_only" and isinstance(word.value, ast.Constant) and word.value.value is True
        for word in call.keywords
    )


def test_who_opens_a_pickle() -> None:
    """Nobody but those listed, and torch.load with weights_only alone; no eval, no exec, no shell."""
    unpickle, readers, loads, runs = set[str](), set[str](), set[str](), set[str]()
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        if "pickle.Unpickler" in path.read_text():
            readers.add(name)
        for called, node in calls(path):
            if called in ("pickle.load", "pickle.loads", "cloudpickle.load", "cloudpickle.loads"):
                unpickle.add(name)
            if called == "torch.load" and not is_weights_only(node):
                loads.add(name)
            if called in ("eval", "exec", "os.system", "os.popen", "marshal.loads", "yaml.load"):
                runs.add(name)
            assert not any(word.arg == "shell" for word in node.keywords), (name, called)
            assert called != "np.load" or "allow_pickle=False" in ast.unparse(node), name
    assert unpickle == set(UNPICKLES)
    assert readers == READERS
    assert loads == LOADS_ALL
    assert runs == RUNS_TEXT


@pytest.mark.usefixtures("python")
def test_the_folder_of_a_job_is_this_users_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever else could write there would have a pickle of theirs opened."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    before = os.umask(0)
    try:
        modes = run_ranks(Launch(processes=1, device="cpu"), job_folders, str(tmp_path))[0]
    finally:
        os.umask(before)
        monkeypatch.setattr("tempfile.tempdir", None)
    assert modes, "the folder was found"
    assert set(modes) == {0o700}


def job_folders(info: RankInfo, place: str) -> list[int]:
    """The modes of the folders below `place` that hold a job, while it runs."""
    return [path.parent.stat().st_mode & 0o777 for path in Path(place).rglob("job.pickle")]


def test_the_page_names_tests_that_are_there(repository: Path) -> None:
    page = (repository / "docs" / "security.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)
    assert len(named) > 25
    for file, function in named:
        assert f"def {function}(" in (repository / file).read_text(), f"{file}::{function}"
    for row in page.splitlines():
        if row.startswith("| ") and "---" not in row and not row.startswith("| what"):
            assert "tests/" in row or "| none: " in row, f"a claim without a test: {row}"

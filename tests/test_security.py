"""Claims of docs/security.md: who unpickles, permissions of job directories, and a test for each claim."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest

import everyrank
from everyrank.launch import Launch, RankInfo, run_ranks

PACKAGE = Path(everyrank.__file__).parent

# Files that unpickle, and where each pickle comes from.
UNPICKLES = {
    "launch/fork_server.py": "the job, out of the folder of this user alone",
    "launch/worker.py": "the same",
    "launch/job.py": "what is called, which the job holds",
    "launch/ray_driver.py": "the job, as its own parent has written it",
    "launch/processes.py": "what ranks have kept in that folder",
    "launch/reports.py": "what they return",
    "launch/zygote.py": "a request of the process that has started it, through its own pipe",
    "pytest_plugin.py": "results of a test's function, which its own ranks have returned",
    "script/function.py": "a test's function, which the process that starts the ranks has sent",
    "world/calls.py": "the dump of torch's Flight Recorder, which the same process has just made",
}
# Unpicklers that allow only a few classes.
READERS = {"checkpoint/storage.py", "datasets/cifar.py"}
# torch.load without weights_only: the audit reads files that its own ranks wrote to its own directory.
LOADS_ALL = {"audit/replay/run.py"}
# exec: the user's sitecustomize, which the audit's hides, and the script given to `launch`.
RUNS_TEXT = {
    "audit/watch/inject/sitecustomize.py",
    "port/to_workload/slices.py",  # conditions of the script, without calls
    "rerun/inside/sources.py",
    "script/command.py",
}


def calls(path: Path) -> list[tuple[str, ast.Call]]:
    """Return the name and the node of each function call in a file."""
    tree = ast.parse(path.read_text())
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def is_weights_only(call: ast.Call) -> bool:
    return any(
        keyword.arg == "weights_only" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        for keyword in call.keywords
    )


def test_only_listed_files_unpickle() -> None:
    """Other files use torch.load with weights_only. Only listed files use eval or exec, and none uses a shell."""
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
            assert not any(keyword.arg == "shell" for keyword in node.keywords), (name, called)
            assert called != "np.load" or "allow_pickle=False" in ast.unparse(node), name
    assert unpickle == set(UNPICKLES)
    assert readers == READERS
    assert loads == LOADS_ALL
    assert runs == RUNS_TEXT


@pytest.mark.usefixtures("python")
def test_job_directory_is_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If another user could write to the directory, everyrank would load that user's pickles."""
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


def job_folders(info: RankInfo, folder: str) -> list[int]:
    """Return the modes of the job directories below `folder` while the job runs."""
    return [path.parent.stat().st_mode & 0o777 for path in Path(folder).rglob("job.pickle")]


def test_page_names_existing_tests(repository: Path) -> None:
    """Each row of the tables names a test or says that there is none."""
    page = (repository / "docs" / "security.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)
    assert len(named) > 25
    for file, function in named:
        assert f"def {function}(" in (repository / file).read_text(), f"{file}::{function}"
    for row in page.splitlines():
        if row.startswith("| ") and "---" not in row and not row.startswith("| what"):
            assert "tests/" in row or "| none: " in row, f"a claim without a test: {row}"

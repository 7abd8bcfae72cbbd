"""The start of Horovod, tested without Horovod: the numbers of each rank, and errors."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from everyrank.errors import CannotRunError, RankFailedError, UsageError
from everyrank.launch import Launch, horovodrun
from everyrank.world import horovod as horovod_module
from everyrank.world import import_horovod, start_horovod, wait_for_horovod
from everyrank.world.horovod import horovod_numbers
from processes import Cli


def test_horovod_numbers_of_each_rank() -> None:
    """Local rank and size, cross rank and size for ranks in blocks, in turns, and unevenly distributed over hosts."""
    keys = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME")
    for hosts, expected in {
        "a a b b": ["0 4 0 2 0 2 a", "1 4 1 2 0 2 a", "2 4 0 2 1 2 b", "3 4 1 2 1 2 b"],
        "a b a": ["0 3 0 2 0 2 a", "1 3 0 1 1 2 b", "2 3 1 2 0 1 a"],
        "a b b": ["0 3 0 1 0 2 a", "1 3 0 2 1 2 b", "2 3 1 2 0 1 b"],
        "a": ["0 1 0 1 0 1 a"],
    }.items():
        numbers_by_rank = horovod_numbers(hosts.split())
        assert [" ".join(numbers[key] for key in keys) for numbers in numbers_by_rank] == expected


def test_train_without_horovod_is_refused(cli: Cli, tmp_path: Path) -> None:
    """The exit status is 3. The last line says that Horovod is not installed, and names alternatives."""
    hide_horovod = "import sys\nsys.modules['horovod.torch'] = None\nfrom everyrank.builtin import digits\n"
    (tmp_path / "mine.py").write_text(hide_horovod + "workload = digits.workload()\n")
    result = cli(tmp_path, "train", "mine.py", "--layout", "horovod", "--processes", "2", "--save-every", "0")
    assert result.status == 3, result.err
    line = result.err.splitlines()[-1]
    for fragment in ("Horovod is not installed", "0.28.1", "docs/horovod.md", "layout ddp", "--backend"):
        assert fragment in line
    assert "Traceback" not in result.err


def test_launcher_horovodrun_without_horovodrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovodrun, "find_horovodrun", lambda: None)
    with pytest.raises(CannotRunError, match="horovodrun"):
        horovodrun.LAUNCHER.find()
    with pytest.raises(UsageError, match=r"--nodes 2: .*-H n0:2"):
        Launch("horovodrun", processes=4, nodes=2)


def test_horovod_built_for_a_different_torch_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The library does not load. The error has the message of the loader."""
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").touch()
    (tmp_path / "horovod" / "torch.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(CannotRunError, match=r"does not load .*undefined symbol: _ZN3c10"):
        import_horovod()
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(
    ("rank", "size", "message"),
    [
        ("1", "2", "Horovod's rank is 1 of 2"),
        ("0", "4", "Horovod's rank is 0 of 4"),
        ("0", "", "without HOROVOD_SIZE"),
    ],
)
def test_horovod_ranks_that_differ_from_the_world_are_refused(
    monkeypatch: pytest.MonkeyPatch, rank: str, size: str, message: str
) -> None:
    """The error is raised before `hvd.init()`, which would wait for ranks that do not exist."""
    monkeypatch.setattr(horovod_module, "import_horovod", lambda: SimpleNamespace())
    monkeypatch.setenv("HOROVOD_RANK", rank)
    monkeypatch.setenv("HOROVOD_SIZE", size)
    world: Any = SimpleNamespace(rank=0, size=2, group_cache=SimpleNamespace(at_end={}))
    with pytest.raises(UsageError) as caught:
        start_horovod(world)
    assert message in str(caught.value)


def test_wait_for_horovod_has_a_timeout() -> None:
    polled_handles: list[int] = []

    def poll(handle: int) -> bool:
        polled_handles.append(handle)
        return handle == 1

    world: Any = SimpleNamespace(timeout_seconds=0.05)
    with pytest.raises(RankFailedError, match=r"0\.05 s"):
        wait_for_horovod(SimpleNamespace(poll=poll), [1, 2, 3], world)
    assert set(polled_handles) == {1, 2}

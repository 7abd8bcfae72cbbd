"""Starting Horovod, as far as that goes without it: places of ranks, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from everyrank.errors import CannotRunError, RankFailedError, UsageError
from everyrank.launch import Launch, horovodrun
from everyrank.world import horovod as module
from everyrank.world import import_horovod, start_horovod, wait_for_horovod
from everyrank.world.horovod import horovod_numbers
from processes import Cli


def test_the_place_of_each_rank() -> None:
    """In blocks, in turn, and uneven: local rank and size, and which of the hosts with such a local rank this is."""
    keys = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME")
    for hosts, expected in {
        "a a b b": ["0 4 0 2 0 2 a", "1 4 1 2 0 2 a", "2 4 0 2 1 2 b", "3 4 1 2 1 2 b"],
        "a b a": ["0 3 0 2 0 2 a", "1 3 0 1 1 2 b", "2 3 1 2 0 1 a"],
        "a b b": ["0 3 0 1 0 2 a", "1 3 0 2 1 2 b", "2 3 1 2 0 1 b"],
        "a": ["0 1 0 1 0 1 a"],
    }.items():
        places = horovod_numbers(hosts.split())
        assert [" ".join(place[key] for key in keys) for place in places] == expected


def test_horovod_that_is_not_there(cli: Cli, tmp_path: Path) -> None:
    """Status 3, one line."""
    hidden = "import sys\nsys.modules['horovod.torch'] = None\nfrom everyrank.builtin import digits\n"
    (tmp_path / "mine.py").write_text(hidden + "workload = digits.workload()\n")
    done = cli(tmp_path, "train", "mine.py", "--layout", "horovod", "--processes", "2", "--save-every", "0")
    assert done.status == 3, done.err
    line = done.err.splitlines()[-1]
    for part in ("Horovod is not installed", "0.28.1", "docs/horovod.md", "layout ddp", "--backend"):
        assert part in line
    assert "Traceback" not in done.err


def test_horovodrun_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovodrun, "find_horovodrun", lambda: None)
    with pytest.raises(CannotRunError, match="horovodrun"):
        horovodrun.LAUNCHER.find()
    with pytest.raises(UsageError, match=r"--nodes 2: .*-H n0:2"):
        Launch("horovodrun", processes=4, nodes=2)


def test_horovod_of_another_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its library does not load: one line, with what the loader says."""
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
    ("rank", "size", "said"),
    [
        ("1", "2", "Horovod's rank is 1 of 2"),
        ("0", "4", "Horovod's rank is 0 of 4"),
        ("0", "", "without HOROVOD_SIZE"),
    ],
)
def test_ranks_that_are_not_those_of_the_world(
    monkeypatch: pytest.MonkeyPatch, rank: str, size: str, said: str
) -> None:
    """Refused before Horovod waits for ranks that are somewhere else."""
    monkeypatch.setattr(module, "import_horovod", lambda: SimpleNamespace())
    monkeypatch.setenv("HOROVOD_RANK", rank)
    monkeypatch.setenv("HOROVOD_SIZE", size)
    world: Any = SimpleNamespace(rank=0, size=2, group_cache=SimpleNamespace(at_end={}))
    with pytest.raises(UsageError) as caught:
        start_horovod(world)
    assert said in str(caught.value)


def test_a_wait_has_an_end() -> None:
    asked: list[int] = []

    def poll(handle: int) -> bool:
        asked.append(handle)
        return handle == 1

    world: Any = SimpleNamespace(timeout_seconds=0.05)
    with pytest.raises(RankFailedError, match=r"0\.05 s"):
        wait_for_horovod(SimpleNamespace(poll=poll), [1, 2, 3], world)
    assert set(asked) == {1, 2}

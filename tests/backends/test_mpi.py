"""Backend mpi where there is no MPI: what is refused, and who is missing. tests/integration has real ones."""

from __future__ import annotations

import os
import re
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from everyrank.backends.mpi import make_mpi_group
from everyrank.backends.mpi.calls import Calls
from everyrank.backends.mpi.library import gather_mpi_ranks
from everyrank.backends.mpi.wait_table import WaitTable
from everyrank.errors import CannotRunError, RankFailedError
from processes import Cli, one_line


class FakeMpi(ModuleType):
    """Of mpi4py.MPI what is asked before the first call: a world of one process, and one thread."""

    THREAD_SERIALIZED = 2
    SUM = "MPI's sum"
    BOR = "MPI's or"
    COMM_WORLD = SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 1)

    def Is_initialized(self) -> bool:
        return True

    def Query_thread(self) -> int:
        return 0

    def Get_library_version(self) -> str:
        return "Fake MPI v1.0, and more\0"


@pytest.fixture
def _fake_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("OMPI_", "PMI", "MPI_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setitem(sys.modules, "mpi4py", ModuleType("mpi4py"))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", FakeMpi("mpi4py.MPI"))


def made(size: int) -> Any:
    return make_mpi_group(dist.HashStore(), 0, size, range(size), timedelta(seconds=1), "group")


def test_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(CannotRunError, match=r"pip install 'everyrank\[mpi\]'"):
        made(2)


@pytest.mark.usefixtures("_fake_mpi")
def test_without_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that nobody's mpirun has started would be an MPI world of its own."""
    with pytest.raises(CannotRunError, match="mpirun; use --launcher mpi"):
        made(2)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(CannotRunError, match="MPI_THREAD_SERIALIZED"):
        made(2)


def test_mpirun_of_another_mpi() -> None:
    """Then each process is a world of its own, and MPI would call both rank 0."""
    store: Any = dist.HashStore()
    store.set("mpi_rank/1", "[0, 1]")
    with pytest.raises(CannotRunError, match=r"1 of 2 ranks.* Fake MPI v1\.0"):
        gather_mpi_ranks(store, FakeMpi("mpi"), 0, 2, range(2), 1.0)


def test_a_rank_that_never_comes() -> None:
    with pytest.raises(RankFailedError, match=r"rank 7 did not reach .* within 0\.1 s"):
        gather_mpi_ranks(dist.HashStore(), FakeMpi("mpi"), 0, 2, [3, 7], 0.1)


def test_by_the_command(cli: Cli, tmp_path: Path) -> None:
    """One line and status 3, with mpi4py and without."""
    words = ["train", "digits", "--layout", "ddp", "--processes", "2", "--steps", "1", "--save-every", "0"]
    done = cli(tmp_path, *words, "--backend", "mpi", "--launcher", "spawn")
    assert done.status == 3
    assert re.match(r"everyrank: --backend mpi: (mpi4py is not|this process was not)", one_line(done.err))


def test_mpirun_is_the_launcher_of_its_backend(cli: Cli, tmp_path: Path) -> None:
    """Also where it is one of several; another launcher that was asked for stays."""
    for words in (["train", "digits", "--backend", "mpi"], ["comm", "--backend", "gloo", "shm", "mpi"]):
        done = cli(tmp_path, *words, "--processes", "2", "--dry-run")
        assert "mpirun -n 2" in done.out, done
    done = cli(tmp_path, "train", "digits", "--backend", "mpi", "--launcher", "torchrun", "--dry-run")
    assert "mpirun" not in done.out, done


def test_who_is_missing() -> None:
    """Rank 0 waits in its third collective, rank 1 in its first, rank 2 in none; then rank 1 comes, with another."""
    store, missing = dist.HashStore(), [1, 2]
    first, second, third = (WaitTable(store, rank, range(3)) for rank in range(3))
    second.begin("broadcast")
    second.update_missing([0, 2])
    for call in ("broadcast", "all_reduce", "barrier"):
        first.begin(call)
    assert first.update_missing(missing) == {}
    assert missing == [1, 2]
    for wait_table, calls in ((second, ("all_reduce", "all_gather")), (third, ("broadcast", "all_reduce", "barrier"))):
        for call in calls:
            wait_table.begin(call)
    second.update_missing([0, 2])
    first.last_read = 0.0  # the next read is due
    first.update_missing(missing)
    assert missing == [2]
    mismatch = first.describe_mismatch()
    assert next(mismatch) == [2]  # which has not said what it calls
    third.update_missing([0, 1])
    with pytest.raises(StopIteration) as said:
        next(mismatch)
    assert said.value.value == "rank 0 calls barrier, rank 1 all_gather"


@pytest.mark.parametrize(
    ("reduction", "dtype", "said"),
    [
        ("band", torch.float32, "reduction band of torch.float32"),
        ("max", torch.complex64, "reduction max of torch.complex64"),
        ("premul_sum", torch.float32, "give one of sum, avg"),
        ("sum", torch.float8_e4m3fn, "torch.float8_e4m3fn: MPI cannot reduce it"),
    ],
)
def test_reductions_that_mpi_does_not_have(reduction: str, dtype: torch.dtype, said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        Calls(FakeMpi("mpi"), None).operation(reduction, dtype)


def test_reductions_of_bool() -> None:
    """A sum of two true ones is true, and not 2."""
    calls = Calls(FakeMpi("mpi"), None)
    assert calls.operation("sum", torch.bool) == "MPI's or"
    assert calls.operation("sum", torch.int8) == "MPI's sum"

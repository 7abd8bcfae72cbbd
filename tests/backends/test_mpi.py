"""The mpi backend without MPI: errors and the report of missing ranks. tests/integration tests real MPI libraries."""

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
from processes import Cli, only_error_line


class FakeMpi(ModuleType):
    """A fake mpi4py.MPI with what is read before the first call: a world of one process with one thread."""

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
    """Install the fake module, and remove the variables of a real mpirun."""
    for name in [name for name in os.environ if name.startswith(("OMPI_", "PMI", "MPI_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setitem(sys.modules, "mpi4py", ModuleType("mpi4py"))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", FakeMpi("mpi4py.MPI"))


def make_group(size: int) -> Any:
    """Create the mpi group of rank 0."""
    return make_mpi_group(dist.HashStore(), 0, size, range(size), timedelta(seconds=1), "group")


def test_missing_mpi4py_is_reported_with_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(CannotRunError, match=r"pip install 'everyrank\[mpi\]'"):
        make_group(2)


@pytest.mark.usefixtures("_fake_mpi")
def test_process_not_started_by_mpirun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without mpirun, each process would be an MPI world of its own."""
    with pytest.raises(CannotRunError, match="mpirun; use --launcher mpi"):
        make_group(2)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(CannotRunError, match="MPI_THREAD_SERIALIZED"):
        make_group(2)


def test_mpirun_of_a_different_mpi_library_is_refused() -> None:
    """In that case each process is an MPI world of its own, and both have rank 0."""
    store: Any = dist.HashStore()
    store.set("mpi_rank/1", "[0, 1]")
    with pytest.raises(CannotRunError, match=r"1 of 2 ranks.* Fake MPI v1\.0"):
        gather_mpi_ranks(store, FakeMpi("mpi"), 0, 2, range(2), 1.0)


def test_rank_that_does_not_register_is_named_after_the_timeout() -> None:
    with pytest.raises(RankFailedError, match=r"rank 7 did not reach .* within 0\.1 s"):
        gather_mpi_ranks(dist.HashStore(), FakeMpi("mpi"), 0, 2, [3, 7], 0.1)


def test_train_with_backend_mpi_under_spawn_exits_with_status_3(cli: Cli, tmp_path: Path) -> None:
    """The error is one line, whether mpi4py is installed or not."""
    args = ["train", "digits", "--layout", "ddp", "--processes", "2", "--steps", "1", "--save-every", "0"]
    result = cli(tmp_path, *args, "--backend", "mpi", "--launcher", "spawn")
    assert result.status == 3
    assert re.match(r"everyrank: --backend mpi: (mpi4py is not|this process was not)", only_error_line(result.err))


def test_backend_mpi_selects_mpirun_as_launcher(cli: Cli, tmp_path: Path) -> None:
    """This also holds if mpi is one of several backends. An explicit launcher is kept."""
    for args in (
        ["train", "digits", "--layout", "ddp", "--backend", "mpi"],
        ["comm", "--backend", "gloo", "shm", "mpi"],
    ):
        result = cli(tmp_path, *args, "--processes", "2", "--dry-run")
        assert "mpirun -n 2" in result.out, result
    result = cli(tmp_path, "train", "digits", "--backend", "mpi", "--launcher", "torchrun", "--dry-run")
    assert "mpirun" not in result.out, result


def test_wait_table_names_missing_ranks_and_mismatched_calls() -> None:
    """Rank 0 waits in its third collective, rank 1 in its first, rank 2 in none. Then rank 1 makes a different call."""
    store, missing_ranks = dist.HashStore(), [1, 2]
    first, second, third = (WaitTable(store, rank, range(3)) for rank in range(3))
    second.begin("broadcast")
    second.update_missing([0, 2])
    for call in ("broadcast", "all_reduce", "barrier"):
        first.begin(call)
    assert first.update_missing(missing_ranks) == {}
    assert missing_ranks == [1, 2]
    for wait_table, calls in ((second, ("all_reduce", "all_gather")), (third, ("broadcast", "all_reduce", "barrier"))):
        for call in calls:
            wait_table.begin(call)
    second.update_missing([0, 2])
    first.last_read = 0.0  # the next read is due
    first.update_missing(missing_ranks)
    assert missing_ranks == [2]
    mismatch = first.describe_mismatch()
    assert next(mismatch) == [2]  # the rank that has not published its call
    third.update_missing([0, 1])
    with pytest.raises(StopIteration) as stop:
        next(mismatch)
    assert stop.value.value == "rank 0 calls barrier, but rank 1 calls all_gather"


@pytest.mark.parametrize(
    ("reduction", "dtype", "message"),
    [
        ("band", torch.float32, "reduction band of torch.float32"),
        ("max", torch.complex64, "reduction max of torch.complex64"),
        ("premul_sum", torch.float32, "give one of sum, avg"),
        ("sum", torch.float8_e4m3fn, "torch.float8_e4m3fn: MPI cannot reduce it"),
    ],
)
def test_reductions_unsupported_by_mpi_are_refused(reduction: str, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        Calls(FakeMpi("mpi"), None).operation(reduction, dtype)


def test_sum_of_bool_is_a_logical_or() -> None:
    """The sum of two true values is true, and not 2."""
    calls = Calls(FakeMpi("mpi"), None)
    assert calls.operation("sum", torch.bool) == "MPI's or"
    assert calls.operation("sum", torch.int8) == "MPI's sum"

"""The mpi backend with Open MPI and MPICH through mpi4py, on one host and across hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from everyrank import read_records
from forkserver import ForkServer
from integration.conftest import Hosts, skip_without
from integration.test_failures import HAPPENS, SAYS
from integration.test_recipe_commands import mpirun_environment
from processes import Cli
from test_faults import SOON, WORKLOAD, the_line

BEGIN = """
import os, sys, time
from datetime import timedelta
from types import SimpleNamespace
import torch
import torch.distributed as dist
from everyrank.backends import register_backend

sys.path.insert(0, TESTS)
torch.set_num_threads(1)
rank, size = (int(next(os.environ[name] for name in names if name in os.environ)) for names in (
    ("OMPI_COMM_WORLD_RANK", "PMI_RANK"), ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")))
after, before, everybody = (rank + 1) % size, (rank - 1) % size, list(range(size))
total = sum(everybody)
store = dist.FileStore("meeting", size)
dist.init_process_group(register_backend("mpi"), store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
"""
END = """
dist.barrier()
dist.destroy_process_group()
print("whole", flush=True)
"""
OPERATIONS = """
from collectives.test_comm import failed_combinations

world = SimpleNamespace(rank=rank, size=size, group=dist.group.WORLD, backend="mpi")
for length in (1, 1001, 40_000):
    assert failed_combinations(world, dist.get_backend(), size, length) == []
if size == 4:
    assert failed_combinations(world, dist.get_backend(), 2, 1001) == []
"""
ORDERS = """
def full(value, length=2**20):
    return torch.full((length,), float(value))

# both ways at once, larger than what MPI keeps for the other side
received = torch.empty(2**20)
sending = dist.isend(full(rank), after)
time.sleep(0.1)
dist.recv(received, before)
sending.wait()
assert (received == before).all()

# the tag that was sent last is asked for first
first, second = torch.empty(2**20), torch.empty(2**20)
works = [dist.isend(full(rank + tag), after, tag=tag) for tag in (1, 2)]
dist.recv(second, before, tag=2)
dist.recv(first, before, tag=1)
[work.wait() for work in works]
assert (first == before + 1).all() and (second == before + 2).all()

# from anyone
if rank == 0:
    found = torch.zeros(3)
    assert sorted(dist.recv(found) for _ in range(size - 1)) == everybody[1:]
else:
    dist.send(full(rank, 3), 0)

# two groups, in the opposite order on every other rank; one of them blocking
groups = [dist.new_group(everybody) for _ in range(2)]
for length in (10, 2**20 + 3):
    tensors = [full(rank, length), full(2 * rank, length)]
    places = [0, 1] if rank % 2 else [1, 0]
    work = dist.all_reduce(tensors[places[0]], group=groups[places[0]], async_op=True)
    dist.all_reduce(tensors[places[1]], group=groups[places[1]])
    work.wait()
    assert (tensors[0] == total).all() and (tensors[1] == 2 * total).all()

# a group is made while a collective is pending that another rank has not begun
if rank == 0:
    time.sleep(0.2)
tensor, other = full(1), full(1, 3)
work = dist.all_reduce(tensor, async_op=True)
dist.all_reduce(other, group=dist.new_group(everybody))
work.wait()
assert (tensor == size).all() and (other == size).all()
"""
TENSORS = """
# parts of one tensor that are read and written at once; tensors that are not contiguous; empty ones
whole = torch.zeros(size, 5)
whole[rank] = rank
dist.all_gather_into_tensor(whole, whole[rank])
assert (whole == torch.arange(size)[:, None]).all()
whole = torch.arange(size * 5.0)
dist.reduce_scatter_tensor(whole[rank * 5 : rank * 5 + 5], whole)
assert (whole[rank * 5 : rank * 5 + 5] == torch.arange(rank * 5.0, rank * 5.0 + 5) * size).all()
table = torch.arange(12.0).reshape(3, 4).t()
dist.all_reduce(table)
assert (table == torch.arange(12.0).reshape(3, 4).t() * size).all()
parts = [torch.empty(2, 3).t() for _ in everybody]
dist.all_gather(parts, torch.full((3, 2), float(rank)))
assert all((part == place).all() for place, part in enumerate(parts))
lists = [torch.empty(2 * (rank + 1)) for _ in everybody]
dist.all_to_all(lists, [torch.full((2 * (place + 1),), float(rank)) for place in everybody])
assert all((part == place).all() for place, part in enumerate(lists))
dist.all_reduce(torch.zeros(0))

# what is added up on one rank stays as it was on the others
for dtype in (torch.float32, torch.float16):
    longer = torch.full((2**20 + 3,), rank + 1).to(dtype)
    dist.reduce(longer, 1)
    assert (longer == (total + size if rank == 1 else rank + 1)).all()

# dtypes that MPI does not have, or has otherwise
for dtype in (torch.bool, torch.int8, torch.uint8, torch.int16, torch.complex64, torch.complex128):
    tensor = torch.ones(7, dtype=dtype)
    dist.all_reduce(tensor)
    assert (tensor == (True if dtype is torch.bool else size)).all(), dtype
halves = torch.tensor([256.0] + [1.0] * 3, dtype=torch.bfloat16)  # where 256 + 1 is 256: rounded once, not each time
dist.all_reduce(halves)
assert halves.float().tolist() == [256.0 * size] + [size] * 3
small = torch.full((5,), rank).to(torch.float8_e4m3fn)
dist.broadcast(small, 1)
assert (small.float() == 1).all()
"""
WRONG = """
def said(call, group):
    try:
        call(group)
    except RuntimeError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"

def new_group(seconds=60):
    return dist.new_group(everybody, timeout=timedelta(seconds=seconds))

same = "all ranks of a group call the same collectives in the same order"
call = dist.barrier if rank == 1 else lambda group: dist.all_reduce(torch.ones(5), group=group)
differs = said(call, new_group())
assert differs.startswith(f"RankFailedError: rank {rank} calls ") and "barrier" in differs and same in differs, differs
longer = said(lambda group: dist.all_reduce(torch.ones(5 if rank else 9), group=group), new_group())
assert "9 elements of float32" in longer and "5 elements of float32" in longer and same in longer, longer
group = new_group()
average = said(lambda group: dist.all_reduce(torch.ones(2, dtype=torch.int64), dist.ReduceOp.AVG, group=group), group)
assert "reduction avg of torch.int64" in average, average
dist.all_reduce(torch.ones(2), group=group)  # the group still works
# what two ranks alone can know
if rank == 0:
    dist.send(torch.ones(5), 1)
    dist.send(torch.ones(9), 1, tag=3)
if rank == 1:
    shorter = said(lambda _: dist.recv(torch.ones(7), 0), None)
    assert "rank 0 sent 20 bytes with tag 0, and rank 1 receives 28" in shorter, shorter
    assert "truncated" in said(lambda _: dist.recv(torch.ones(7), 0, tag=3), None)
given = [3 if rank == 0 else 2] * size
uneven = said(lambda group: dist.all_to_all_single(torch.ones(2 * size), torch.ones(sum(given)), [2] * size, given,
                                                   group=group), new_group())
assert f"rank 0 of the group sends 12 bytes to rank {rank}, which expects 8" in uneven, uneven
"""
MISSING = """
group = dist.new_group(everybody, timeout=timedelta(seconds=60))
group.set_timeout(timedelta(seconds=3))
dist.all_reduce(torch.ones(3), group=group)
if rank != 1:
    try:
        dist.recv(torch.ones(3), 1, group=group)
    except Exception as error:
        print(error, flush=True)
if rank == 1:
    time.sleep(9)
else:
    try:
        dist.all_reduce(torch.ones(3), group=group)
    except Exception as error:
        print(error, flush=True)
"""


@pytest.fixture(params=["Open MPI", "MPICH"])
def mpi(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """Return the environment variables with which `mpirun` and mpi4py use this MPI."""
    if find_spec("mpi4py") is None:
        skip_without("mpi4py (pip install 'everyrank[mpi]')")
    variables = mpirun_environment(tmp_path, request.param)
    if request.param == "MPICH":  # Debian's library has another name than the one mpi4py asks for
        known = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
        found = re.search(r"libmpich\.so\.12 .*=> (\S+)", known)
        if found is None:
            skip_without("MPICH's library")
        (tmp_path / "lib").mkdir()
        (tmp_path / "lib" / "libmpi.so.12").symlink_to(found[1])
        variables |= {"LD_LIBRARY_PATH": str(tmp_path / "lib"), "MPI4PY_LIBMPI": str(tmp_path / "lib/libmpi.so.12")}
    return variables


def write_ranks(folder: Path, text: str) -> None:
    tests = str(Path(__file__).parents[1])
    (folder / "ranks.py").write_text(BEGIN.replace("TESTS", repr(tests)) + text + END)


def interpreter(mpi: dict[str, str], python: ForkServer) -> str:
    """Return the Python for the ranks. MPICH's ranks inherit an open file, so the fork server cannot start them."""
    return sys.executable if "MPI4PY_LIBMPI" in mpi else str(python.programs / "python")


def by_mpirun(
    folder: Path, variables: dict[str, str], size: int, text: str, python: str
) -> subprocess.CompletedProcess[str]:
    """Run this script with mpirun and return its output and exit code."""
    write_ranks(folder, text)
    return subprocess.run(
        ["mpirun", "-n", str(size), python, "ranks.py"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize(
    ("mpi", "size"),
    [*(("Open MPI", size) for size in (2, 3, 4)), ("MPICH", 2)],
    indirect=["mpi"],
)
def test_operations_and_dtypes_are_correct_in_any_order(
    tmp_path: Path, mpi: dict[str, str], python: ForkServer, size: int
) -> None:
    """The orders of calls would deadlock if operations blocked.

    MPICH is tested on two ranks only, because its ranks start in a new Python.
    """
    done = by_mpirun(tmp_path, mpi, size, OPERATIONS + ORDERS + TENSORS, interpreter(mpi, python))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("whole") == size


def test_mismatched_calls_are_reported_on_all_ranks(tmp_path: Path, mpi: dict[str, str], python: ForkServer) -> None:
    """MPI itself crashes or gives wrong results for them."""
    done = by_mpirun(tmp_path, mpi, 3, WRONG, interpreter(mpi, python))
    assert done.returncode == 0, done.stdout + done.stderr


def test_missing_rank_is_named_after_the_timeout(tmp_path: Path, mpi: dict[str, str], python: ForkServer) -> None:
    """The two waiting ranks name the third, and not each other. `set_timeout` changes the timeout of messages, too."""
    done = by_mpirun(tmp_path, mpi, 3, MISSING, interpreter(mpi, python))
    assert done.stdout.count("mpi recv timed out after 3 s") == 2, done.stdout + done.stderr
    assert done.stdout.count("mpi all_reduce timed out after 3 s") == 2, done.stderr


SMALL_TEXT = """
import dataclasses
from everyrank import find_workload
from everyrank.builtin import Decoder, DecoderShape

def workload():
    shape = DecoderShape(num_blocks=4, num_heads=4, width=32, hidden=64)
    changes = {"model": lambda: Decoder(shape), "global_batch": 8, "eval_data": None, "metrics": {}}
    return dataclasses.replace(find_workload("text"), **changes)
"""


@pytest.mark.parametrize(
    ("workload", "layouts", "size"),
    [
        ("digits", "ddp zero1 fsdp", 3),
        ("small_text.py:workload", "pipeline context fsdp:tensor=2", 4),
    ],
)
@pytest.mark.parametrize("mpi", ["Open MPI"], indirect=True)
def test_layouts_are_equal(
    cli: Cli, tmp_path: Path, mpi: dict[str, str], workload: str, layouts: str, size: int
) -> None:
    (tmp_path / "small_text.py").write_text(SMALL_TEXT)
    args = ["--quick", "--backend", "mpi", "--launcher", "mpi", "--processes", size, "--json", "v.json"]
    variables = {"OMP_NUM_THREADS": "1", **mpi}
    ended = cli.start(tmp_path, "verify", workload, *args, "--layout", *layouts.split(), **variables).end(230)
    assert ended.status == 0, ended.out + ended.err
    assert {record.backend for record in read_records(tmp_path / "v.json")} == {"mpi"}


@pytest.mark.parametrize("fault", ["raises", "killed"])
@pytest.mark.parametrize("mpi", ["Open MPI"], indirect=True)
def test_failed_rank_is_named_and_ends_all_ranks(cli: Cli, tmp_path: Path, mpi: dict[str, str], fault: str) -> None:
    """One line names the rank and the cause. The other ranks do not wait in MPI, and no process is left."""
    (tmp_path / "my_workload.py").write_text(WORKLOAD.replace("HAPPENS", HAPPENS[fault]))
    words = ["train", "my_workload.py", "--layout", "ddp", "--processes", "3", "--save-every", "0"]
    running = cli.start(tmp_path, *words, "--launcher", "mpi", "--backend", "mpi", is_forked=False, **mpi)
    status, _, stderr = running.end(SOON)
    assert status == 4, stderr
    line = the_line(stderr)
    assert line.startswith("rank 1 of 3 on "), line
    assert SAYS[fault].partition("{line}")[2] in line
    assert running.remaining_processes() == {}


AGENT = """\
#!/bin/sh
# what mpirun takes for ssh: ADDRESS COMMAND
address=$1
shift
case $address in
CASES
esac
exec ip netns exec $host unshare --uts sh -c "hostname $host; $*"
"""


@pytest.mark.parametrize("mpi", ["Open MPI"], indirect=True)
def test_operations_are_correct_across_two_hosts(
    python: ForkServer, tmp_path: Path, mpi: dict[str, str], three_hosts: Hosts
) -> None:
    """Each host has two ranks. The hosts communicate over TCP."""
    places = list(zip(three_hosts.addresses, three_hosts.names, strict=True))
    cases = "\n".join(f"{address}) host={name} ;;" for address, name in places)
    (tmp_path / "agent").write_text(AGENT.replace("CASES", cases))
    (tmp_path / "agent").chmod(0o755)
    write_ranks(tmp_path, OPERATIONS + ORDERS + "print(os.uname().nodename, flush=True)\n")
    hosts = ",".join(f"{address}:2" for address in three_hosts.addresses[:2])
    start = ["--prtemca", "plm_ssh_agent", str(tmp_path / "agent"), "--host", hosts, "--map-by", "ppr:2:node"]
    wire = ["--mca", "btl", "self,sm,tcp", "--mca", "btl_tcp_if_include", "eth0"]
    words = [*start, *wire, "-x", "PYTHONPATH", "-x", "OMP_NUM_THREADS", interpreter(mpi, python), "ranks.py"]
    process = three_hosts.start(0, ["mpirun", *words], tmp_path, **mpi, OMP_NUM_THREADS="1")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, out + err
    assert [out.count(name) for name in three_hosts.names] == [2, 2, 0]
    assert out.count("whole") == 4

"""Hosts, interfaces, and the rendezvous of the ranks."""

from __future__ import annotations

import http.server
import json
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from everyrank.errors import CannotRunError, EveryrankError, RankFailedError, UsageError, WorkloadError
from everyrank.launch import (
    Launch,
    RankInfo,
    host_info,
    run_ranks,
)
from everyrank.launch.host_info import (
    LOOPBACK,
    check_reachable,
    choose_interface,
    local_address_towards,
    split_endpoint,
)
from everyrank.world import heartbeat
from everyrank.world.heartbeat import Peer, register_rank, route_to_peers, wait_for_peers
from everyrank.world.rendezvous import open_store
from launching import TRAIN_DDP, CommandResult
from processes import Cli, free_port

# --- hosts and interfaces


@pytest.mark.parametrize(
    ("text", "expected"),
    [("n0:29500", ("n0", 29500)), ("[fd00::1]:29500", ("fd00::1", 29500)), ("10.0.0.1:1", ("10.0.0.1", 1))],
)
def test_split_endpoint(text: str, expected: tuple[str, int]) -> None:
    """IPv6 addresses are in brackets."""
    assert split_endpoint(text, "--rendezvous") == expected


def test_check_reachable_refuses_unknown_and_loopback_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that also has an address outside loopback is accepted."""
    addresses = {"n0": ["10.0.0.1"], "both": ["127.0.1.1", "10.0.0.1"], "here": ["127.0.1.1", "::1"]}
    monkeypatch.setattr(host_info, "addresses_of", lambda name: addresses.get(name, []))
    check_reachable("n0", "--rendezvous")
    check_reachable("both", "--rendezvous")
    with pytest.raises(UsageError, match=r"--rendezvous here: .* 127\.0\.1\.1 .*loopback"):
        check_reachable("here", "--rendezvous")
    with pytest.raises(UsageError, match=r"--rendezvous nosuch: .* no address"):
        check_reachable("nosuch", "--rendezvous")


@pytest.mark.parametrize("name", ["a..b", "x" * 64 + ".org", "nosuch.invalid"])
def test_local_address_towards_an_invalid_name(name: str) -> None:
    """The result is None, and no exception is raised."""
    assert local_address_towards(name) is None


ADDRESSES = {"lo": "127.0.0.1", "eth0": "10.0.0.5", "ib0": "192.168.7.5"}


@pytest.mark.parametrize(
    ("interface", "variable", "is_one_machine", "own_address", "expected"),
    [
        ("ib0", None, False, "10.0.0.5", "ib0"),
        ("ib0", "eth0", True, None, "ib0"),  # --interface has precedence over the variable
        (None, "eth0", True, None, None),  # the backend reads the variable
        (None, None, True, "10.0.0.5", LOOPBACK),
        (None, None, False, "10.0.0.5", "eth0"),
        (None, None, False, "192.168.7.5", "ib0"),
        (None, None, False, None, None),
        (None, None, False, "203.0.113.9", None),
    ],
)
def test_choose_interface(
    interface: str | None, variable: str | None, is_one_machine: bool, own_address: str | None, expected: str | None
) -> None:
    """It is the named interface, or the one with the address that leads to the other ranks."""
    name, reason = choose_interface(interface, variable, is_one_machine, own_address, ADDRESSES)
    assert name == expected
    assert reason


def test_port_in_use_is_reported_before_the_start(run_main: Any, busy_port: int) -> None:
    """No rank has to start to find it."""
    result = run_main(TRAIN_DDP + f"--processes 2 --init-method tcp://127.0.0.1:{busy_port}")
    assert (result.status, result.out) == (2, "")
    assert f"port {busy_port} at 127.0.0.1: Address already in use" in result.line
    assert "another port" in result.line


def test_check_port_ignores_ports_of_other_hosts(monkeypatch: pytest.MonkeyPatch, busy_port: int) -> None:
    """A port that is in use here may be free there."""
    monkeypatch.setattr(host_info, "addresses_of", lambda _: ["192.0.2.77"])
    errors: list[str] = []
    try:
        host_info.check_port("n1", busy_port)
    except EveryrankError as error:
        errors.append(str(error))
    assert errors == []


def test_error_of_a_missing_interface_names_the_existing_ones() -> None:
    with pytest.raises(UsageError, match=r"--interface eth9: .*lo \(127\.0\.0\.1\), eth0 \(10\.0\.0\.5\)"):
        choose_interface("eth9", None, True, None, ADDRESSES)


RANK_0_PEER = Peer("n0", "boot A", None)

SAME_HOST_PEER = Peer("n0", "boot A", None)

OTHER_HOST_PEER = Peer("n1", "boot B", "10.0.0.7")

PEER_WITHOUT_ADDRESS = Peer("n2", "boot C", None)


@pytest.mark.parametrize(
    ("others", "rank", "address", "expected"),
    [
        ([RANK_0_PEER, SAME_HOST_PEER], 0, None, (True, None)),
        # Slurm may count one machine as several nodes; the boot id shows it
        ([RANK_0_PEER, Peer("n9", "boot A", "127.0.0.1")], 0, None, (True, None)),
        ([RANK_0_PEER, OTHER_HOST_PEER], 1, "10.0.0.7", (False, "10.0.0.7")),
        ([RANK_0_PEER, SAME_HOST_PEER, OTHER_HOST_PEER], 0, None, (False, "towards 10.0.0.7")),
        ([RANK_0_PEER, SAME_HOST_PEER, OTHER_HOST_PEER], 1, None, (False, "towards 10.0.0.7")),
        ([RANK_0_PEER, PEER_WITHOUT_ADDRESS, OTHER_HOST_PEER], 0, None, (False, "towards 10.0.0.7")),
        ([RANK_0_PEER, PEER_WITHOUT_ADDRESS], 0, None, (False, None)),
    ],
)
def test_route_to_peers(
    monkeypatch: pytest.MonkeyPatch,
    others: list[Peer],
    rank: int,
    address: str | None,
    expected: tuple[bool, str | None],
) -> None:
    """A rank on another host has its own address from that route. Rank 0 uses the route back to that host."""
    monkeypatch.setattr(heartbeat, "local_address_towards", lambda address: f"towards {address}")
    assert route_to_peers(others, rank, address) == expected


# --- rendezvous


def rank_info(rank: int = 0, size: int = 1, rendezvous: str = "", **fields: Any) -> RankInfo:
    """Return a rank on one host, by default the only one."""
    return RankInfo(rank, rank, size, size, "env", rendezvous, is_store_master=rank == 0, **fields)


def test_open_store_reports_a_port_in_use(busy_port: int) -> None:
    """Each method with a port names it, with a fix."""
    for launch, rendezvous in (
        (Launch(init_method=f"tcp://127.0.0.1:{busy_port}"), ""),
        (Launch(), f"tcp://127.0.0.1:{busy_port}"),
    ):
        with pytest.raises(UsageError) as error_info:
            open_store(rank_info(rendezvous=rendezvous), launch)
        assert f"port {busy_port} at 127.0.0.1: Address already in use" in str(error_info.value)
        assert "another port" in str(error_info.value)


@pytest.mark.parametrize("method", ["env", "tcp", "file", "launcher", "python"])
def test_ranks_meet_by_each_init_method(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str) -> None:
    """Rank 1 reads what rank 0 has written to the store."""
    port, path = free_port(), tmp_path / "odd '$(x)' folder" / "a file"
    store = dist.HashStore()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    methods: dict[str, Any] = {
        "env": "env",
        "tcp": f"tcp://127.0.0.1:{port}",
        "file": f"file://{path}",
        "launcher": None,
        "python": lambda _rank, _size: store,
    }
    launch = Launch(init_method=methods[method], timeout_seconds=5)
    rendezvous_by_rank = [open_store(rank_info(rank, 2, f"tcp://127.0.0.1:{port}"), launch) for rank in (0, 1)]
    rendezvous_by_rank[0].store.set("key", "value")
    assert rendezvous_by_rank[1].store.get("key") == b"value"
    assert [rendezvous.is_host for rendezvous in rendezvous_by_rank] == [True, False]
    assert path.exists() == (method == "file")
    if method == "file":
        assert rendezvous_by_rank[0].file == path


def test_init_method_env_uses_the_open_store_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent of torchrun already listens on the port."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(agent.port))
    info = RankInfo(0, 0, 1, 1, "torchrun", f"tcp://127.0.0.1:{agent.port}", is_store_master=False)
    rendezvous = open_store(info, Launch(init_method="env", timeout_seconds=5))
    agent.set("key", "value")
    assert rendezvous.store.get("key") == b"value"
    assert not rendezvous.is_host


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_init_method_env_names_a_missing_variable(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """The error also shows how to set it."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        if name != missing:
            monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"--init-method env: {missing} is not set; MASTER_ADDR="):
        open_store(rank_info(), Launch(init_method="env"))


def test_mpirun_over_several_hosts_needs_an_init_method() -> None:
    """The error is one line with the option, instead of a timeout."""
    with pytest.raises(UsageError, match=r"4 ranks on several hosts .*--init-method tcp://HOST:PORT"):
        open_store(RankInfo(0, 0, 4, 2, "mpi", "", is_store_master=True), Launch())


def test_loopback_store_is_refused_for_ranks_of_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """MASTER_ADDR set by hand is refused too. A Slurm with several nodes on one machine is accepted."""
    monkeypatch.setattr(host_info, "addresses_of", lambda _: ["127.0.1.1"])
    info = RankInfo(0, 0, 4, 2, "env", "tcp://n0:29500", is_store_master=True)
    with pytest.raises(UsageError, match=r"rendezvous at n0: .* 127\.0\.1\.1 .*loopback"):
        open_store(info, Launch())
    port = free_port()
    slurm_info = RankInfo(0, 0, 4, 2, "slurm", f"tcp://127.0.0.1:{port}", is_store_master=True)
    assert open_store(slurm_info, Launch(timeout_seconds=5)).is_host


@pytest.mark.integration
def test_store_that_is_never_opened_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the address of the store."""
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    port = free_port()
    with pytest.raises(RankFailedError, match=f"the store of rank 0 at 127.0.0.1:{port}"):
        open_store(rank_info(1, 2, f"tcp://127.0.0.1:{port}"), Launch(timeout_seconds=1))


class RendezvousHandler(http.server.BaseHTTPRequestHandler):
    """An HTTP server with keys and values, as horovodrun has one."""

    values: ClassVar[dict[str, bytes]] = {}

    def do_PUT(self) -> None:
        self.values[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(b"")

    def do_GET(self) -> None:
        self.answer(self.values.get(self.path))

    def answer(self, value: bytes | None) -> None:
        self.send_response(200 if value is not None else 404)
        self.send_header("Content-Length", str(len(value or b"")))
        self.end_headers()
        self.wfile.write(value or b"")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def rendezvous_url() -> Iterator[str]:
    """Yield the address of a server without values."""
    RendezvousHandler.values.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), RendezvousHandler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_ranks_meet_over_the_server_of_horovodrun(rendezvous_url: str) -> None:
    """The server has an old address at which no process listens. It is ignored."""
    stale_address = {"boot": host_info.boot_id(), "host": "n0", "port": int(free_port()), "addresses": []}
    RendezvousHandler.values["/everyrank/address"] = json.dumps(stale_address).encode()
    launch = Launch(processes=2, timeout_seconds=30)
    infos = [RankInfo(rank, rank, 2, 2, "horovodrun", rendezvous_url) for rank in range(2)]
    with ThreadPoolExecutor() as threads:
        rank_1_future = threads.submit(open_store, infos[1], launch)
        time.sleep(0.3)
        rank_0_rendezvous = open_store(infos[0], launch)
        rank_0_rendezvous.store.set("key", "value")
        assert rank_1_future.result().store.get("key") == b"value"


def test_unreachable_server_of_horovodrun_is_reported(rendezvous_url: str) -> None:
    """No process listens, or rank 0 does not publish its address. Each error is one line."""
    info = RankInfo(1, 1, 2, 2, "horovodrun", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(RankFailedError, match=r"http://127\.0\.0\.1:\d+ .*Connection refused"):
        open_store(info, Launch(processes=2, timeout_seconds=30))
    with pytest.raises(RankFailedError, match=r"rank 0 did not publish .* within 0\.2 s"):
        open_store(RankInfo(1, 1, 2, 2, "horovodrun", rendezvous_url), Launch(processes=2, timeout_seconds=0.2))


def test_address_file_that_is_never_written_times_out(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match=r"rank 0 did not publish .* within 0\.1 s \(--timeout\)"):
        open_store(rank_info(1, 2, f"meet://{tmp_path}/address"), Launch(timeout_seconds=0.1))


def write_killed_run_file(path: Path) -> None:
    """Write the file that a killed run leaves."""
    store = dist.FileStore(str(path), 2)
    register_rank(dist.PrefixStore("everyrank/0/0", store), 0, None)
    # the last rank that closes a FileStore removes its file; a killed rank does not
    content = path.read_bytes()
    del store
    path.write_bytes(content)


INVALID_FILES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "of an old run": (
        lambda path: (write_killed_run_file(path), os.utime(path, (time.time() - 999,) * 2)),
        ["999 s ago", "remove it, or give another name"],
    ),
    "of something else": (lambda path: path.write_text("my thesis"), ["not a rendezvous file", "give another path"]),
    "a folder": (lambda path: path.mkdir(), ["store"]),
    "that cannot be made": (lambda path: path.symlink_to(path / ".." / "nosuch" / "store"), ["give another path"]),
    "below a file": (lambda path: path.parent.rmdir() or path.parent.write_text("x"), ["cannot be written"]),
}


def test_low_limit_of_open_files_is_refused_with_loader_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the workers and their rank would deadlock."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (32, 4096))
    with pytest.raises(UsageError, match=r"--workers 1: .* 32; .*ulimit -n 1024"):
        run_ranks(Launch(loader_workers=1), len)


def test_rank_0_does_not_listen_at_a_name_without_an_address() -> None:
    """Otherwise the other ranks would try that name until the timeout."""
    with pytest.raises(UsageError, match=r"256\.1\.1\.1: the name has no address here"):
        open_store(rank_info(size=2), Launch(init_method="tcp://256.1.1.1:65000", timeout_seconds=2))


@pytest.mark.parametrize("case", INVALID_FILES)
def test_invalid_rendezvous_file_is_refused(tmp_path: Path, case: str) -> None:
    """The error comes before the timeout. A user's file is not changed."""
    create_file, fragments = INVALID_FILES[case]
    (tmp_path / "below").mkdir()
    path = tmp_path / "below" / "store"
    create_file(path)
    content_before = path.read_bytes() if path.is_file() else None
    start_time = time.monotonic()
    with pytest.raises(UsageError) as error_info:
        open_store(rank_info(size=2), Launch(init_method=f"file://{path}", timeout_seconds=2))
    assert time.monotonic() < start_time + 1.5
    for fragment in (f"file://{path}", *fragments):
        assert fragment in str(error_info.value)
    assert (path.read_bytes() if path.is_file() else None) == content_before


def test_file_of_a_run_that_was_just_killed_is_refused(tmp_path: Path) -> None:
    """The file is too new to be refused by its age. Rank 0 is already registered in it."""
    path = tmp_path / "store"
    write_killed_run_file(path)
    rendezvous = open_store(rank_info(size=2), Launch(init_method=f"file://{path}", timeout_seconds=5))
    with pytest.raises(UsageError, match=r"rank 0 has already registered.* killed run"):
        register_rank(dist.PrefixStore("everyrank/0/0", rendezvous.store), 0, None)


@pytest.mark.parametrize("name", ["a b", "50%", "a#b", "a?b", "it's"])
def test_special_characters_in_a_file_url_are_literal(tmp_path: Path, name: str) -> None:
    rendezvous = open_store(rank_info(), Launch(init_method=f"file://{tmp_path}/{name}", timeout_seconds=5))
    assert rendezvous.file == tmp_path / name


def raise_no_route(_rank: int, _size: int) -> dist.Store:
    raise OSError("no route")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda _rank, _size: None, "init_method returned NoneType; return a torch.distributed.Store"),
        (raise_no_route, "no route"),
    ],
)
def test_error_of_a_user_init_method_is_a_workload_error(function: Any, message: str) -> None:
    """The user's function returns no store, or raises an error."""
    with pytest.raises(WorkloadError, match=message):
        open_store(rank_info(), Launch(init_method=function))


def test_second_process_of_a_rank_is_refused() -> None:
    """The error is one line with both possible reasons."""
    store = dist.HashStore()
    register_rank(store, 0, None)
    register_rank(store, 1, None)
    with pytest.raises(UsageError, match=r"rank 1 has already registered.* the same rank"):
        register_rank(store, 1, None)


@pytest.mark.parametrize("name", ["torch", "everyrank", "Python"])
def test_different_versions_are_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The check runs at every start. The error names rank, host and fix."""
    store = dist.HashStore()
    register_rank(store, 0, None)
    if name == "Python":
        monkeypatch.setattr(heartbeat.platform, "python_version_tuple", lambda: ("3", "9", "1"))
    else:
        monkeypatch.setattr(torch if name == "torch" else heartbeat, "__version__", "0.1")
    monkeypatch.setattr(heartbeat, "host_name", lambda: "n1")
    register_rank(store, 1, "10.0.0.7")
    with pytest.raises(CannotRunError) as error_info:
        wait_for_peers(store, 2)
    version = "3.9" if name == "Python" else "0.1"
    assert f"rank 1 on n1 has {name} {version}, and rank 0 on" in str(error_info.value)
    assert "on all hosts" in str(error_info.value)


def test_different_builds_of_one_version_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, one host has the CPU build."""
    store = dist.HashStore()
    for rank, build in enumerate(["2.9.0+cpu", "2.9.0+cu128"]):
        monkeypatch.setattr(torch, "__version__", build)
        register_rank(store, rank, f"10.0.0.{rank}")
    assert [peer.address for peer in wait_for_peers(store, 2)] == ["10.0.0.0", "10.0.0.1"]


FAILING_RENDEZVOUS = {
    # arguments, fragments of the error
    "a port in use": ("--init-method tcp://127.0.0.1:BUSY", ["port BUSY at 127.0.0.1", "another port"]),
    "an old file": ("--init-method file://DIR/old", ["file://DIR/old", "remove it"]),
    "an interface": ("--interface eth9", ["--interface eth9", "not up"]),
}


@pytest.mark.parametrize("case", FAILING_RENDEZVOUS)
def test_failed_rendezvous_exits_with_one_line(cli: Cli, tmp_path: Path, busy_port: int, case: str) -> None:
    """The status is 2, although a rank finds the error."""
    write_killed_run_file(tmp_path / "old")
    os.utime(tmp_path / "old", (time.time() - 999,) * 2)
    args, fragments = FAILING_RENDEZVOUS[case]

    def fill_placeholders(text: str) -> str:
        return text.replace("BUSY", str(busy_port)).replace("DIR", str(tmp_path))

    rank_result = cli.on_ranks(tmp_path, "train", "digits", "--steps", 1, *fill_placeholders(args).split())
    result = CommandResult(rank_result.status, rank_result.out, rank_result.err)
    assert result.status == 2
    for fragment in fragments:
        assert fill_placeholders(fragment) in result.line


def test_two_ranks_train_over_a_rendezvous_file(cli: Cli, tmp_path: Path) -> None:
    """The ranks are started by another launcher. The file is deleted at the end, so the next run can use the path."""
    args = ["train", "digits", "--layout", "ddp", "--steps", 1, "--init-method", f"file://{tmp_path}/a file"]
    for _ in range(2):
        result = cli.on_ranks(tmp_path, *args, size=2)
        assert (result.status, result.err) == (0, "")
        assert not (tmp_path / "a file").exists()

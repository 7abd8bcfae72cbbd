"""Hosts and interfaces, and where the ranks meet."""

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
from launching import DDP, Typed
from processes import Cli, free_port

# --- hosts and interfaces


@pytest.mark.parametrize(
    ("text", "expected"),
    [("n0:29500", ("n0", 29500)), ("[fd00::1]:29500", ("fd00::1", 29500)), ("10.0.0.1:1", ("10.0.0.1", 1))],
)
def test_an_endpoint_is_split(text: str, expected: tuple[str, int]) -> None:
    """IPv6 addresses come in brackets."""
    assert split_endpoint(text, "--rendezvous") == expected


def test_a_host_that_others_can_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unknown names and loopback alone are refused; a name with one address outside is not."""
    known = {"n0": ["10.0.0.1"], "both": ["127.0.1.1", "10.0.0.1"], "here": ["127.0.1.1", "::1"]}
    monkeypatch.setattr(host_info, "addresses_of", lambda name: known.get(name, []))
    check_reachable("n0", "--rendezvous")
    check_reachable("both", "--rendezvous")
    with pytest.raises(UsageError, match=r"--rendezvous here: .* 127\.0\.1\.1 .*loopback"):
        check_reachable("here", "--rendezvous")
    with pytest.raises(UsageError, match=r"--rendezvous nosuch: .* no address"):
        check_reachable("nosuch", "--rendezvous")


@pytest.mark.parametrize("name", ["a..b", "x" * 64 + ".org", "nosuch.invalid", ""])
def test_a_name_that_no_host_can_have_has_no_way(name: str) -> None:
    """None, as for every other name without an address."""
    assert local_address_towards(name) in (None, "127.0.0.1", "0.0.0.0")


THERE = {"lo": "127.0.0.1", "eth0": "10.0.0.5", "ib0": "192.168.7.5"}


@pytest.mark.parametrize(
    ("asked", "variable", "is_one_machine", "own_address", "expected"),
    [
        ("ib0", None, False, "10.0.0.5", "ib0"),
        ("ib0", "eth0", True, None, "ib0"),  # --interface is nearer than a variable
        (None, "eth0", True, None, None),  # the backend reads it
        (None, None, True, "10.0.0.5", LOOPBACK),
        (None, None, False, "10.0.0.5", "eth0"),
        (None, None, False, "192.168.7.5", "ib0"),
        (None, None, False, None, None),
        (None, None, False, "203.0.113.9", None),
    ],
)
def test_the_interface_is_chosen(
    asked: str | None, variable: str | None, is_one_machine: bool, own_address: str | None, expected: str | None
) -> None:
    """The one that was named, else the one that leads to the others."""
    name, why = choose_interface(asked, variable, is_one_machine, own_address, THERE)
    assert name == expected
    assert why


def test_a_port_is_looked_at_before_the_start(typed: Any, busy: int) -> None:
    """No rank has to come up to find out that it is taken."""
    shown = typed(DDP + f"--processes 2 --init-method tcp://127.0.0.1:{busy}")
    assert (shown.status, shown.out) == (2, "")
    assert f"port {busy} at 127.0.0.1: Address already in use" in shown.line
    assert "another port" in shown.line


def test_a_port_of_another_host_is_not_judged(monkeypatch: pytest.MonkeyPatch, busy: int) -> None:
    """What is taken here may be free there."""
    monkeypatch.setattr(host_info, "addresses_of", lambda _: ["192.0.2.77"])
    said: list[str] = []
    try:
        host_info.check_port("n1", busy)
    except EveryrankError as error:
        said.append(str(error))
    assert said == []


def test_an_interface_that_is_not_there() -> None:
    """Those that are there are named."""
    with pytest.raises(UsageError, match=r"--interface eth9: .*lo \(127\.0\.0\.1\), eth0 \(10\.0\.0\.5\)"):
        choose_interface("eth9", None, True, None, THERE)


HERE = Peer("n0", "boot A", None)

BESIDE = Peer("n0", "boot A", None)

AWAY = Peer("n1", "boot B", "10.0.0.7")

SILENT = Peer("n2", "boot C", None)


@pytest.mark.parametrize(
    ("others", "rank", "address", "expected"),
    [
        ([HERE, BESIDE], 0, None, (True, None)),
        # Slurm calls one machine several nodes: their machine tells
        ([HERE, Peer("n9", "boot A", "127.0.0.1")], 0, None, (True, None)),
        ([HERE, AWAY], 1, "10.0.0.7", (False, "10.0.0.7")),
        ([HERE, BESIDE, AWAY], 0, None, (False, "towards 10.0.0.7")),
        ([HERE, BESIDE, AWAY], 1, None, (False, "towards 10.0.0.7")),
        ([HERE, SILENT, AWAY], 0, None, (False, "towards 10.0.0.7")),
        ([HERE, SILENT], 0, None, (False, None)),
    ],
)
def test_the_way_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
    others: list[Peer],
    rank: int,
    address: str | None,
    expected: tuple[bool, str | None],
) -> None:
    """A rank that came from elsewhere knows its own address on that way; rank 0 takes the way back to one."""
    monkeypatch.setattr(heartbeat, "local_address_towards", lambda address: f"towards {address}")
    assert route_to_peers(others, rank, address) == expected


# --- where they meet


def alone(rank: int = 0, size: int = 1, rendezvous: str = "", **fields: Any) -> RankInfo:
    return RankInfo(rank, rank, size, size, "env", rendezvous, is_store_master=rank == 0, **fields)


def test_a_port_in_use_is_named(busy: int) -> None:
    """By every method that has one, and with the fix."""
    for launch, rendezvous in (
        (Launch(init_method=f"tcp://127.0.0.1:{busy}"), ""),
        (Launch(), f"tcp://127.0.0.1:{busy}"),
    ):
        with pytest.raises(UsageError) as caught:
            open_store(alone(rendezvous=rendezvous), launch)
        assert f"port {busy} at 127.0.0.1: Address already in use" in str(caught.value)
        assert "another port" in str(caught.value)


@pytest.mark.parametrize("method", ["env", "tcp", "file", "launcher", "python"])
def test_ranks_meet_by_each_method(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str) -> None:
    """What rank 0 writes, rank 1 reads."""
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
    met_by = [open_store(alone(rank, 2, f"tcp://127.0.0.1:{port}"), launch) for rank in (0, 1)]
    met_by[0].store.set("key", "value")
    assert met_by[1].store.get("key") == b"value"
    assert [meeting.is_host for meeting in met_by] == [True, False]
    assert path.exists() == (method == "file")
    if method == "file":
        assert met_by[0].file == path


def test_env_takes_the_store_that_torchrun_has_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """--init-method env inside torchrun: its agent listens there already."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(agent.port))
    info = RankInfo(0, 0, 1, 1, "torchrun", f"tcp://127.0.0.1:{agent.port}", is_store_master=False)
    meeting = open_store(info, Launch(init_method="env", timeout_seconds=5))
    agent.set("key", "value")
    assert meeting.store.get("key") == b"value"
    assert not meeting.is_host


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_env_without_a_variable(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """Its name, and what to write before the command."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        if name != missing:
            monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"--init-method env: {missing} is not set; MASTER_ADDR="):
        open_store(alone(), Launch(init_method="env"))


def test_mpirun_over_several_hosts_does_not_say_where() -> None:
    """One line instead of a wait: how to say it."""
    with pytest.raises(UsageError, match=r"4 ranks on several hosts .*--init-method tcp://HOST:PORT"):
        open_store(RankInfo(0, 0, 4, 2, "mpi", "", is_store_master=True), Launch())


def test_a_tcp_address_that_is_loopback_for_ranks_of_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a person's MASTER_ADDR says it; a small Slurm of several nodes on one machine means it."""
    monkeypatch.setattr(host_info, "addresses_of", lambda _: ["127.0.1.1"])
    info = RankInfo(0, 0, 4, 2, "env", "tcp://n0:29500", is_store_master=True)
    with pytest.raises(UsageError, match=r"rendezvous at n0: .* 127\.0\.1\.1 .*loopback"):
        open_store(info, Launch())
    port = free_port()
    own = RankInfo(0, 0, 4, 2, "slurm", f"tcp://127.0.0.1:{port}", is_store_master=True)
    assert open_store(own, Launch(timeout_seconds=5)).is_host


@pytest.mark.integration
def test_a_store_that_nobody_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    """--timeout ends the wait, and the line says where."""
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    port = free_port()
    with pytest.raises(RankFailedError, match=f"the store of rank 0 at 127.0.0.1:{port}"):
        open_store(alone(1, 2, f"tcp://127.0.0.1:{port}"), Launch(timeout_seconds=1))


class Names(http.server.BaseHTTPRequestHandler):
    """A server of names and values, as horovodrun keeps one."""

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
def names() -> Iterator[str]:
    """Its address; nothing stands there yet."""
    Names.values.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Names)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_ranks_meet_by_way_of_a_server_of_names(names: str) -> None:
    """What an earlier command of the same ranks left there, where nobody answers any more, is passed over."""
    stale = {"boot": host_info.boot_id(), "host": "n0", "port": int(free_port()), "addresses": []}
    Names.values["/everyrank/address"] = json.dumps(stale).encode()
    launch = Launch(processes=2, timeout_seconds=30)
    infos = [RankInfo(rank, rank, 2, 2, "horovodrun", names) for rank in range(2)]
    with ThreadPoolExecutor() as threads:
        later = threads.submit(open_store, infos[1], launch)
        time.sleep(0.3)
        first = open_store(infos[0], launch)
        first.store.set("key", "value")
        assert later.result().store.get("key") == b"value"


def test_a_server_of_names_that_does_not_answer(names: str) -> None:
    """One line each: nobody listens there; or rank 0 never says anything."""
    info = RankInfo(1, 1, 2, 2, "horovodrun", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(RankFailedError, match=r"http://127\.0\.0\.1:\d+ .*Connection refused"):
        open_store(info, Launch(processes=2, timeout_seconds=30))
    with pytest.raises(RankFailedError, match=r"rank 0 did not publish .* within 0\.2 s"):
        open_store(RankInfo(1, 1, 2, 2, "horovodrun", names), Launch(processes=2, timeout_seconds=0.2))


def test_an_address_in_a_file_that_never_comes(tmp_path: Path) -> None:
    """--timeout ends that wait too."""
    with pytest.raises(RankFailedError, match=r"rank 0 did not publish .* within 0\.1 s \(--timeout\)"):
        open_store(alone(1, 2, f"meet://{tmp_path}/address"), Launch(timeout_seconds=0.1))


def left_behind(path: Path) -> None:
    """What a run that was killed leaves."""
    store = dist.FileStore(str(path), 2)
    register_rank(dist.PrefixStore("everyrank/0/0", store), 0, None)
    # the last to leave a FileStore removes its file; a killed rank removes nothing
    content = path.read_bytes()
    del store
    path.write_bytes(content)


FILES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "of an old run": (
        lambda path: (left_behind(path), os.utime(path, (time.time() - 999,) * 2)),
        ["999 s ago", "remove it, or give another name"],
    ),
    "of something else": (lambda path: path.write_text("my thesis"), ["not a rendezvous file", "give another path"]),
    "a folder": (lambda path: path.mkdir(), ["store"]),
    "that cannot be made": (lambda path: path.symlink_to(path / ".." / "nosuch" / "store"), ["give another path"]),
    "below a file": (lambda path: path.parent.rmdir() or path.parent.write_text("x"), ["cannot be written"]),
}


def test_too_few_files_for_loader_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They and their rank would wait for each other for ever."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (32, 4096))
    with pytest.raises(UsageError, match=r"--workers 1: .* 32; .*ulimit -n 1024"):
        run_ranks(Launch(loader_workers=1), len)


def test_a_name_without_an_address_is_not_listened_at() -> None:
    """By rank 0, while the others ask at that name in vain."""
    with pytest.raises(UsageError, match=r"256\.1\.1\.1: the name has no address here"):
        open_store(alone(size=2), Launch(init_method="tcp://256.1.1.1:65000", timeout_seconds=2))


@pytest.mark.parametrize("case", FILES)
def test_a_file_where_ranks_cannot_meet(tmp_path: Path, case: str) -> None:
    """Explained, and not hung on; what somebody wrote is left as it is."""
    make, fragments = FILES[case]
    (tmp_path / "below").mkdir()
    path = tmp_path / "below" / "store"
    make(path)
    before = path.read_bytes() if path.is_file() else None
    begun = time.monotonic()
    with pytest.raises(UsageError) as caught:
        open_store(alone(size=2), Launch(init_method=f"file://{path}", timeout_seconds=2))
    assert time.monotonic() < begun + 1.5
    for fragment in (f"file://{path}", *fragments):
        assert fragment in str(caught.value)
    assert (path.read_bytes() if path.is_file() else None) == before


def test_a_file_of_a_run_that_was_just_killed(tmp_path: Path) -> None:
    """Too young to be told by its age: the place of this rank in it is taken."""
    path = tmp_path / "store"
    left_behind(path)
    meeting = open_store(alone(size=2), Launch(init_method=f"file://{path}", timeout_seconds=5))
    with pytest.raises(UsageError, match=r"rank 0 has already registered.* killed run"):
        register_rank(dist.PrefixStore("everyrank/0/0", meeting.store), 0, None)


@pytest.mark.parametrize("name", ["a b", "50%", "a#b", "a?b", "it's"])
def test_a_file_is_the_one_that_was_named(tmp_path: Path, name: str) -> None:
    """No letter of a path means anything else."""
    meeting = open_store(alone(), Launch(init_method=f"file://{tmp_path}/{name}", timeout_seconds=5))
    assert meeting.file == tmp_path / name


def fails(_rank: int, _size: int) -> dist.Store:
    raise OSError("no route")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda _rank, _size: None, "init_method returned NoneType; return a torch.distributed.Store"),
        (fails, "no route"),
    ],
)
def test_a_store_from_python_that_is_none(function: Any, message: str) -> None:
    """It is the person's function that is wrong."""
    with pytest.raises(WorkloadError, match=message):
        open_store(alone(), Launch(init_method=function))


def test_two_processes_of_the_same_rank() -> None:
    """The second one is told, in one line, and both reasons."""
    store = dist.HashStore()
    register_rank(store, 0, None)
    register_rank(store, 1, None)
    with pytest.raises(UsageError, match=r"rank 1 has already registered.* the same rank"):
        register_rank(store, 1, None)


@pytest.mark.parametrize("name", ["torch", "everyrank", "Python"])
def test_versions_that_differ(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """At every start, on every rank: whose, on which host, and what to do."""
    store = dist.HashStore()
    register_rank(store, 0, None)
    if name == "Python":
        monkeypatch.setattr(heartbeat.platform, "python_version_tuple", lambda: ("3", "9", "1"))
    else:
        monkeypatch.setattr(torch if name == "torch" else heartbeat, "__version__", "0.1")
    monkeypatch.setattr(heartbeat, "host_name", lambda: "n1")
    register_rank(store, 1, "10.0.0.7")
    with pytest.raises(CannotRunError) as caught:
        wait_for_peers(store, 2)
    shown = "3.9" if name == "Python" else "0.1"
    assert f"rank 1 on n1 has {name} {shown}, and rank 0 on" in str(caught.value)
    assert "on all hosts" in str(caught.value)


def test_builds_of_one_version_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """One host may have the build for CPU."""
    store = dist.HashStore()
    for rank, build in enumerate(["2.9.0+cpu", "2.9.0+cu128"]):
        monkeypatch.setattr(torch, "__version__", build)
        register_rank(store, rank, f"10.0.0.{rank}")
    assert [other.address for other in wait_for_peers(store, 2)] == ["10.0.0.0", "10.0.0.1"]


STARTS = {
    # words after the training's, fragments of the line
    "a port in use": ("--init-method tcp://127.0.0.1:BUSY", ["port BUSY at 127.0.0.1", "another port"]),
    "an old file": ("--init-method file://DIR/old", ["file://DIR/old", "remove it"]),
    "an interface": ("--interface eth9", ["--interface eth9", "not up"]),
}


@pytest.mark.parametrize("case", STARTS)
def test_a_meeting_that_fails_is_one_line_of_the_command(cli: Cli, tmp_path: Path, busy: int, case: str) -> None:
    """Status 2, though it is a rank that finds out."""
    left_behind(tmp_path / "old")
    os.utime(tmp_path / "old", (time.time() - 999,) * 2)
    words, fragments = STARTS[case]

    def here(text: str) -> str:
        return text.replace("BUSY", str(busy)).replace("DIR", str(tmp_path))

    done = cli.on_ranks(tmp_path, "train", "digits", "--steps", 1, *here(words).split())
    shown = Typed(done.status, done.out, done.err)
    assert shown.status == 2
    for fragment in fragments:
        assert here(fragment) in shown.line


def test_two_ranks_train_over_a_file(cli: Cli, tmp_path: Path) -> None:
    """Inside another launcher, too; the file is gone afterwards, so the next run finds none."""
    words = ["train", "digits", "--layout", "ddp", "--steps", 1, "--init-method", f"file://{tmp_path}/a file"]
    for _ in range(2):
        done = cli.on_ranks(tmp_path, *words, size=2)
        assert (done.status, done.err) == (0, "")
        assert not (tmp_path / "a file").exists()

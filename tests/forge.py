"""Ranks that start in no time: a process that has imported everything forks them, in an environment like torchrun's."""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple

from everyrank.cli import main


class Done(NamedTuple):
    """How a command ended: the status of every rank, and what rank 0 said."""

    statuses: list[int]
    out: str
    err: str

    @property
    def status(self) -> int:
        assert len(set(self.statuses)) == 1, self
        return self.statuses[0]


class Forge:
    """Runs the command line, or a script, on ranks whose real start would take seconds."""

    def __init__(self) -> None:
        where = {"PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", "import forge; forge.serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **where},
        )

    def __call__(self, folder: Path, *words: object, size: int = 1, script: str = "", **variables: str) -> Done:
        """Run `everyrank *words`, or a script of that name with these words, on so many ranks in that folder."""
        asked = {"folder": str(folder), "words": list(map(str, words)), "size": size, "variables": variables}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({**asked, "script": script, "port": free_port()}) + "\n")
        self.process.stdin.flush()
        statuses = json.loads(self.process.stdout.readline())
        return Done(statuses, (folder / "rank0.out").read_text(), (folder / "rank0.err").read_text())

    def close(self) -> None:
        self.process.communicate(timeout=20)


def free_port() -> str:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return str(listening.getsockname()[1])


def by_hand(rank: int, port: str, size: int = 2) -> dict[str, str]:
    """The environment of a rank that a person starts."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


def serve() -> None:
    """In a process of its own: fork what is asked for, answer with how it ended."""
    import everyrank.tasks.predict
    import everyrank.train

    assert everyrank.tasks.predict
    assert everyrank.train
    for line in sys.stdin:
        asked = json.loads(line)
        agent = _open_store(asked["port"])
        children: list[int] = []
        for rank in range(asked["size"]):
            child = os.fork()
            if child == 0:
                _run_rank(rank, asked)
            children.append(child)
        ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        os.kill(agent, signal.SIGKILL)
        os.waitpid(agent, 0)
        print(json.dumps(ended), flush=True)


def _open_store(port: str) -> int:
    """A process that has the ranks' store open, as torchrun has; its own threads must not be in what is forked."""
    import torch.distributed

    reading, writing = os.pipe()
    agent = os.fork()
    if agent == 0:
        store = torch.distributed.TCPStore("127.0.0.1", int(port), is_master=True, wait_for_workers=False)
        os.write(writing, b"x")
        signal.pause()
        os._exit(int(store is None))
    os.close(writing)
    assert os.read(reading, 1) == b"x"
    os.close(reading)
    return agent


def _run_rank(rank: int, asked: dict[str, Any]) -> None:
    os.chdir(asked["folder"])
    for number, name in ((1, f"rank{rank}.out"), (2, f"rank{rank}.err")):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    facts = by_hand(rank, asked["port"], asked["size"])
    facts |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.update(facts | asked["variables"])
    status = 99
    try:
        status = _script(asked["script"], asked["words"]) if asked["script"] else main(asked["words"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _script(name: str, words: list[str]) -> int:
    sys.argv = [name, *words]
    sys.path.insert(0, str(Path(name).absolute().parent))
    runpy.run_path(name, run_name="__main__")
    return 0

"""Processes that stay, share a world, and call functions for the tests."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle


class Pool:
    """`count` ranks that wait for calls."""

    def __init__(self, count: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="everyrank-pool-"))
        # forked from one process that has imported what all ranks import, which is most of what a start takes; on
        # macOS a fork of what has used its frameworks may crash
        context = multiprocessing.get_context("spawn" if sys.platform == "darwin" else "forkserver")
        if context.get_start_method() == "forkserver":
            context.set_forkserver_preload(
                ["torch.distributed.checkpoint", "everyrank.tasks.bench", "everyrank.tasks.verify", "zoo"]
            )
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, count, self.folder, theirs, list(sys.path)), daemon=False
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float) -> list[Any]:
        """Results by rank. Raises AssertionError with the traceback of the rank that failed first."""
        payload = cloudpickle.dumps((function, arguments))
        for pipe in self.pipes:
            pipe.send_bytes(payload)
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < len(self.pipes):
            waiting = {rank: pipe for rank, pipe in enumerate(self.pipes) if rank not in answers}
            ready = multiprocessing.connection.wait(
                list(waiting.values()), timeout=max(0.0, deadline - time.monotonic())
            )
            if not ready:
                raise AssertionError(f"ranks {sorted(waiting)} did not answer within {timeout:g} s\n{self._stacks()}")
            for rank, pipe in waiting.items():
                if pipe in ready:
                    try:
                        answers[rank] = cloudpickle.loads(pipe.recv_bytes())
                    except EOFError:
                        raise AssertionError(f"rank {rank} died\n{self._stacks()}") from None
                    if not answers[rank][0]:
                        raise AssertionError(f"rank {rank} raised:\n{answers[rank][1]}")
        return [answers[rank][1] for rank in range(len(self.pipes))]

    def _stacks(self) -> str:
        """The stack of every thread of every rank that still lives."""
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1.0)
        files = sorted(self.folder.glob("rank*.stack"))
        return "\n".join(f"--- {file.stem}\n{file.read_text()}" for file in files)

    def close(self) -> None:
        """End the processes, whatever they do."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(timeout=5.0)
            if process.is_alive():
                process.kill()
                process.join()
        shutil.rmtree(self.folder, ignore_errors=True)


def _serve(rank: int, count: int, folder: Path, pipe: Connection, path: list[str]) -> None:
    sys.path[:] = path
    # data loader workers start as they do in a rank of ours, not as this process was started
    multiprocessing.set_start_method(None, force=True)
    stacks = (folder / f"rank{rank}.stack").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    warnings.filterwarnings("error", module=r"everyrank\..*")
    import torch

    import everyrank.world.barrier
    import everyrank.world.process_group
    from everyrank.launch import Launch, RankInfo
    from everyrank.world import open_world

    # The models of the tests are tiny: a second thread would only wait for the first.
    everyrank.world.process_group.use_threads = lambda threads: torch.set_num_threads(1)
    everyrank.world.barrier.use_threads = everyrank.world.process_group.use_threads
    info = RankInfo(rank, rank, count, count, "spawn", (folder / "rendezvous").as_uri())
    with open_world(info, Launch(processes=count, device="cpu", timeout_seconds=60)) as world:
        while True:
            try:
                function, arguments = cloudpickle.loads(pipe.recv_bytes())
            except EOFError:
                os._exit(0)
            try:
                answer = (True, function(world, *arguments))
            except BaseException:
                answer = (False, traceback.format_exc())
            pipe.send_bytes(cloudpickle.dumps(answer))

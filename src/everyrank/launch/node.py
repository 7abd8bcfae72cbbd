"""One task on each node, which starts the ranks there.

`python -P -m everyrank.launch.node spawn|torchrun COUNT DIRECTORY`

rank = node x COUNT + local rank. Slurm says which node this is.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import FrameType

from everyrank.launch.environments import facts_from_environment
from everyrank.launch.hosts import split_endpoint
from everyrank.launch.spawn import PYTHON, WORKER

__all__ = ["main"]


def main() -> int:
    """0 when all ranks of this node ended well; else the status of the first that did not."""
    kind, count, directory = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    facts = facts_from_environment(os.environ)
    assert facts is not None, "srun sets the environment of its tasks"
    if kind == "torchrun":
        words = ["--standalone"]
        if facts.size > 1:
            host, port = split_endpoint(facts.rendezvous.removeprefix("tcp://"), "torchrun")
            words = [f"--nnodes={facts.size}", f"--node-rank={facts.rank}"]
            words += [f"--master-addr={host}", f"--master-port={port}"]
        words += [f"--nproc-per-node={count}", f"--log-dir={directory}", "--no-python", *WORKER, directory]
        command = [*PYTHON, "-m", "torch.distributed.run", *words]
        os.execv(command[0], command)  # noqa: S606
    first = facts.rank * count
    started = [
        subprocess.Popen([*WORKER, directory, str(first + local), str(local), str(count)]) for local in range(count)
    ]

    def pass_on(number: int, _: FrameType | None) -> None:
        for process in started:
            process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, pass_on)
    while any(process.poll() is None for process in started):
        failed = [code for process in started if (code := process.poll())]
        if failed:
            time.sleep(3.0)  # the others say what they saw
            for process in started:
                process.kill()
            return 128 - failed[0] if failed[0] < 0 else failed[0]
        time.sleep(0.1)
    codes = [process.returncode for process in started if process.returncode]
    return 0 if not codes else 128 - codes[0] if codes[0] < 0 else codes[0]


if __name__ == "__main__":
    sys.exit(main())

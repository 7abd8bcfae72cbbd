"""Batched RPC (async_execution): a server answers no trainer before the gradients of all are there; then all at once.

Run: python rpc_batched.py

Holds     the server: parameters and optimizer state; each trainer: a copy of the parameters, gradients of its samples
Travels   each update, from each trainer its gradients to the server, and the new parameters back. Counted: 428 kB an
          update, where four times the 104 kB of parameters are 416
Use when  one process has to collect what others ask for and do it in one go: gradients, as here, or the inputs of a
          model that is faster on a batch. For plain training take ddp_torchrun.py: no server has to carry everything

What goes wrong:
- RPC runs what comes over the network: it unpickles arguments, and calls the function that they name. Whoever reaches
  its ports can run anything. Here they are on loopback; open them (TP_SOCKET_IFNAME=eth0) on trusted networks only.
- A call that waits inside of a server keeps one of its threads (16): with more trainers than that it stands still for
  ever. A function marked async_execution returns a Future instead, its thread is free, and the answer leaves when
  somebody calls set_result.
- Two trainers' calls run at the same time: what they change is under a lock.
- Take the Future of this batch before a new one is put in its place: the last to come does both.
- Gradients are added by the trainer's number, not as they arrive: from three trainers on, rounding would differ.
- Every call ends after TIMEOUT. What waits longer is rpc.shutdown() of a worker that serves: until all have come there.
  The process that starts the workers watches them: one that is killed ends all, and the last line names it; Ctrl-C
  ends all, too. Before that line RPC may print what calls to the lost worker came to.
"""

import argparse
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import multiprocessing
from torch.distributed import rpc
from torch.distributed.rpc.functions import async_execution
from torch.utils.data import DataLoader, RandomSampler

from digits import build, load, print_losses

WORKERS = ["server", "trainer0", "trainer1"]  # their names, by rank
TIMEOUT = 60  # seconds for the answer to a call
EPOCHS = 2
BATCH = 64  # samples of one update, over all trainers together: it does not change with their number
SEED = 0


class Server:
    """The parameters, and the update of a batch once every trainer's gradients are there."""

    def __init__(self, dtype):
        self.model = build().to(dtype)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
        self.lock = threading.Lock()
        self.shares = {}  # of this update: trainer -> (gradients, loss)
        self.updated = torch.futures.Future()
        self.losses = []

    @async_execution
    def update(self, trainer, gradients, loss):
        """A future of the new parameters; for the trainer that calls it, a call that takes as long as the slowest."""
        with self.lock:
            self.shares[trainer], updated = (gradients, loss), self.updated
            if len(self.shares) == len(WORKERS) - 1:
                shares = [self.shares[number] for number in sorted(self.shares)]
                self.shares, self.updated = {}, torch.futures.Future()
                for parameter, *parts in zip(self.model.parameters(), *(share[0] for share in shares), strict=True):
                    parameter.grad = sum(parts)
                self.optimizer.step()
                self.losses.append(sum(share[1] for share in shares))
                # Sent as they are, not as a copy: they change when all have called again, so when all have received.
                updated.set_result([parameter.detach() for parameter in self.model.parameters()])
        return updated


def train_share(server, trainer, dtype):
    """On each trainer, a call that is answered when the training is over."""
    train_data, _ = load(dtype)
    generator = torch.Generator()
    loader = DataLoader(train_data, BATCH, sampler=RandomSampler(train_data, generator=generator))
    model = build().to(dtype)
    for epoch in range(EPOCHS):
        generator.manual_seed(SEED + epoch)  # all trainers draw the same order, and take their part of each batch
        for images, labels in loader:
            own = slice(trainer, None, len(WORKERS) - 1)
            # Divided by the size of the whole batch, so that the gradients of all trainers add up to its mean.
            loss = F.cross_entropy(model(images[own]), labels[own], reduction="sum") / len(labels)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            updated = server.rpc_sync().update(trainer, gradients, loss.detach())
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), updated, strict=True):
                    parameter.copy_(value)


def train(dtype):
    """On the server, which starts the trainers and then waits for them in the main thread; calls come in others."""
    server = Server(dtype)
    reference = rpc.RRef(server)  # what the trainers call it by
    # timeout=0: none, for the training may take as long as it takes.
    trainings = [
        rpc.rpc_async(name, train_share, (reference, trainer, dtype), timeout=0)
        for trainer, name in enumerate(WORKERS[1:])
    ]
    torch.futures.wait_all(trainings)
    for epoch, losses in enumerate(torch.stack(server.losses).view(EPOCHS, -1)):
        print_losses(epoch, losses, every_update=dtype == torch.float64)
    _, eval_data = load(dtype)
    with torch.no_grad():
        correct = sum(
            (server.model(images).argmax(1) == labels).sum() for images, labels in DataLoader(eval_data, BATCH)
        )
    print(f"top1 {correct.item() / len(eval_data):.4f}", flush=True)


# --- the same in every script over RPC: start, watch, end


def work(rank, init_method, dtype):
    """What each process runs; spawn passes its rank first."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once, wherever RPC waits
    warnings.filterwarnings("ignore", "You are using a Backend")  # what init_rpc says of itself
    torch.set_num_threads(max(1, os.cpu_count() // len(WORKERS)))
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    for variable in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):  # of the calls; of what init_rpc exchanges
        os.environ.setdefault(variable, loopback)  # else the address of the host's name, open to its network
    options = rpc.TensorPipeRpcBackendOptions(init_method=init_method, rpc_timeout=TIMEOUT)
    rpc.init_rpc(WORKERS[rank], rank=rank, world_size=len(WORKERS), rpc_backend_options=options)
    if rank == 0:
        train(dtype)
    rpc.shutdown()  # answers calls until every worker has come here


def start(*arguments):
    """One process for each worker. The first that fails ends all of them; one that is killed is named in one line."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else those that are left list the calls that they miss
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as folder:
        init_method = Path(folder, "workers").as_uri()  # where they find each other: no port has to be free
        spawned = multiprocessing.spawn(work, (init_method, *arguments), len(WORKERS), join=False)
        try:
            while not spawned.join():
                pass
        except KeyboardInterrupt:
            raise SystemExit(128 + signal.SIGINT) from None
        except (multiprocessing.ProcessExitedException, multiprocessing.ProcessRaisedException) as error:
            killed = [rank for rank, worker in enumerate(spawned.processes) if worker.exitcode == -signal.SIGKILL]
            if not killed and isinstance(error, multiprocessing.ProcessRaisedException):
                raise  # with its traceback
            name = WORKERS[killed[0] if killed else error.error_index]
            raise SystemExit(f"{Path(__file__).name}: worker {name} was lost: the others were ended") from None
        finally:
            for worker in spawned.processes:
                worker.kill()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="print every loss, to compare with another script")
    args = parser.parse_args()
    if not rpc.is_available():
        sys.stderr.write(f"{Path(__file__).name}: this torch is built without RPC: the builds for Linux have it\n")
        raise SystemExit(3)
    start(torch.float64 if args.float64 else torch.float32)

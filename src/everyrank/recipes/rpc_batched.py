"""Batched RPC (async_execution): a server answers all trainers at once, when it has the gradients of all of them.

Run: python rpc_batched.py

Memory         the server: parameters and optimizer state; each trainer: a copy of the parameters, and the gradients of
               its samples
Communication  per update, each trainer sends its gradients to the server and receives the new parameters. Measured:
               428 kB per update, of which 416 kB are tensors (4 times the 104 kB of parameters)
Use when       one process collects requests and processes them together: gradients, as here, or inputs of a model that
               is faster on a batch. For plain training use ddp_torchrun.py, which needs no server

Pitfalls:
- RPC unpickles arguments and calls the function that a message names: anyone who reaches its ports can run code.
  It listens on loopback. Set TP_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to another interface on trusted networks only.
- A blocking call occupies one of the server's 16 threads, so more than 16 trainers would wait forever. A function
  marked async_execution returns a Future and frees its thread. The server answers when set_result is called.
- Calls of several trainers run at the same time: protect the state that they change with a lock.
- The last trainer replaces the Future by one for the next update: keep a reference to the old one, to return it.
- Add gradients in the order of trainer numbers: with three or more, rounding depends on the order of additions.
- A call fails after TIMEOUT seconds. Only rpc.shutdown() waits longer, until all workers have called it.
- The parent process watches the workers. If one is killed, it ends the others, and its last line names the lost worker.
  RPC may print errors of failed calls before that line. Ctrl-C ends all workers.
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

WORKERS = ["server", "trainer0", "trainer1"]  # the name of each rank
TIMEOUT = 60  # seconds until a call fails
EPOCHS = 2
BATCH = 64  # samples per update, over all trainers: more trainers do not change it
SEED = 0


class Server:
    """Parameters and optimizer. Makes an update when the gradients of all trainers have arrived."""

    def __init__(self, dtype):
        self.model = build().to(dtype)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
        self.lock = threading.Lock()
        self.pushed = {}  # trainer -> (gradients, loss), for this update
        self.new_parameters = torch.futures.Future()  # of this update
        self.losses = []

    @async_execution
    def update(self, trainer, gradients, loss):
        """Return a Future of the new parameters, which is completed when all trainers have sent their gradients."""
        with self.lock:
            self.pushed[trainer], new_parameters = (gradients, loss), self.new_parameters
            if len(self.pushed) == len(WORKERS) - 1:
                pushed = [self.pushed[number] for number in sorted(self.pushed)]
                self.pushed, self.new_parameters = {}, torch.futures.Future()
                for parameter, *local_gradients in zip(
                    self.model.parameters(), *(gradients for gradients, _ in pushed), strict=True
                ):
                    parameter.grad = sum(local_gradients)
                self.optimizer.step()
                self.losses.append(sum(loss for _, loss in pushed))
                # No copy is needed: the next update waits until all trainers have received these and called again.
                new_parameters.set_result([parameter.detach() for parameter in self.model.parameters()])
        return new_parameters


def train_local_part(server, trainer, dtype):
    """Run the whole training on one trainer, with its part of each batch."""
    train_data, _ = load(dtype)
    generator = torch.Generator()
    loader = DataLoader(train_data, BATCH, sampler=RandomSampler(train_data, generator=generator))
    model = build().to(dtype)
    for epoch in range(EPOCHS):
        generator.manual_seed(SEED + epoch)  # the same order on all trainers
        for images, labels in loader:
            local_part = slice(trainer, None, len(WORKERS) - 1)
            # Divide by the size of the whole batch, so that the gradients of all trainers add up to its mean.
            loss = F.cross_entropy(model(images[local_part]), labels[local_part], reduction="sum") / len(labels)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            new_parameters = server.rpc_sync().update(trainer, gradients, loss.detach())
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), new_parameters, strict=True):
                    parameter.copy_(value)


def train(dtype):
    """Start the trainers and wait for them. Runs in the main thread of the server, while other threads answer calls."""
    server = Server(dtype)
    reference = rpc.RRef(server)  # trainers call the server through it
    # timeout=0 means no timeout, because the call lasts as long as the training.
    futures = [
        rpc.rpc_async(name, train_local_part, (reference, trainer, dtype), timeout=0)
        for trainer, name in enumerate(WORKERS[1:])
    ]
    torch.futures.wait_all(futures)
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
    """Run one worker; torch.multiprocessing.spawn passes its rank as the first argument."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the worker at once, also while RPC waits
    warnings.filterwarnings("ignore", "You are using a Backend")  # a warning of init_rpc
    torch.set_num_threads(max(1, os.cpu_count() // len(WORKERS)))
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    for variable in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):  # for calls; for init_rpc's rendezvous
        os.environ.setdefault(variable, loopback)  # the default is an address that the network can reach
    options = rpc.TensorPipeRpcBackendOptions(init_method=init_method, rpc_timeout=TIMEOUT)
    rpc.init_rpc(WORKERS[rank], rank=rank, world_size=len(WORKERS), rpc_backend_options=options)
    if rank == 0:
        train(dtype)
    rpc.shutdown()  # answers calls until every worker has called it


def start(*arguments):
    """Start one process per worker. If one fails, end the others; name a killed worker in one line."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # otherwise the other workers log every failed call
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as folder:
        init_method = Path(folder, "workers").as_uri()  # a file as rendezvous, so that no port has to be free
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
    parser.add_argument("--float64", action="store_true", help="train in float64, and print the loss of every update")
    args = parser.parse_args()
    if not rpc.is_available():
        sys.stderr.write(f"{Path(__file__).name}: this torch is built without RPC: the builds for Linux have it\n")
        raise SystemExit(3)
    start(torch.float64 if args.float64 else torch.float32)

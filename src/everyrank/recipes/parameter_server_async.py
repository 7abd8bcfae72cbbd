"""Asynchronous parameter server over RPC (torch.distributed.rpc), as in Hogwild: trainers do not wait for each other.

Run: python parameter_server_async.py --trainers 3 --replay

    trainer 1   pull 0 ─ compute ─ push ► update 0   pull 1 ───── compute ────── push ► update 3
    trainer 2   pull 0 ────────── compute ────────── push ► update 1   pull 2 ...
    trainer 3   pull 0 ─────────────────── compute ─────────────────── push ► update 2   ...

    pull N is the parameters after N updates. Updates 2 and 3 use gradients at parameters that are two updates old.

Memory         the server: parameters, gradients, optimizer state; a trainer: parameters and gradients
Communication  per update, one trainer gets the parameters as the result of a call, and sends its gradients as an
               argument
Use when       trainers differ in speed, or may die, and gradients of slightly older parameters are acceptable

It is not equivalent to one device. Each batch of a trainer makes an update. Its gradient may come from older parameters
than those of the server. The losses differ between runs. Hogwild itself updates without a lock.
--replay checks the run: it repeats the recorded pulls and pushes in one process and compares the parameters.

If a trainer dies, the others continue without its remaining samples, and a line at the end names it. If the server
dies, every trainer ends at its next call.

Trusted networks only: RPC unpickles what it receives, so anyone who reaches its port can run code. It listens on the
loopback interface, unless you set TP_SOCKET_IFNAME and GLOO_SOCKET_IFNAME. All processes are on this host.
"""

import argparse
import os
import socket
import sys
import tempfile
import threading
from pathlib import Path

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed import rpc
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from digits import build, load

EPOCHS = 4
BATCH = 32  # samples per update, all of one trainer
SEED = 0


def batches(data, trainer, num_trainers):
    """Yield the batches of one trainer: its part of each epoch, in a different order in each epoch."""
    for epoch in range(EPOCHS):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(SEED + epoch))
        for samples in order[trainer::num_trainers].split(BATCH):
            yield data[samples]


def gradient(model, flat_parameters, batch):
    """Return (the gradient of the mean loss at these parameters, the loss).

    Parameters and gradient are vectors of shape (number of parameters,).
    """
    vector_to_parameters(flat_parameters, model.parameters())
    images, labels = batch
    loss = F.cross_entropy(model(images), labels)
    return torch.cat([part.reshape(-1) for part in torch.autograd.grad(loss, list(model.parameters()))]), loss.detach()


class Server:
    """Parameters and optimizer. RPC calls the methods in several threads; the lock lets one of them run at a time."""

    def __init__(self, model):
        self.flat_parameters = parameters_to_vector(model.parameters()).detach().clone()
        self.optimizer = torch.optim.SGD([self.flat_parameters], lr=0.02, momentum=0.9, weight_decay=5e-4)
        self.lock, self.events, self.losses, self.finished_trainers = threading.Lock(), [], [], set()

    def pull(self, trainer):
        with self.lock:
            self.events.append((trainer, "pull"))
            return self.flat_parameters.clone()  # a copy, because an update may change them while they are sent

    def push(self, trainer, flat_gradient, loss):
        with self.lock:
            self.events.append((trainer, "push"))
            self.losses.append(loss.item())
            self.flat_parameters.grad = flat_gradient
            self.optimizer.step()

    def replay(self, model, data, num_trainers):
        """Repeat all pulls and pushes in one process, and return the largest difference of a parameter."""
        replayed, pulled = Server(model), {}
        trainer_batches = [batches(data, trainer, num_trainers) for trainer in range(num_trainers)]
        for trainer, event in self.events:
            if event == "pull":
                pulled[trainer] = replayed.pull(trainer)
            else:
                replayed.push(trainer, *gradient(model, pulled[trainer], next(trainer_batches[trainer])))
        return (self.flat_parameters - replayed.flat_parameters).abs().max().item()


server = None  # set in the server's process. Trainers call the functions below, which RPC looks up by name


def pull(trainer):
    return server.pull(trainer)


def push(trainer, flat_gradient, loss):
    server.push(trainer, flat_gradient, loss)


def finish(trainer):
    server.finished_trainers.add(trainer)


def connect(name, rank, world_size, init_method):
    """Connect this process to the others. A call fails if it has no answer after a minute."""
    loopback = next(interface for _, interface in socket.if_nameindex() if interface.startswith("lo"))
    for variable in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):  # the default is an address that the network can reach
        os.environ.setdefault(variable, loopback)
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=world_size + 1, rpc_timeout=60, init_method=init_method
    )
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)


def train(trainer, num_trainers, init_method, dtype):
    """Run a trainer: pull parameters, compute gradients, push them, without waiting for other trainers."""
    torch.set_num_threads(1)
    data, model = load(dtype)[0], build().to(dtype)
    connect(f"trainer{trainer}", trainer + 1, num_trainers + 1, init_method)
    try:
        for batch in batches(data, trainer, num_trainers):
            flat_parameters = rpc.rpc_sync("server", pull, (trainer,))
            rpc.rpc_sync("server", push, (trainer, *gradient(model, flat_parameters, batch)))
        rpc.rpc_sync("server", finish, (trainer,))
    except RuntimeError as error:  # there is no answer, or the server raised an exception
        sys.stderr.write(f"trainer {trainer}: a call to the server failed: {str(error).splitlines()[0]}\n")
        os._exit(1)
    os._exit(0)  # without rpc.shutdown(), which would wait for dead processes


def main():
    global server
    parser = argparse.ArgumentParser()
    parser.add_argument("--trainers", type=int, default=3)
    parser.add_argument("--replay", action="store_true", help="repeat the updates in one process and compare")
    parser.add_argument("--float64", action="store_true", help="train in float64, so that the replay agrees to 1e-12")
    args = parser.parse_args()
    name, dtype = Path(__file__).name, torch.float64 if args.float64 else torch.float32
    if args.trainers < 1:
        sys.stderr.write(f"{name}: --trainers {args.trainers}: give at least 1\n")
        raise SystemExit(2)
    if not rpc.is_available():
        sys.stderr.write(f"{name}: this torch is built without torch.distributed.rpc\n")
        raise SystemExit(3)
    torch.set_num_threads(1)
    data, eval_data = load(dtype)
    server = Server(build().to(dtype))
    with tempfile.TemporaryDirectory() as folder:
        init_method = f"file://{folder}/init_method"
        arguments = [(trainer, args.trainers, init_method, dtype) for trainer in range(args.trainers)]
        trainers = [
            mp.get_context("spawn").Process(target=train, args=trainer_args, daemon=True) for trainer_args in arguments
        ]
        for process in trainers:
            process.start()
        connect("server", 0, args.trainers + 1, init_method)
        for process in trainers:
            process.join()
    lost = [trainer for trainer in range(args.trainers) if trainer not in server.finished_trainers]
    for trainer in lost:
        exit_code, finished = trainers[trainer].exitcode, f"{args.trainers - len(lost)} of {args.trainers} finished"
        sys.stderr.write(f"{name}: trainer {trainer} died with exit code {exit_code}; {finished}\n")
    if args.float64:
        for update, loss in enumerate(server.losses):
            print(f"update {update} loss {loss}")
    elif server.losses:
        print(f"{len(server.losses)} updates: loss {server.losses[0]:.4f} to {server.losses[-1]:.4f}")
    if args.replay:
        print(f"replay {server.replay(build().to(dtype), data, args.trainers)}")
    model = build().to(dtype)
    vector_to_parameters(server.flat_parameters, model.parameters())
    images, labels = eval_data.tensors
    print(f"top1 {(model(images).argmax(1) == labels).double().mean().item():.4f}", flush=True)
    os._exit(1 if len(lost) == args.trainers else 0)  # without rpc.shutdown(), as in train()


if __name__ == "__main__":
    main()

"""Distributed autograd over RPC: a network on two workers, with one backward and one distributed optimizer.

Run: python rpc_autograd.py

Memory         worker `first`: the data and the first part of the model; worker `second`: the second part. Each has the
               gradients and the optimizer state of its own parameters
Communication  activations to the second part, logits back, and their gradients in backward; no parameters. Measured:
               548 kB per update. Half of it is calls of `first` to itself, which RPC sends like any other call
Use when       parts of a network have to run in other processes and you call them like functions. On equal devices use
               pipeline.py, which sends and receives tensors. torch maintains RPC but adds no features to it

Pitfalls:
- RPC unpickles arguments and calls the function that a message names: anyone who reaches its ports can run code.
  It listens on loopback. Set TP_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to another interface on trusted networks only.
- loss.backward() stops at the border of this process. dist_autograd.backward(context, [loss]) follows the graph across
  processes.
- Gradients are stored in the context of an update, not in parameter.grad: no zero_grad() is needed. An ordinary
  optimizer sees no gradients. DistributedOptimizer runs SGD on the worker that owns the parameter.
- backward waits for the gradient of every sent tensor that requires one. If such a tensor does not reach the loss (an
  unused output, a detach()), backward waits until TIMEOUT.
- RPC sends functions by name: define them at the top level of a file that both workers have.
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
import warnings
from pathlib import Path

import torch
import torch.distributed.autograd as dist_autograd
import torch.nn.functional as F
from torch import multiprocessing, optim
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.utils.data import DataLoader, RandomSampler

from digits import build, load, print_losses

WORKERS = ["first", "second"]  # the name of each rank
TIMEOUT = 60  # seconds until a call fails
EPOCHS = 2
BATCH = 64  # samples per update
SEED = 0


# --- called on the worker that has the part


class SGD(optim.SGD):
    """A subclass, because DistributedOptimizer replaces torch.optim.SGD by a deprecated TorchScript version."""


def make_part(start, stop, dtype):
    """Return the layers from start to stop, with the weights that they have in the whole network."""
    return build()[start:stop].to(dtype)


def refer_to_parameters(part):
    """Return an RRef to each parameter of a local part: other workers get the reference, not the values."""
    return [rpc.RRef(parameter) for parameter in part.local_value().parameters()]


# --- on worker `first`


def train(dtype):
    train_data, eval_data = load(dtype)
    generator = torch.Generator()
    loader = DataLoader(train_data, BATCH, sampler=RandomSampler(train_data, generator=generator))
    # remote() creates an object on the named worker and returns an RRef at once. "first" is this worker.
    first = rpc.remote("first", make_part, (0, 2, dtype))
    second = rpc.remote("second", make_part, (2, None, dtype))
    parameters = [
        parameter for part in (first, second) for parameter in rpc.rpc_sync(part.owner(), refer_to_parameters, (part,))
    ]
    optimizer = DistributedOptimizer(SGD, parameters, lr=0.05, momentum=0.9, weight_decay=5e-4)

    def model(images):
        return second.rpc_sync().forward(first.rpc_sync().forward(images))

    for epoch in range(EPOCHS):
        generator.manual_seed(SEED + epoch)  # a different order in each epoch
        losses = []
        for images, labels in loader:
            # In the context, both workers of a call record that the autograd graph continues on the other one.
            with dist_autograd.context() as context:
                loss = F.cross_entropy(model(images), labels)
                dist_autograd.backward(context, [loss])
                optimizer.step(context)
            losses.append(loss.detach())
        print_losses(epoch, torch.stack(losses), every_update=dtype == torch.float64)

    correct = sum((model(images).argmax(1) == labels).sum() for images, labels in DataLoader(eval_data, BATCH))
    print(f"top1 {correct.item() / len(eval_data):.4f}", flush=True)


# --- the same in every script over RPC: start, watch, end


def work(rank, init_method, dtype):
    """Run one worker; torch.multiprocessing.spawn passes its rank as the first argument."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the worker at once, also while RPC waits
    warnings.filterwarnings("ignore", "You are using a Backend")  # a warning of init_rpc
    logging.getLogger("torch.distributed.optim.optimizer").setLevel(logging.ERROR)  # it warns about TorchScript
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

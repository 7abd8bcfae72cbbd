"""Distributed autograd over RPC: a network of two parts on two workers, one backward, one distributed optimizer.

Run: python rpc_autograd.py

Holds     worker `first`: the data and the first part; worker `second`: the second part. Each has its parameters, their
          gradients and their optimizer state
Travels   activations to the second part, its scores back, in backward the gradients of both; parameters never. Counted:
          548 kB an update, half of it calls of `first` to itself, which take the same way as the others
Use when  parts of a network have to live in other processes and are called like functions. Over devices that are
          alike, pipeline.py does the same by sends and receives, which are maintained; RPC gets no new features

What goes wrong:
- RPC runs what comes over the network: it unpickles arguments, and calls the function that they name. Whoever reaches
  its ports can run anything. Here they are on loopback; open them (TP_SOCKET_IFNAME=eth0) on trusted networks only.
- loss.backward() goes as far as this process. dist_autograd.backward(context, [loss]) follows the graph to the others.
- Gradients are not in parameter.grad but in the context, one for each update: nothing to set to zero, and an ordinary
  optimizer would find nothing. DistributedOptimizer runs an SGD where each parameter lives.
- backward waits for a gradient for each tensor that a call has carried and that needs one. What is not a part of the
  loss (an output that nobody uses, a detach() in between) keeps it waiting until TIMEOUT.
- Only the name of a function travels: it has to be at the top of a file that both sides have.
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

WORKERS = ["first", "second"]  # their names, by rank
TIMEOUT = 60  # seconds for the answer to a call
EPOCHS = 2
BATCH = 64  # samples per update
SEED = 0


# --- called by name, on the worker that has the part


class SGD(optim.SGD):
    """A subclass, because DistributedOptimizer replaces torch's own class by a TorchScript version (deprecated)."""


def make_part(start, stop, dtype):
    """Layers from start to stop. All are made, so that each part draws the weights that it has in the whole."""
    return build()[start:stop].to(dtype)


def refer_to_parameters(part):
    """An RRef to each parameter of a part that lives here: a reference that travels, while its value stays."""
    return [rpc.RRef(parameter) for parameter in part.local_value().parameters()]


# --- on worker `first`


def train(dtype):
    train_data, eval_data = load(dtype)
    generator = torch.Generator()
    loader = DataLoader(train_data, BATCH, sampler=RandomSampler(train_data, generator=generator))
    # remote() makes something over there and returns an RRef to it at once; here, it is there and here in one.
    first = rpc.remote("first", make_part, (0, 2, dtype))
    second = rpc.remote("second", make_part, (2, None, dtype))
    parameters = [
        parameter for part in (first, second) for parameter in rpc.rpc_sync(part.owner(), refer_to_parameters, (part,))
    ]
    optimizer = DistributedOptimizer(SGD, parameters, lr=0.05, momentum=0.9, weight_decay=5e-4)

    def model(images):
        return second.rpc_sync().forward(first.rpc_sync().forward(images))

    for epoch in range(EPOCHS):
        generator.manual_seed(SEED + epoch)  # another order in every epoch; the smaller last batch is not dropped
        losses = []
        for images, labels in loader:
            # Inside of the context each call notes, on both sides, that the graph goes on over there.
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
    """What each process runs; spawn passes its rank first."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once, wherever RPC waits
    warnings.filterwarnings("ignore", "You are using a Backend")  # what init_rpc says of itself
    logging.getLogger("torch.distributed.optim.optimizer").setLevel(logging.ERROR)  # it misses TorchScript
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

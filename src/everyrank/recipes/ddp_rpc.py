"""DDP for the dense layers, RPC for an embedding table on a server: two trainers and one server.

Run: python ddp_rpc.py

Memory         the server: the table; each trainer: a copy of the dense layers with its optimizer state, and its samples
Communication  feature ids to the server, embeddings back, and their gradients in backward; between the trainers, the
               gradients of the dense layers by DDP's all-reduce. The table is not sent. Measured: 94 kB per update (the
               table has 139 kB)
Use when       an embedding table does not fit on a trainer's device and each batch uses few of its rows, as in
               recommenders. DDP replicates the dense layers, which are small. Here an image is a bag of 64 features

Pitfalls:
- RPC unpickles arguments and calls the function that a message names: anyone who reaches its ports can run code.
  It listens on loopback. Set TP_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to another interface on trusted networks only.
- DDP averages gradients over trainers, but only those of its own layers. The table gets the sum, and each loss was
  multiplied by the number of trainers. Divide the learning rate of the table by that number.
- Each trainer has its own context and updates the table separately. Two updates of plain SGD equal one update with the
  sum of the gradients. With momentum or Adam they do not.
- The barrier is needed: without it, a trainer may look up rows before the other trainer has updated them. Asynchronous
  training accepts that.
- DDP needs a process group of the trainers, which RPC does not create.
- A call fails after TIMEOUT seconds. Only rpc.shutdown() waits longer, until all workers have called it.
- The parent process watches the workers. If one is killed, it ends the others, and its last line names the lost worker.
  RPC may print errors of failed calls before that line. Ctrl-C ends all workers.
"""

import argparse
import csv
import gzip
import logging
import os
import signal
import socket
import sys
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.nn.functional as F
from torch import multiprocessing, nn, optim
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from digits import print_losses

WORKERS = ["server", "trainer0", "trainer1"]  # the name of each rank
TRAINERS = len(WORKERS) - 1
TIMEOUT = 60  # seconds until a call fails
EPOCHS = 2
BATCH = 64  # samples per update, over all trainers: more trainers do not change it
SEED = 0


def load():
    """Return handwritten digits for training, and every fifth for evaluation: (64,) feature ids and a label."""
    with gzip.open(Path(__file__).with_name("digits.csv.gz"), "rt") as file:
        rows = torch.tensor([[int(cell) for cell in row] for row in csv.reader(file)])
    features, labels = 17 * torch.arange(64) + rows[:, :64], rows[:, 64]  # a pixel has 17 shades
    eval_data = torch.arange(len(rows)) % 5 == 4
    return TensorDataset(features[~eval_data], labels[~eval_data]), TensorDataset(
        features[eval_data], labels[eval_data]
    )


def build():
    """Return the table, (N, 64) ids -> (N, 32), and the dense layers, (N, 32) -> (N, 10); the same in every process."""
    torch.manual_seed(SEED)
    table = nn.EmbeddingBag(64 * 17, 32, mode="sum", sparse=True)  # sparse: gradients only for the rows of this batch
    nn.init.normal_(table.weight, std=0.1)
    return table, nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


class SGD(optim.SGD):
    """A subclass, because DistributedOptimizer replaces torch.optim.SGD by a deprecated TorchScript version."""


def refer_to_parameters(module):
    """Return an RRef to each parameter of a local module: other workers get the reference, not the values."""
    return [rpc.RRef(parameter) for parameter in module.local_value().parameters()]


def train_local_part(table, trainer, init_method, dtype):
    """Train on this trainer's part of each batch. Return its part of each loss, and top-1 of the evaluation data."""
    dist.init_process_group("gloo", init_method, timedelta(seconds=TIMEOUT), TRAINERS, trainer)
    train_data, eval_data = load()
    generator = torch.Generator()
    loader = DataLoader(train_data, BATCH, sampler=RandomSampler(train_data, generator=generator))
    dense = build()[1].to(dtype)
    ddp = DistributedDataParallel(dense)
    table_parameters = rpc.rpc_sync(table.owner(), refer_to_parameters, (table,))
    dense_parameters = [rpc.RRef(parameter) for parameter in dense.parameters()]
    optimizers = [
        DistributedOptimizer(SGD, table_parameters, lr=0.3 / TRAINERS),
        DistributedOptimizer(SGD, dense_parameters, lr=0.1, momentum=0.9, weight_decay=5e-4),
    ]
    losses = []
    for epoch in range(EPOCHS):
        generator.manual_seed(SEED + epoch)  # the same order on both trainers
        for features, labels in loader:
            local_part = slice(trainer, None, TRAINERS)
            with dist_autograd.context() as context:
                logits = ddp(table.rpc_sync().forward(features[local_part]))
                loss = F.cross_entropy(logits, labels[local_part], reduction="sum") / len(labels)
                # DDP averages gradients over trainers. Multiply by their number to get the sum.
                dist_autograd.backward(context, [loss * TRAINERS])
                # Both trainers have looked up their rows: the all-reduce in backward waited for both.
                for optimizer in optimizers:
                    optimizer.step(context)
                dist.barrier()  # until both trainers have updated the table
            losses.append(loss.detach())

    def correct(features, labels):
        return (dense(table.rpc_sync().forward(features)).argmax(1) == labels).sum().item()

    top1 = sum(correct(*batch) for batch in DataLoader(eval_data, BATCH)) / len(eval_data)
    del ddp  # DDP has to be freed before its process group is destroyed
    dist.destroy_process_group()
    return torch.stack(losses), top1


def train(dtype):
    """Create the table, start the trainers and wait for them. Runs on the server, whose other threads answer calls."""
    table = rpc.RRef(build()[0].to(dtype))
    with tempfile.TemporaryDirectory() as folder:
        init_method = Path(folder, "trainers").as_uri()
        # timeout=0 means no timeout, because the call lasts as long as the training.
        futures = [
            rpc.rpc_async(name, train_local_part, (table, trainer, init_method, dtype), timeout=0)
            for trainer, name in enumerate(WORKERS[1:])
        ]
        local_losses, [top1, _] = zip(*torch.futures.wait_all(futures), strict=True)
    for epoch, losses in enumerate(sum(local_losses).view(EPOCHS, -1)):
        print_losses(epoch, losses, every_update=dtype == torch.float64)
    print(f"top1 {top1:.4f}", flush=True)


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

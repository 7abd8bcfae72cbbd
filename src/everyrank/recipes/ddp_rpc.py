"""DDP for the dense layers, RPC for an embedding table on a server: two trainers, one server, one update.

Run: python ddp_rpc.py

Holds     the server: the table; each trainer: a copy of the dense layers with its optimizer state, and its samples
Travels   to the server the features of the trainer's samples, back their vectors, in backward the gradients of these;
          between the trainers the gradients of the dense layers, by DDP's all-reduce. The table never. Counted: 94 kB
          an update, where the table has 139
Use when  a table is too large for a trainer's device, and each batch needs few of its rows: recommenders. The dense
          layers are small and needed by all, so DDP has them. Here: an image is a bag of 64 features, its pixels

What goes wrong:
- RPC runs what comes over the network: it unpickles arguments, and calls the function that they name. Whoever reaches
  its ports can run anything. Here they are on loopback; open them (TP_SOCKET_IFNAME=eth0) on trusted networks only.
- DDP averages the gradients of its own layers over trainers, and nobody does so for the table: its learning rate is
  divided by the number of trainers, as the loss was multiplied by it.
- Each trainer has a context of its own and updates the table by itself. Two updates of plain SGD are one update of
  their sum; with momentum or Adam they would be another training.
- Without the barrier one trainer looks up rows that the other has not updated yet, or has: another training every
  time. Asynchronous training allows that, and does without it.
- DDP's collectives need a process group, of the trainers alone: RPC makes none that could be used.
- Every call ends after TIMEOUT. What waits longer is rpc.shutdown() of a worker that serves: until all have come there.
  The process that starts the workers watches them: one that is killed ends all, and the last line names it; Ctrl-C
  ends all, too. Before that line RPC may print what calls to the lost worker came to.
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

WORKERS = ["server", "trainer0", "trainer1"]  # their names, by rank
TRAINERS = len(WORKERS) - 1
TIMEOUT = 60  # seconds for the answer to a call
EPOCHS = 2
BATCH = 64  # samples of one update, over all trainers together: it does not change with their number
SEED = 0


def load():
    """Real handwritten digits for training and, every fifth, held out: features (64,), one a pixel, and labels."""
    with gzip.open(Path(__file__).with_name("digits.csv.gz"), "rt") as file:
        rows = torch.tensor([[int(cell) for cell in row] for row in csv.reader(file)])
    features, labels = 17 * torch.arange(64) + rows[:, :64], rows[:, 64]  # a pixel has 17 shades
    eval_data = torch.arange(len(rows)) % 5 == 4
    return TensorDataset(features[~eval_data], labels[~eval_data]), TensorDataset(
        features[eval_data], labels[eval_data]
    )


def build():
    """The table, (N, 64) features -> (N, 32), and the dense layers, (N, 32) -> (N, 10); in every process the same."""
    torch.manual_seed(SEED)
    table = nn.EmbeddingBag(64 * 17, 32, mode="sum", sparse=True)  # gradients of the rows that were looked up
    nn.init.normal_(table.weight, std=0.1)
    return table, nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


class SGD(optim.SGD):
    """A subclass, because DistributedOptimizer replaces torch's own class by a TorchScript version (deprecated)."""


def refer_to_parameters(module):
    """An RRef to each parameter of a module that lives here: a reference that travels, while its value stays."""
    return [rpc.RRef(parameter) for parameter in module.local_value().parameters()]


def train_share(table, trainer, init_method, dtype):
    """On each trainer, a call that is answered when the training is over: the losses of its samples, and top-1."""
    dist.init_process_group("gloo", init_method, timedelta(seconds=TIMEOUT), TRAINERS, trainer)
    train_data, eval_data = load()
    generator = torch.Generator()
    loader = DataLoader(train_data, BATCH, sampler=RandomSampler(train_data, generator=generator))
    dense = build()[1].to(dtype)
    ddp = DistributedDataParallel(dense)
    on_server = rpc.rpc_sync(table.owner(), refer_to_parameters, (table,))
    dense_parameters = [rpc.RRef(parameter) for parameter in dense.parameters()]
    optimizers = [
        DistributedOptimizer(SGD, on_server, lr=0.3 / TRAINERS),
        DistributedOptimizer(SGD, dense_parameters, lr=0.1, momentum=0.9, weight_decay=5e-4),
    ]
    losses = []
    for epoch in range(EPOCHS):
        generator.manual_seed(SEED + epoch)  # both trainers draw the same order, and take their part of each batch
        for features, labels in loader:
            mine = slice(trainer, None, TRAINERS)
            with dist_autograd.context() as context:
                scores = ddp(table.rpc_sync().forward(features[mine]))
                loss = F.cross_entropy(scores, labels[mine], reduction="sum") / len(labels)
                # DDP averages gradients over trainers: times their number that is the sum, of a mean over the batch.
                dist_autograd.backward(context, [loss * TRAINERS])
                for (
                    optimizer
                ) in optimizers:  # both have looked up their rows: the all-reduce in backward waited for that
                    optimizer.step(context)
                dist.barrier()  # both have updated them
            losses.append(loss.detach())

    def correct(features, labels):
        return (dense(table.rpc_sync().forward(features)).argmax(1) == labels).sum().item()

    top1 = sum(correct(*batch) for batch in DataLoader(eval_data, BATCH)) / len(eval_data)
    del ddp  # before its process group is destroyed
    dist.destroy_process_group()
    return torch.stack(losses), top1


def train(dtype):
    """On the server: make the table, start the trainers, and wait for them in the main thread; calls come in others."""
    table = rpc.RRef(build()[0].to(dtype))
    with tempfile.TemporaryDirectory() as folder:
        init_method = Path(folder, "trainers").as_uri()
        # timeout=0: none, for the training may take as long as it takes.
        trainings = [
            rpc.rpc_async(name, train_share, (table, trainer, init_method, dtype), timeout=0)
            for trainer, name in enumerate(WORKERS[1:])
        ]
        shares, [top1, _] = zip(*torch.futures.wait_all(trainings), strict=True)
    for index, loss in enumerate(sum(shares).tolist()):
        if dtype == torch.float64 or index % 10 == 9:
            print(f"update {index} loss {loss if dtype == torch.float64 else round(loss, 4)}")
    print(f"top1 {top1:.4f}", flush=True)


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

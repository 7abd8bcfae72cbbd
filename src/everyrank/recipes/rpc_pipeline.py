"""Pipeline over RPC: stages of a network on workers, micro-batches in flight between them, one distributed backward.

Run: python rpc_pipeline.py

Holds     the master: data and loss; each stage: its layers, their gradients, their optimizer state
Travels   images from the master to the first stage, activations from stage to stage without coming back to the master,
          scores to the master; in backward the gradients of the same the other way. Counted: 351 kB an update, of
          which 277 are tensors: each call of each micro-batch has its own words around it
Use when  stages are unlike each other, or come and go, and one process should read as if it called them all. For
          stages on devices of their own pipeline.py is faster, and fewer micro-batches have to be kept

What goes wrong:
- RPC runs what comes over the network: it unpickles arguments, and calls the function that they name. Whoever reaches
  its ports can run anything. Here they are on loopback; open them (TP_SOCKET_IFNAME=eth0) on trusted networks only.
- rpc_sync would wait for each micro-batch before the next one starts: no two stages would work at the same time.
  remote() returns an RRef at once, and the next stage fetches it by to_here() when it is there.
- to_here() keeps one of the stage's threads until it has come: there are 16 (num_worker_threads=16), so no more
  micro-batches than that.
- Micro-batches meet in one stage at the same time, in several threads. A lock keeps them from sharing the cores, and
  any layer that has a state (dropout, batch norm) from being entered twice.
- Backward runs when all forwards are done (GPipe): the activations of all micro-batches are in memory. Their gradients
  are added in the order in which they come: equal to one process but for rounding, and not to the last bit every time.
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
import torch.distributed.autograd as dist_autograd
import torch.nn.functional as F
from torch import multiprocessing, optim
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.utils.data import DataLoader, RandomSampler

from digits import build, load, print_losses

WORKERS = ["master", "stage0", "stage1"]  # their names, by rank
CUTS = [0, 2, 6]  # stage i has the layers from CUTS[i] to CUTS[i + 1]
MICRO_BATCHES = 4
TIMEOUT = 60  # seconds for the answer to a call
EPOCHS = 2
BATCH = 64  # samples per update
SEED = 0


class SGD(optim.SGD):
    """A subclass, because DistributedOptimizer replaces torch's own class by a TorchScript version (deprecated)."""


class Stage:
    """Some of the layers, on the worker that rpc.remote makes it on."""

    def __init__(self, number, dtype):
        layers = build()  # all of them on every stage, so that all draw the same weights
        self.layers = layers[CUTS[number] : CUTS[number + 1]].to(dtype)
        self.lock = threading.Lock()

    def forward(self, inputs):
        """An RRef to a micro-batch, here or on the stage before -> the output, which stays here until it is fetched."""
        inputs = inputs.to_here()
        with self.lock:
            return self.layers(inputs)

    def refer_to_parameters(self):
        return [rpc.RRef(parameter) for parameter in self.layers.parameters()]


def train(dtype):
    """On the master."""
    train_data, eval_data = load(dtype)
    generator = torch.Generator()
    loader = DataLoader(train_data, BATCH, sampler=RandomSampler(train_data, generator=generator))
    stages = [rpc.remote(name, Stage, (number, dtype)) for number, name in enumerate(WORKERS[1:])]
    parameters = [parameter for stage in stages for parameter in stage.rpc_sync().refer_to_parameters()]
    optimizer = DistributedOptimizer(SGD, parameters, lr=0.05, momentum=0.9, weight_decay=5e-4)

    def model(images):
        """Scores of a batch: (N, 1, 8, 8) -> (N, 10). All micro-batches are on their way before one is waited for."""
        outputs = []
        for micro_batch in images.tensor_split(MICRO_BATCHES):
            output = rpc.RRef(micro_batch)
            for stage in stages[:-1]:
                output = stage.remote().forward(output)
            outputs.append(stages[-1].rpc_async().forward(output))  # the last one's comes back
        return torch.cat(torch.futures.wait_all(outputs))

    for epoch in range(EPOCHS):
        generator.manual_seed(SEED + epoch)  # another order in every epoch; the smaller last batch is not dropped
        losses = []
        for images, labels in loader:
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

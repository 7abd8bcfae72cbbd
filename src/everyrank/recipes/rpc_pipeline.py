"""Pipeline parallelism over RPC: each worker has a stage of the network, and micro-batches pass through the stages.

Run: python rpc_pipeline.py

Memory         the master: data and loss; each stage: its layers, their gradients, their optimizer state
Communication  images from the master to the first stage, activations directly from stage to stage, logits to the
               master; in backward, their gradients in the other direction. Measured: 351 kB per update, of which 277 kB
               are tensors. The rest is the overhead of a call for each micro-batch
Use when       stages differ, or start and stop, and one process should call them like functions. With one device for
               each stage, pipeline.py is faster and keeps fewer micro-batches in memory

Pitfalls:
- RPC unpickles arguments and calls the function that a message names: anyone who reaches its ports can run code.
  It listens on loopback. Set TP_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to another interface on trusted networks only.
- With rpc_sync, each micro-batch would wait for the previous one, and stages would never work at the same time.
  remote() returns an RRef at once. The next stage waits for its value with to_here().
- A waiting to_here() occupies one of the stage's 16 threads (num_worker_threads=16): use at most 16 micro-batches.
- A stage gets several micro-batches at the same time, in several threads. The lock lets one of them compute at a time.
  Otherwise they compete for the cores, and layers with state (dropout, batch norm) run in two threads at once.
- Backward starts after all forward passes (GPipe), with the activations of all micro-batches in memory. Gradients are
  added in the order of arrival. They equal those of one process up to rounding, and the last bits differ between runs.
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
import torch.distributed.autograd as dist_autograd
import torch.nn.functional as F
from torch import multiprocessing, optim
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.utils.data import DataLoader, RandomSampler

from digits import build, load, print_losses

WORKERS = ["master", "stage0", "stage1"]  # the name of each rank
BORDERS = [0, 2, 6]  # stage i has the layers from BORDERS[i] to BORDERS[i + 1]
MICRO_BATCHES = 4
TIMEOUT = 60  # seconds until a call fails
EPOCHS = 2
BATCH = 64  # samples per update
SEED = 0


class SGD(optim.SGD):
    """A subclass, because DistributedOptimizer replaces torch.optim.SGD by a deprecated TorchScript version."""


class Stage:
    """Some of the layers. rpc.remote creates it on the worker of the stage."""

    def __init__(self, number, dtype):
        layers = build()  # every stage builds all layers, so that the weights do not depend on the split
        self.layers = layers[BORDERS[number] : BORDERS[number + 1]].to(dtype)
        self.lock = threading.Lock()

    def forward(self, inputs):
        """Return the output of these layers; `inputs` is an RRef to a micro-batch, here or on another worker."""
        inputs = inputs.to_here()
        with self.lock:
            return self.layers(inputs)

    def refer_to_parameters(self):
        return [rpc.RRef(parameter) for parameter in self.layers.parameters()]


def train(dtype):
    """Train the network and print losses and top1. Runs on the master."""
    train_data, eval_data = load(dtype)
    generator = torch.Generator()
    loader = DataLoader(train_data, BATCH, sampler=RandomSampler(train_data, generator=generator))
    stages = [rpc.remote(name, Stage, (number, dtype)) for number, name in enumerate(WORKERS[1:])]
    parameters = [parameter for stage in stages for parameter in stage.rpc_sync().refer_to_parameters()]
    optimizer = DistributedOptimizer(SGD, parameters, lr=0.05, momentum=0.9, weight_decay=5e-4)

    def model(images):
        """Return the logits: (N, 1, 8, 8) -> (N, 10). Sends all micro-batches before it waits for one."""
        outputs = []
        for micro_batch in images.tensor_split(MICRO_BATCHES):
            output = rpc.RRef(micro_batch)
            for stage in stages[:-1]:
                output = stage.remote().forward(output)
            outputs.append(stages[-1].rpc_async().forward(output))  # the output of the last stage returns here
        return torch.cat(torch.futures.wait_all(outputs))

    for epoch in range(EPOCHS):
        generator.manual_seed(SEED + epoch)  # a different order in each epoch
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

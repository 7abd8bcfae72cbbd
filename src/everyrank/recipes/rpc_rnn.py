"""A recurrent network split over RPC: embedding and decoder on a server, the LSTM between them on the trainer.

Run: python rpc_rnn.py

Memory         the server: embedding and decoder, which grow with the vocabulary; the trainer: the LSTM, the data and
               the loss. Both have the gradients and the optimizer state of their own layers
Communication  token ids to the server and embeddings back, LSTM outputs to the decoder and logits back; in backward,
               their gradients (ids have none). Measured: 1,594 kB per update, of which 1,577 kB are tensors
Use when       embedding and decoder do not fit in the memory of the trainer, but they fit on a server

Pitfalls:
- RPC unpickles arguments and calls the function that a message names: anyone who reaches its ports can run code.
  It listens on loopback. Set TP_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to another interface on trusted networks only.
- loss.backward() stops at the border of this process. dist_autograd.backward(context, [loss]) follows the graph through
  the decoder on the server, the LSTM on the trainer, and the embedding on the server.
- The server answers calls in several threads, which share one random generator. The lock is needed: two parts that are
  created at the same time may take each other's random numbers, and the weights differ between runs.
- Use one DistributedOptimizer with RRefs to the parameters of both workers, including the local parameters.
- detach() a hidden state that you keep for the next sequence, because it belongs to the context of its own update.
- Most of the communication is logits, 256 for each byte. To send one number instead, compute the loss on the server.
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
from itertools import islice
from pathlib import Path
from pydoc_data import topics

import torch
import torch.distributed.autograd as dist_autograd
import torch.nn.functional as F
from torch import multiprocessing, nn, optim
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

WORKERS = ["trainer", "server"]  # the name of each rank
TIMEOUT = 60  # seconds until a call fails
UPDATES = 60
BATCH, LENGTH = 16, 32  # sequences per update; bytes per sequence
WIDTH = 64
SEED = 0


def load(eval_data):
    """Return (input, target) bytes, both (LENGTH,), from the text of Python's help(); the last tenth for evaluation."""
    text = torch.tensor(list("\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()))
    text = text[len(text) * 9 // 10 :] if eval_data else text[: len(text) * 9 // 10]
    text = text[: (len(text) - 1) // LENGTH * LENGTH + 1]
    return TensorDataset(text[:-1].view(-1, LENGTH), text[1:].view(-1, LENGTH))


def build():
    """Return the seeded layers: bytes (N, T) -> embedding and LSTM (N, T, WIDTH) -> decoder (N, T, 256)."""
    torch.manual_seed(SEED)
    layers = nn.Embedding(256, WIDTH), nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True), nn.Linear(WIDTH, 256)
    return nn.ModuleDict(dict(zip(("embedding", "lstm", "decoder"), layers, strict=True)))


class Adam(optim.Adam):
    """A subclass, because DistributedOptimizer replaces torch.optim.Adam by a deprecated TorchScript version."""


# --- called on the server


build_lock = threading.Lock()


def make_part(name, dtype):
    """Return one part, with the weights that it has in the whole network."""
    with build_lock:
        return build()[name].to(dtype)


def refer_to_parameters(part):
    """Return an RRef to each parameter of a local part: other workers get the reference, not the values."""
    return [rpc.RRef(parameter) for parameter in part.local_value().parameters()]


# --- on the trainer


def train(dtype):
    train_data, generator = load(eval_data=False), torch.Generator().manual_seed(SEED)
    loader = DataLoader(train_data, BATCH, sampler=RandomSampler(train_data, generator=generator))
    # remote() creates an object on the named worker and returns an RRef at once.
    embedding, decoder = (rpc.remote("server", make_part, (name, dtype)) for name in ("embedding", "decoder"))
    lstm = make_part("lstm", dtype)
    parameters = [rpc.RRef(parameter) for parameter in lstm.parameters()]
    for part in (embedding, decoder):
        parameters += rpc.rpc_sync(part.owner(), refer_to_parameters, (part,))
    optimizer = DistributedOptimizer(Adam, parameters, lr=3e-3)

    def model(inputs):
        output, _ = lstm(embedding.rpc_sync().forward(inputs))
        return decoder.rpc_sync().forward(output)

    for index, (inputs, targets) in enumerate(islice(loader, UPDATES)):
        # In the context, both workers of a call record that the autograd graph continues on the other one.
        with dist_autograd.context() as context:
            logits = model(inputs)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / targets.numel()
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        if dtype == torch.float64:
            print(f"update {index} loss {loss.item()}")
        elif index % 10 == 9:
            print(f"update {index + 1} loss {loss.item():.4f}")

    inputs, targets = load(eval_data=True)[:200]
    print(f"top1 {(model(inputs).argmax(-1) == targets).sum().item() / targets.numel():.4f}", flush=True)


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

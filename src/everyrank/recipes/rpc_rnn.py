"""A recurrent network split over RPC: embedding and decoder on a server, the LSTM between them on the trainer.

Run: python rpc_rnn.py

Holds     the server: what grows with the vocabulary (embedding, decoder), its gradients and optimizer state; the
          trainer: the LSTM with its own, the data and the loss
Travels   bytes to the server, their vectors back, what the LSTM makes of them to the decoder, its scores back; in
          backward the gradients of all but the bytes. Counted: 1,594 kB an update, of which 1,577 are tensors
Use when  the vocabulary's layers do not fit beside the recurrent ones, and a server has the memory for them

What goes wrong:
- RPC runs what comes over the network: it unpickles arguments, and calls the function that they name. Whoever reaches
  its ports can run anything. Here they are on loopback; open them (TP_SOCKET_IFNAME=eth0) on trusted networks only.
- loss.backward() goes as far as this process. dist_autograd.backward(context, [loss]) follows the graph through the
  decoder on the server, back here through the LSTM, and to the embedding on the server.
- A server answers calls in several threads, and torch.manual_seed() sets what they all draw from: without the lock,
  embedding and decoder, made at once, now and then took each other's random numbers, and the training was another one.
- One optimizer for all: DistributedOptimizer over RRefs to the parameters of both sides, those here, too.
- A hidden state that is kept from one sequence to the next belongs to the context of its own update: detach() it.
- Scores are the largest thing that travels, 256 a byte. Where the loss is computed beside the decoder, a number does.
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

WORKERS = ["trainer", "server"]  # their names, by rank
TIMEOUT = 60  # seconds for the answer to a call
UPDATES = 60
BATCH, LENGTH = 16, 32  # sequences of one update, and bytes of each
WIDTH = 64
SEED = 0


def load(eval_data):
    """Bytes and the byte after each, (LENGTH,) both, of the text behind Python's help(). The last tenth is held out."""
    text = torch.tensor(list("\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()))
    text = text[len(text) * 9 // 10 :] if eval_data else text[: len(text) * 9 // 10]
    text = text[: (len(text) - 1) // LENGTH * LENGTH + 1]
    return TensorDataset(text[:-1].view(-1, LENGTH), text[1:].view(-1, LENGTH))


def build():
    """Bytes (N, T) -> embedding (N, T, WIDTH) -> LSTM the same -> decoder (N, T, 256); in every process the same."""
    torch.manual_seed(SEED)
    parts = nn.Embedding(256, WIDTH), nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True), nn.Linear(WIDTH, 256)
    return nn.ModuleDict(dict(zip(("embedding", "lstm", "decoder"), parts, strict=True)))


class Adam(optim.Adam):
    """Runs as it is. DistributedOptimizer takes a TorchScript version of torch's own class, which is deprecated."""


# --- called by name, on the server


alone = threading.Lock()


def make_part(name, dtype):
    """All parts are made, so that each draws the weights that it has in the whole."""
    with alone:
        return build()[name].to(dtype)


def refer_to_parameters(part):
    """An RRef to each parameter of a part that lives here: a reference that travels, while its value stays."""
    return [rpc.RRef(parameter) for parameter in part.local_value().parameters()]


# --- on the trainer


def train(dtype):
    train_data, generator = load(eval_data=False), torch.Generator().manual_seed(SEED)
    loader = DataLoader(train_data, BATCH, sampler=RandomSampler(train_data, generator=generator))
    # remote() makes something over there and returns an RRef to it at once.
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
        # Inside of the context each call notes, on both sides, that the graph goes on over there.
        with dist_autograd.context() as context:
            scores = model(inputs)
            loss = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum") / targets.numel()
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        if dtype == torch.float64 or index % 10 == 9:
            print(f"update {index} loss {loss.item() if dtype == torch.float64 else round(loss.item(), 4)}")

    inputs, targets = load(eval_data=True)[:200]
    print(f"top1 {(model(inputs).argmax(-1) == targets).sum().item() / targets.numel():.4f}", flush=True)


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

"""Words of other scripts and of earlier years, each with today's: for those who type what they are used to."""

from __future__ import annotations

import re

__all__ = ["recipe_of_today", "today_of"]

_RANK = "launchers tell each rank its place in the environment; leave it out, and start with --processes N or torchrun"
_WORLD = "write --processes N for the ranks, --nodes N for the hosts"
_PROCESSES = "write --processes N, which counts the ranks of all hosts"
_HOST = "write --rendezvous HOST:PORT where several hosts start; on one host ranks meet in a file, leave it out"
_MODEL = "the model belongs to the workload: imagenet --set depth=50, or one of your own in a file"
_BATCH = "write --batch N, the samples of an update over all ranks; theirs was of each GPU, or of each host"
_RATE = "the learning rate is a setting of the workload: --set lr=0.1; with another --batch it follows by --lr-rule"
_OPTIMIZER = "the optimizer belongs to the workload: change it there, in a file of your own"
_DECAY = "the optimizer belongs to the workload: change weight_decay there, in a file of your own"
_WORKERS = "write --workers W, the data loader processes of each rank"
_LOG = "log.csv in --out has a row for every update; leave it out"
_FLAGS = {
    "--local-rank": _RANK,
    "--rank": _RANK,
    "--node_rank": "write --node-rank K, with --nodes N and --rendezvous HOST:PORT",
    "--nnodes": "write --nodes N, the hosts",
    "--world-size": _WORLD,
    "--word-size": _WORLD,
    "--nproc-per-node": _PROCESSES,
    "--multiprocessing-distributed": "--processes N starts N ranks on this host; leave it out",
    "--ip": _HOST,
    "--port": _HOST,
    "--master-addr": _HOST,
    "--master-port": _HOST,
    "--rdzv-id": "everyrank gives each job its own; leave it out",
    "--rdzv-backend": "write --launcher torchrun --rendezvous-kind c10d",
    "--rdzv-endpoint": "write --launcher torchrun --rendezvous HOST:PORT",
    "--init_method": "write --init-method M: env, tcp://HOST:PORT or file:///PATH",
    "--dist-url": "write --init-method tcp://HOST:PORT, or --rendezvous HOST:PORT where several hosts start",
    "--dist-file": "write --init-method file:///PATH, or leave it out: ranks meet in the folder of their job",
    "--dist-backend": "write --backend gloo or nccl; it is chosen by the device where you leave it out",
    "--gpu": "each rank takes the GPU of its local rank; put CUDA_VISIBLE_DEVICES=0 in front to choose among them",
    "--arch": _MODEL,
    "-a": _MODEL,
    "--batch-size": _BATCH,
    "-b": _BATCH,
    "--grad-accu-steps": "write --layout ddp:accumulate=N, which cuts the batch in N, as theirs did",
    "--lr": _RATE,
    "--learning-rate": _RATE,
    "--momentum": _OPTIMIZER,
    "--wd": _DECAY,
    "--weight-decay": _DECAY,
    "--seed": "seeds are settings of the workload: --set seed=0",
    "-j": _WORKERS,
    "--num-workers": _WORKERS,
    "-p": _LOG,
    "--print-freq": _LOG,
    "--start-epoch": "write --out DIR --resume, which goes on where the newest checkpoint stands",
    "-e": "write --evaluate, with --resume DIR or --pretrained F",
    "--opt-level": "write --layout ddp:precision=fp16, or bf16, for what Apex's O1 and O2 did",
}
"""Flag -> what to write instead; one with dashes stands for its spelling with underscores, too.

A flag that train, verify or bench has itself does not come here."""

_RECIPES = {
    "apex": ("ddp_amp", "Apex's amp and DistributedDataParallel have been torch's own for years"),
    "horovod": ("horovod_ddp", "a script called horovod.py would import itself"),
    "launch": ("ddp_torchrun", "torch.distributed.launch is torchrun today"),
    "distributed": (
        "ddp_spawn",
        "multiprocessing and DistributedDataParallel; under torchrun ddp_torchrun",
    ),
}
"""Name of a script in the collections that people come from -> ours, and why another name."""


def today_of(message: str) -> str | None:
    """What is said of a call that argparse does not understand, where it was right elsewhere; None for all others."""
    found = re.fullmatch(r"unrecognized arguments: (?P<words>.*)", message, re.DOTALL)
    for word in found["words"].split() if found is not None else []:
        flag = word.partition("=")[0]
        hint = _FLAGS.get(flag) or _FLAGS.get(flag.replace("_", "-"))
        if hint is not None:
            return f"{flag}: {hint}"
    return None


def recipe_of_today(name: str) -> str | None:
    """What is said of a recipe that has another name here; None for all others."""
    if name not in _RECIPES:
        return None
    ours, why = _RECIPES[name]
    return f"recipe {name!r}: {why}: everyrank new {ours}"

"""Words of other scripts and of earlier years, each with today's: for those who type what they are used to."""

from __future__ import annotations

import re

__all__ = ["recipe_of_today", "today_of"]

_RANK = "launchers tell each rank its place in the environment; leave it out, and start with --processes N or torchrun"
_FLAGS = {
    "--local_rank": _RANK,
    "--local-rank": _RANK,
    "--rank": _RANK,
    "--dist-url": "write --init-method tcp://HOST:PORT, or --rendezvous HOST:PORT where several hosts start",
    "--dist-backend": "write --backend gloo or nccl; it is chosen by the device where you leave it out",
    "--world-size": "write --processes N for the ranks, --nodes N for the hosts",
    "--multiprocessing-distributed": "--processes N starts N ranks on this host; leave it out",
    "--nproc_per_node": "write --processes N, which counts the ranks of all hosts",
    "--nproc-per-node": "write --processes N, which counts the ranks of all hosts",
    "--arch": "the model belongs to the workload: imagenet --set depth=50, or one of your own in a file",
    "-a": "the model belongs to the workload: imagenet --set depth=50, or one of your own in a file",
    "--gpu": "each rank takes the GPU of its local rank; put CUDA_VISIBLE_DEVICES=0 in front to choose among them",
    "--grad_accu_steps": (
        "write --layout ddp:accumulate=N, which cuts the batch in N; theirs multiplied it: give --batch, too"
    ),
    "--batch-size": "write --batch N, the samples of an update over all ranks; theirs was of each GPU, or of each host",
    "-b": "write --batch N, the samples of an update over all ranks; theirs was of each GPU, or of each host",
    "--wd": "the optimizer belongs to the workload: change weight_decay there, in a file of your own",
    "--weight-decay": "the optimizer belongs to the workload: change weight_decay there, in a file of your own",
    "-p": "log.csv in --out has a row for every update; leave it out",
    "--print-freq": "log.csv in --out has a row for every update; leave it out",
    "--start-epoch": "write --out DIR --resume, which goes on where the newest checkpoint stands",
    "-j": "write --workers W, the data loader processes of each rank",
    "-e": "write --evaluate, with --resume DIR or --pretrained F",
    "--opt-level": "write --layout ddp:precision=fp16, or bf16, for what Apex's O1 and O2 did",
}
"""Flag -> what to write instead. A flag that everyrank has itself does not come here."""

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
        if flag in _FLAGS:
            return f"{flag}: {_FLAGS[flag]}"
    return None


def recipe_of_today(name: str) -> str | None:
    """What is said of a recipe that has another name here; None for all others."""
    if name not in _RECIPES:
        return None
    ours, why = _RECIPES[name]
    return f"recipe {name!r}: {why}: everyrank new {ours}"

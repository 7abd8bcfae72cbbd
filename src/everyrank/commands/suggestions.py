"""Suggestions for a command, flag or recipe that does not exist: near misses, and the names in other tools."""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

__all__ = ["suggest_command", "suggest_flag", "suggest_order", "suggest_recipe"]

_COMMANDS = {"init": "new", "check": "verify", "test": "verify", "fit": "train", "run": "launch", "lint": "audit"}
"""Command of another tool -> our command."""

_RANK = "launchers set the rank in the environment; leave it out, and start with --processes N or torchrun"
_WORLD = "write --processes N for the ranks, --nodes N for the hosts"
_PROCESSES = "write --processes N, which counts the ranks of all hosts"
_HOST = "write --rendezvous HOST:PORT for several hosts; on one host leave it out"
_MODEL = "the model belongs to the workload: imagenet --set depth=50, or your own workload file"
_BATCH = "write --batch N, the samples of an update over all ranks; in other scripts it is per GPU or per host"
_RATE = "the learning rate is a setting of the workload: --set lr=0.1; --lr-rule scales it with --batch"
_OPTIMIZER = "the optimizer belongs to the workload: change it there, in your workload file"
_DECAY = "the optimizer belongs to the workload: change weight_decay there, in your workload file"
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
    "--gpus": _PROCESSES,
    "--num-gpus": _PROCESSES,
    "--ngpus": _PROCESSES,
    "--devices": _PROCESSES,
    "--num-processes": _PROCESSES,
    "--nprocs": _PROCESSES,
    "-n": _PROCESSES,
    "-np": _PROCESSES,
    "--multiprocessing-distributed": "--processes N starts N ranks on this host; leave it out",
    "--ip": _HOST,
    "--port": _HOST,
    "--master-addr": _HOST,
    "--master-port": _HOST,
    "--rdzv-id": "everyrank chooses one for each job; leave it out",
    "--rdzv-backend": "write --launcher torchrun --rendezvous-kind c10d",
    "--rdzv-endpoint": "write --launcher torchrun --rendezvous HOST:PORT",
    "--init_method": "write --init-method M: env, tcp://HOST:PORT or file:///PATH",
    "--dist-url": "write --init-method tcp://HOST:PORT, or --rendezvous HOST:PORT for several hosts",
    "--dist-file": "write --init-method file:///PATH, or leave it out; ranks then use a file in the folder of the job",
    "--dist-backend": "write --backend gloo or nccl; the default depends on the device",
    "--gpu": "each rank takes the GPU of its local rank; use CUDA_VISIBLE_DEVICES=0 to select devices",
    "--arch": _MODEL,
    "-a": _MODEL,
    "--batch-size": _BATCH,
    "-b": _BATCH,
    "--grad-accu-steps": "write --layout ddp:accumulate=N, which splits the batch in N micro-batches",
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
    "--start-epoch": "write --out DIR --resume, which resumes from the newest checkpoint",
    "-e": "write --evaluate, with --resume DIR or --pretrained F",
    "--opt-level": "write --layout ddp:precision=fp16, or bf16, for what Apex's O1 and O2 did",
}
"""Flag of another tool -> what to write instead; --a-b also matches --a_b.

Only for flags that train, verify and bench do not have. Other commands use a hint if they have all flags in it."""

_RECIPES = {
    "apex": ("ddp_amp", "torch has replaced Apex's amp and DistributedDataParallel"),
    "horovod": ("horovod_ddp", "a script called horovod.py would import itself"),
    "launch": ("ddp_torchrun", "torchrun has replaced torch.distributed.launch"),
    "distributed": (
        "ddp_spawn",
        "multiprocessing and DistributedDataParallel; under torchrun ddp_torchrun",
    ),
}
"""Name of a script in other collections -> our recipe, and the reason for the different name."""


_MAX_RECIPES = 12  # recipes in a message, so that it stays short


def suggest_command(name: str, commands: Collection[str]) -> str:
    """Return the message for a command that does not exist."""
    close = [_COMMANDS[name]] if name in _COMMANDS else difflib.get_close_matches(name, commands, n=1)
    close = close or [known for known in commands if name.startswith(known)]
    hint = f"did you mean {close[0]}?" if close else f"give one of {', '.join(commands)}."
    return f"there is no command {name!r}: {hint} See everyrank --help"


def suggest_order(command_line: Sequence[str], script: Sequence[str], parser: argparse.ArgumentParser) -> str | None:
    """Return a note if options of everyrank follow a script that has no such options; None otherwise.

    command_line  the command line after `everyrank`; it ends with `script`
    script        the script and its arguments

    The script gets these options, and ends with an error or ignores them. An option whose name appears in the source
    of the script is taken to be the script's.
    """
    path, options = Path(*script[:1]), parser._option_string_actions  # pyright: ignore[reportPrivateUsage]
    if script[1:2] == ["--"] or not path.is_file():
        return None
    try:
        source = path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # the command itself reports the error
        return None
    names = set(re.findall(r"[a-z]+", source.lower().replace("_", "-")))
    moved: list[str] = []
    kept: list[str] = []
    index = 1
    while index < len(script):
        flag, equals, _ = script[index].partition("=")
        action = options.get(flag) if flag.startswith("--") else None
        is_ours = action is not None and not names.issuperset(flag[2:].split("-"))
        num_args = 2 if is_ours and not equals and action is not None and action.nargs is None else 1
        (moved if is_ours else kept).extend(script[index : index + num_args])
        index += num_args
    if not moved:
        return None
    line = shlex.join([*command_line[: len(command_line) - len(script)], *moved, script[0], *kept])
    first_option = moved[0].partition("=")[0]
    return f"note: {path.name} gets {first_option}, which follows it; if it is for everyrank, type: everyrank {line}"


def suggest_flag(unknown: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """Return the message for arguments that a command does not have; `parser` is that command's."""
    flag, _, value = unknown[0].partition("=")
    options = _options(parser)
    for number, word in enumerate(unknown):
        name, _, given = word.partition("=")
        hint = _FLAGS.get(name) or _FLAGS.get(name.replace("_", "-"))
        # --lr-rule: the command trains a workload
        if hint is not None and ("--lr-rule" in options or set(re.findall(r"--[a-z-]+", hint)) <= set(options)):
            given = given or next(iter(unknown[number + 1 : number + 2]), "")
            if hint is _PROCESSES and given.isdecimal():
                hint = hint.replace("--processes N", f"--processes {given}")
            return f"{name}: {hint}"
    known = [option for option in options if option.startswith("--")]
    close = difflib.get_close_matches(flag, known, n=1, cutoff=0.8) if flag.startswith("-") else []
    if close:
        return f"{parser.prog} has no {flag}: did you mean {' '.join([*close, *([value] if value else [])])}?"
    if flag.startswith("-") and _takes_script(parser):
        return f"{parser.prog} has no {flag}: write options of your script after it: {parser.prog} train.py {flag} ..."
    return f"unrecognized arguments: {' '.join(unknown)}; see {parser.prog} --help"


def _takes_script(parser: argparse.ArgumentParser) -> bool:
    """Return whether the command ends with a script and its arguments."""
    return any(
        action.nargs == argparse.REMAINDER and not action.option_strings
        for action in parser._actions  # pyright: ignore[reportPrivateUsage]
    )


def _options(parser: argparse.ArgumentParser) -> list[str]:
    """Return the flags of a command in the order of its help."""
    return [flag for action in parser._actions for flag in action.option_strings]  # pyright: ignore[reportPrivateUsage]


def suggest_recipe(name: str, recipes: Collection[str]) -> str:
    """Return the message for a script that `everyrank new` does not have."""
    if name in _RECIPES:
        recipe, reason = _RECIPES[name]
        return f"recipe {name!r}: {reason}: everyrank new {recipe}"
    close = [known for known in recipes if known.startswith(name)]
    close += difflib.get_close_matches(name, recipes, n=3)
    close += [known for known in recipes if name.startswith(known) or name in known]
    if not close:
        return f"there is no recipe {name!r}; everyrank new --list shows all recipes"
    *others, last = list(dict.fromkeys(close))[:_MAX_RECIPES]
    names = f"{', '.join(others)} or {last}" if others else last
    return f"there is no recipe {name!r}: did you mean {names}?"

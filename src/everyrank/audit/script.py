"""Reads the source of a script before it runs: whether it can run, and how to start it."""

from __future__ import annotations

import ast
import contextlib
import importlib.machinery
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from everyrank.errors import UsageError, describe

__all__ = [
    "are_distributed",
    "check_arguments",
    "enough_gpus",
    "find_script",
    "is_distributed",
    "mentions_cuda",
    "starts_ranks_itself",
    "user_source",
    "without_gpus",
]

_STARTS_RANKS = re.compile(
    r"\b(mp|multiprocessing)\.(spawn|start_processes)\(|\bstart_processes\(|\bspawn\(|^\s*(import|from) ray\b",
    re.MULTILINE,
)
# numpy's SeedSequence.spawn and Generator.spawn, for a seed of each worker
_SPAWNS_SEEDS = re.compile(
    r"(SeedSequence|default_rng)\([^()\n]*\)\.spawn\(|\b\w*(seed|seq|rng|gen)\w*\.spawn\(|\bss\.spawn\(", re.IGNORECASE
)
_STARTS_PROCESSES = re.compile(r"\bProcess\(\s*target\s*=")
_IS_DISTRIBUTED = re.compile(
    r"torch\.distributed|init_process_group|LOCAL_RANK|WORLD_SIZE|DistributedDataParallel|\bdeepspeed\b|\bhorovod\b"
)
_IMPORTS_FRAMEWORK = re.compile(
    r"^[ \t]*(?:from|import)[ \t]+(?:accelerate|lightning|pytorch_lightning|lightning_fabric|transformers|trl)\b",
    re.MULTILINE,
)
_TRAINS_BY_FRAMEWORK = re.compile(r"\bAccelerator\b|Trainer\b|\bFabric\b|\bLightningCLI\b")
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n#]*)|import[ \t]+([\w.]+))", re.MULTILINE
)
_MAX_FILES = 500
_NAMES_CUDA = re.compile(r"\bcuda\b|\bnccl\b|torch\.accelerator")


def find_script(python_args: Sequence[str]) -> Path | None:
    """The file to run; None for a module that does not exist. Raises `UsageError` if the file cannot be run."""
    if not python_args:
        raise UsageError("audit needs a script: everyrank audit train.py --its-own arguments")
    if python_args[0] == "-m":
        if len(python_args) < 2:
            raise UsageError("audit -m: give the name of a module")
        return _module_file(python_args[1])
    path = Path(python_args[0])
    if not path.is_file():
        reason = "it is a folder" if path.is_dir() else "it is not a file" if path.exists() else "no such file"
        raise UsageError(f"{path}: {reason}; give a Python script, or -m and a module")
    try:
        ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        raise UsageError(_with_script_name(path, describe(error))) from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; give a Python script, or -m and a module") from None
    except (RecursionError, MemoryError):
        raise UsageError(f"{path}: too many nested parentheses for Python") from None
    except ValueError as error:  # a null byte
        raise UsageError(f"{path.name}: {type(error).__name__}: {error}") from None
    return path


def _module_file(name: str) -> Path | None:
    """The file that `python -m name` runs. Does not import its packages."""
    folders = [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *sys.path]  # noqa: PTH109
    for index, package in enumerate(package_names := name.split(".")):
        spec = importlib.machinery.PathFinder.find_spec(package, folders)
        if spec is None:
            return None
        if spec.submodule_search_locations is None:
            is_last = index == len(package_names) - 1
            return Path(spec.origin) if is_last and spec.origin is not None else None
        folders = list(spec.submodule_search_locations)
    main = importlib.machinery.PathFinder.find_spec("__main__", folders)
    return Path(main.origin) if main is not None and main.origin is not None else None


def _with_script_name(path: Path, text: str) -> str:
    """The message, with the name of the script if it is missing, as in an error about a null byte."""
    return text if path.name in text else f"{path.name}: {text.partition(': ')[2]}"


def check_arguments(python_args: Sequence[str]) -> None:
    """Raise `UsageError` for arguments that are meant for a single rank, because all ranks get the same arguments."""
    names = {arg.partition("=")[0].replace("_", "-") for arg in python_args}
    if {"--rank", "--world-size"} <= names:
        raise UsageError(
            f"{python_args[0]} --rank ...: these arguments are for a single rank. Start each of the N ranks by itself: "
            f"RANK=0 WORLD_SIZE=N everyrank audit {python_args[0]} --rank 0 ..."
        )


def user_source(script: Path) -> str:
    """The source of the script and of the user's own modules that it imports."""
    texts, queue = dict[Path, str](), [script]
    roots = {script.parent, Path.cwd()}
    while queue and len(texts) < _MAX_FILES:
        path = queue.pop()
        if path in texts or not path.is_file():
            continue
        texts[path] = text = _text(path)
        for dots, source, names, plain_import in _IMPORT.findall(text):
            name = source or plain_import
            folder = path.parent
            for _ in dots[1:]:
                folder = folder.parent
            for root in [folder] if dots else roots | {path.parent}:
                module = root.joinpath(*name.split(".")) if name else root
                queue += [module.with_name(f"{module.name}.py"), module / "__init__.py"]
                imported_names = re.split(r"[,()\s]+", names)
                queue += [
                    module / f"{imported_name}.py" for imported_name in imported_names if imported_name.isidentifier()
                ]
    return "\n".join(texts.values())


def are_distributed(files: Iterable[str]) -> bool:
    """Whether one of these files uses torch.distributed or a framework that does."""
    return any(is_distributed(_text(Path(file))) for file in files)


def _text(path: Path) -> str:
    """The text of a file; "" if it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8-sig", errors="replace")
    return ""


def enough_gpus(ranks: int, devices: Path = Path("/dev")) -> bool:
    """Whether there is an NVIDIA GPU for each rank. Does not import torch."""
    count = len(list(devices.glob("nvidia[0-9]*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        count = min(count, sum(name.strip() not in ("", "-1") for name in visible.split(",")))
    return count >= ranks


def without_gpus(ranks: int, devices: Path = Path("/dev")) -> dict[str, str]:
    """The environment variables that hide all GPUs from the ranks of this host if there are too few for them.

    If each rank used its own device, the ranks without one would fail. On the CPU all ranks compute equally.
    """
    return {} if enough_gpus(ranks, devices) else {"CUDA_VISIBLE_DEVICES": ""}


def starts_ranks_itself(text: str) -> bool:
    """Whether the script starts its ranks itself, so that the audit starts a single process."""
    text = _SPAWNS_SEEDS.sub("", text)
    starts_processes = _STARTS_PROCESSES.search(text) is not None
    opens_group = "init_process_group" in text and ("MASTER_ADDR" in text or "init_method" in text)
    return _STARTS_RANKS.search(text) is not None or (starts_processes and opens_group)


def is_distributed(text: str) -> bool:
    """Whether this source uses torch.distributed, directly or through a framework."""
    uses_framework = _IMPORTS_FRAMEWORK.search(text) and _TRAINS_BY_FRAMEWORK.search(text)
    return _IS_DISTRIBUTED.search(text) is not None or uses_framework is not None


def mentions_cuda(text: str) -> bool:
    """Whether this source or command line mentions CUDA, so that the script probably uses a GPU."""
    return _NAMES_CUDA.search(text) is not None

"""The calls of Accelerate and Lightning Fabric that replace those of torch.distributed in a port."""

from __future__ import annotations

import dataclasses
import importlib.util
import re

from everyrank.errors import UsageError

__all__ = ["IDIOMS", "Idiom", "check_installed", "in_idiom"]

_LOOKUP = "torch.accelerator.current_accelerator() if torch.accelerator.is_available() else"


@dataclasses.dataclass(frozen=True)
class Idiom:
    """How a port calls a library. `{x}` is the library's object, `{model}` a name of the script.

    title    name of the library
    install  the package for pip install
    modules  names of its module; a port imports the first that is installed
    object   the name of its object in a port
    replacements  (text with torch.distributed, its replacement)
    prepare, prepare_optimizer  the calls that wrap a model (perhaps with optimizers), and an optimizer
    unwrapped  the expression for the model in the wrapper
    passed_on  attributes that the wrapper passes on to the model
    start    the command that starts a port on several ranks of one host, before the port's name
    on_cpu   environment variables that make the library compute on the CPU
    """

    title: str
    install: str
    modules: tuple[str, ...]
    object: str
    replacements: tuple[tuple[str, str], ...]
    prepare: str
    prepare_optimizer: str
    unwrapped: str
    passed_on: frozenset[str]
    start: str
    on_cpu: dict[str, str]


_ACCELERATE = Idiom(
    title="Accelerate",
    install="accelerate",
    modules=("accelerate",),
    object="accelerator",
    replacements=(
        ("dist.get_rank() == 0", "{x}.is_main_process"),
        ("dist.get_rank() != 0", "not {x}.is_main_process"),
        ("dist.get_rank()", "{x}.process_index"),
        ("dist.get_world_size()", "{x}.num_processes"),
        ("dist.barrier()", "{x}.wait_for_everyone()"),
        ("dist.all_reduce(sums)", "sums = {x}.reduce(sums)"),
        ("dist.all_reduce(total)", "total = {x}.reduce(total)"),
        ("dist.broadcast(value, 0)", "{x}.reduce(value * {x}.is_main_process)"),
        ("with rank_0():", "with {x}.main_process_first():"),
        ("dist.destroy_process_group()", "{x}.end_training()"),
        (f'{_LOOKUP} "cpu"', "{x}.device"),
    ),
    prepare="{x}.prepare",
    prepare_optimizer="{x}.prepare",
    unwrapped="{x}.unwrap_model({model})",
    passed_on=frozenset(),
    start="accelerate launch --multi_gpu --num_processes",
    on_cpu={"ACCELERATE_USE_CPU": "1"},
)
_FABRIC = Idiom(
    title="Fabric",
    install="lightning",
    modules=("lightning.fabric", "lightning_fabric"),
    object="fabric",
    replacements=(
        ("dist.get_rank() == 0", "{x}.is_global_zero"),
        ("dist.get_rank() != 0", "not {x}.is_global_zero"),
        ("dist.get_rank()", "{x}.global_rank"),
        ("dist.get_world_size()", "{x}.world_size"),
        ("dist.barrier()", "{x}.barrier()"),
        ("dist.all_reduce(sums)", 'sums = {x}.all_reduce(sums, reduce_op="sum")'),
        ("dist.all_reduce(total)", 'total = {x}.all_reduce(total, reduce_op="sum")'),
        ("dist.broadcast(value, 0)", '{x}.all_reduce(value * {x}.is_global_zero, reduce_op="sum")'),
        ("with rank_0():", "with {x}.rank_zero_first():"),
        (f'{_LOOKUP} "cpu"', "{x}.device"),
    ),
    prepare="{x}.setup",
    prepare_optimizer="{x}.setup_optimizers",
    unwrapped="{model}.module",
    passed_on=frozenset({"state_dict", "load_state_dict"}),
    start="torchrun --nproc-per-node",
    on_cpu={"LT_ACCELERATOR": "cpu"},
)
IDIOMS = {"accelerate": _ACCELERATE, "fabric": _FABRIC}
"""The idioms by the value of --to."""


def in_idiom(text: str, idiom: Idiom, name: str) -> str:
    """Return a text with the calls of torch.distributed replaced by those of a library whose object has this name.

    Example:
        in_idiom("if dist.get_rank() == 0:", IDIOMS["fabric"], "fabric")  # "if fabric.is_global_zero:"

    """
    for before, after in idiom.replacements:
        text = re.sub(rf"(?<![\w.]){re.escape(before)}", after.replace("{x}", name), text)
    return text


def installed_module(idiom: Idiom) -> str:
    """Return the module that a port imports; "" if the library is not installed.

    For lightning.fabric, only `lightning` is searched: to search for a submodule imports the package.
    """
    installed = (name for name in idiom.modules if importlib.util.find_spec(name.partition(".")[0]) is not None)
    return next(installed, "")


def check_installed(target: str) -> None:
    """Raise `UsageError` if a port for this value of --to would need a library that is not installed."""
    idiom = IDIOMS.get(target)
    if idiom is not None and not installed_module(idiom):
        raise UsageError(
            f"--to {target}: the check needs {idiom.title}, which is not installed: pip install {idiom.install}"
        )

"""Finds the script in a command line of another tool, such as `torchrun --nproc_per_node=4 train.py`.

Users paste the commands that they type every day. The audit starts the processes itself, so it only takes the script,
its arguments and the number of processes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from everyrank.errors import UsageError

__all__ = ["ScriptCommand", "script_command"]


class ScriptCommand(NamedTuple):
    """The words after `python` (a script, or -m and a module, with arguments), and the number of processes."""

    words: list[str]
    processes: int | None = None


def script_command(words: Sequence[str]) -> ScriptCommand:
    """The script in a command line, without the tools in front of it.

    >>> script_command(["torchrun", "--nproc_per_node=4", "train.py", "--epochs", "5"])
    ScriptCommand(words=['train.py', '--epochs', '5'], processes=4)

    A file with the name of a tool is that script. Raises `UsageError` for `python -c`, and for a launcher that has to
    come before `everyrank audit` because the ranks need its environment.
    """
    words = list(words)
    tool = Path(words[0]).name if words and not Path(words[0]).is_file() else ""
    # an interpreter given by its path is a binary file; a script of this name is text
    if words and re.fullmatch(r"python[\d.]*", Path(words[0]).name) and (tool or _is_program(Path(words[0]))):
        return _after_python(words[1:])
    if tool == "torchrun":
        return _after_torchrun(words[1:])
    if tool in ("accelerate", "fabric", "lightning") and words[1:2] in (["launch"], ["run"]):
        return _after_tool(words[2:], _ACCELERATE_SWITCHES, ("--num_processes", "--devices"))
    if tool == "deepspeed":
        return _after_tool(words[1:], _DEEPSPEED_SWITCHES, ("--num_gpus",))
    if tool in ("srun", "mpirun", "mpiexec", "horovodrun"):
        _refuse_outer(words)
    return ScriptCommand(words)


_TORCHRUN_SWITCHES = {"--standalone", "--no-python", "--run-path", "--use-agent-store", "--use-env", "--use_env"}
_ACCELERATE_SWITCHES = {
    *("--cpu", "--multi_gpu", "--tpu", "--use_mps_device", "--use_deepspeed", "--use_fsdp", "--use_megatron_lm"),
    *("--use_xpu", "--ipex", "--quiet", "-q", "--no_python", "--debug", "--same_network", "--dynamo_use_fullgraph"),
    *("--dynamo_use_dynamic", "--enable_cpu_affinity", "--downcast_bf16", "--tpu_use_cluster", "--use_fp8"),
}
_DEEPSPEED_SWITCHES = {"--no_python", "--no_local_rank", "--save_pid", "--force_multi", "--enable_each_rank_log"}
"""Flags that take no value; all others take one."""


def _is_program(path: Path) -> bool:
    """Whether a file is a binary, as interpreters are."""
    try:
        with path.open("rb") as file:
            return file.read(4) in (b"\x7fELF", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
    except OSError:
        return False


def _after_python(words: list[str]) -> ScriptCommand:
    """The words after `python`, without its options."""
    number = 0
    while number < len(words) and words[number].startswith("-"):
        word = words[number]
        if word == "-c":
            raise UsageError("python -c: audit needs a file, so that it can name lines; save the code as a script")
        if word == "-m":
            module, after = "".join(words[number + 1 : number + 2]), words[number + 2 :]
            if module in ("torch.distributed.run", "torch.distributed.launch"):
                return _after_torchrun(after)
            if module == "accelerate.commands.launch":
                return script_command(["accelerate", "launch", *after])
            return ScriptCommand(words[number:])
        number += 2 if word in ("-W", "-X") else 1
    return ScriptCommand(words[number:])


def _after_torchrun(words: list[str]) -> ScriptCommand:
    return _after_tool(words, _TORCHRUN_SWITCHES, ("--nproc-per-node", "--nproc_per_node"))


def _after_tool(words: list[str], switches: set[str], counts: Sequence[str]) -> ScriptCommand:
    """The words after a launcher's options, which end at the script or at the module after `-m`."""
    number, is_module, processes = 0, False, None
    while number < len(words) and words[number].startswith("-"):
        flag, equals, value = words[number].partition("=")
        number += 1
        if flag in ("-m", "--module"):
            is_module = True
        elif flag == "--":
            break
        elif flag not in switches and not equals:
            value, number = "".join(words[number : number + 1]), number + 1
        if flag in counts and value.isdecimal():
            processes = int(value)
    return ScriptCommand((["-m"] if is_module else []) + words[number:], processes)


def _refuse_outer(words: list[str]) -> None:
    """Raise with the command to type for a launcher whose ranks are audited one by one."""
    start = next((index for index, word in enumerate(words) if re.fullmatch(r"(.*/)?python[\d.]*", word)), len(words))
    script = script_command(words[start:]).words if start < len(words) else ["train.py"]
    line = shlex.join([*words[:start], "everyrank", "audit", *script])
    raise UsageError(f"{words[0]} starts the ranks itself. Put it in front: {line}")

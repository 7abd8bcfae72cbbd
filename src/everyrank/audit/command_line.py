"""Finds the script in a command line of another tool, such as `torchrun --nproc_per_node=4 train.py`.

Users paste the commands that they usually type. The audit starts the processes itself, so it only needs the script, its
arguments and the number of processes.
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
    """The arguments of `python` (a script, or -m and a module, with arguments), and the number of processes."""

    python_args: list[str]
    processes: int | None = None


def script_command(command_line: Sequence[str]) -> ScriptCommand:
    """The script in a command line, without the launcher in front of it.

    >>> script_command(["torchrun", "--nproc_per_node=4", "train.py", "--epochs", "5"])
    ScriptCommand(python_args=['train.py', '--epochs', '5'], processes=4)

    A file with the name of a launcher is the script itself. Raises `UsageError` for `python -c`, and for launchers that
    have to come before `everyrank audit`, because the ranks need their environment.
    """
    command_line = list(command_line)
    launcher = Path(command_line[0]).name if command_line and not Path(command_line[0]).is_file() else ""
    # a path may be an interpreter, which is a binary file, or a script with that name
    if (
        command_line
        and re.fullmatch(r"python[\d.]*", Path(command_line[0]).name)
        and (launcher or _is_binary(Path(command_line[0])))
    ):
        return _after_python(command_line[1:])
    if launcher == "torchrun":
        return _after_torchrun(command_line[1:])
    if launcher in ("accelerate", "fabric", "lightning") and command_line[1:2] in (["launch"], ["run"]):
        start = 3 if command_line[2:3] == ["model"] else 2  # `fabric run model` in old versions of Lightning
        return _after_launcher(command_line[start:], _ACCELERATE_SWITCHES, ("--num_processes", "--devices"))
    if launcher == "accelerate-launch":
        return script_command(["accelerate", "launch", *command_line[1:]])
    if launcher == "deepspeed":
        return _after_launcher(command_line[1:], _DEEPSPEED_SWITCHES, ("--num_gpus",))
    if launcher in ("srun", "mpirun", "mpiexec", "horovodrun"):
        _raise_outer_launcher(command_line)
    return ScriptCommand(command_line)


_TORCHRUN_SWITCHES = {
    *("--standalone", "--no_python", "--run_path", "--use_agent_store", "--use_env", "--virtual_local_rank"),
}
_ACCELERATE_SWITCHES = {
    *("--cpu", "--multi_gpu", "--tpu", "--use_mps_device", "--use_deepspeed", "--use_fsdp", "--use_megatron_lm"),
    *("--use_xpu", "--ipex", "--quiet", "-q", "--no_python", "--debug", "--same_network", "--dynamo_use_fullgraph"),
    *("--dynamo_use_dynamic", "--enable_cpu_affinity", "--downcast_bf16", "--tpu_use_cluster", "--use_fp8"),
    *("--tpu_cluster", "--no_tpu_cluster", "--tpu_use_sudo", "--dynamo_use_regional_compilation"),
    *("--use_parallelism_config", "--fp8_use_autocast_during_eval"),
}
_DEEPSPEED_SWITCHES = {
    *("--no_python", "--no_local_rank", "--save_pid", "--force_multi", "--elastic_training", "--no_ssh_check"),
    *("--no_ssh", "--bind_cores_to_rank"),
}
"""Flags without a value; all other flags have one. The launchers accept each flag with `-` for `_`, too."""


def _is_binary(path: Path) -> bool:
    """Whether a file is an executable binary, such as an interpreter."""
    try:
        with path.open("rb") as file:
            return file.read(4) in (b"\x7fELF", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
    except OSError:
        return False


def _after_python(args: list[str]) -> ScriptCommand:
    """The script or module in the arguments of `python`, without the options before it."""
    index = 0
    while index < len(args) and args[index].startswith("-"):
        arg = args[index]
        if arg == "-c":
            raise UsageError("python -c: audit needs a file, so that it can name lines; save the code as a script")
        if arg == "-m":
            module, module_args = "".join(args[index + 1 : index + 2]), args[index + 2 :]
            if module in ("torch.distributed.run", "torch.distributed.launch"):
                return _after_torchrun(module_args)
            if module == "accelerate.commands.launch":
                return script_command(["accelerate", "launch", *module_args])
            return ScriptCommand(args[index:])
        index += 2 if arg in ("-W", "-X") else 1
    return ScriptCommand(args[index:])


def _after_torchrun(args: list[str]) -> ScriptCommand:
    return _after_launcher(args, _TORCHRUN_SWITCHES, ("--nproc_per_node",))


def _after_launcher(args: list[str], switches: set[str], process_flags: Sequence[str]) -> ScriptCommand:
    """The script or module after the options of a launcher."""
    index, is_module, processes = 0, False, None
    while index < len(args) and args[index].startswith("-"):
        flag, equals, value = args[index].partition("=")
        flag = flag[:2] + flag[2:].replace("-", "_")
        index += 1
        if flag in ("-m", "--module"):
            is_module = True
        elif flag == "--":
            break
        elif flag not in switches and not equals:
            value, index = "".join(args[index : index + 1]), index + 1
        if flag in process_flags and value.isdecimal():
            processes = int(value)
    return ScriptCommand((["-m"] if is_module else []) + args[index:], processes)


def _raise_outer_launcher(command_line: list[str]) -> None:
    """Raise an error with the command to type for a launcher that has to start the audit of each rank."""
    start = next(
        (index for index, arg in enumerate(command_line) if re.fullmatch(r"(.*/)?python[\d.]*|.+\.py", arg)),
        len(command_line),
    )
    script = script_command(command_line[start:]).python_args if start < len(command_line) else ["train.py"]
    corrected_command = shlex.join([*command_line[:start], "everyrank", "audit", *script])
    raise UsageError(f"{command_line[0]} starts the ranks itself. Put it in front: {corrected_command}")

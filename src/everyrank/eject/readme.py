"""The README of a project, with the commands that start it."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import string

from everyrank.eject.facts import Facts
from everyrank.eject.request import EjectRequest
from everyrank.eject.sources import OwnSources
from everyrank.workload import Workload

__all__ = ["readme", "requirements", "start_command"]

_ALWAYS = ("torch", "numpy")


def start_command(request: EjectRequest, script: str) -> str:
    """Return the command that starts `script`.py."""
    count = request.processes
    return {
        "python": f"python {script}.py",
        "horovodrun": f"horovodrun -np {count} --gloo python {script}.py",
        "spawn": f"python {script}.py --processes {count}",
        "torchrun": f"torchrun --standalone --nproc-per-node {count} {script}.py",
        "slurm": f"sbatch {script}.sbatch",
        "mpi": f"mpirun -n {count} --bind-to none python {script}.py",
    }[request.launcher]


def requirements(sources: OwnSources) -> str:
    """Return requirements.txt with the installed versions."""
    distributions = importlib.metadata.packages_distributions()
    names = {name for module in sources.third_party for name in distributions.get(module, [])}
    names = {name.lower() for name in names} - {"everyrank"} | set(_ALWAYS)
    return "".join(f"{name}=={importlib.metadata.version(name).partition('+')[0]}\n" for name in sorted(names))


def readme(workload: Workload, facts: Facts, request: EjectRequest, sources: OwnSources, has_norms: bool) -> str:
    """Return README.md: how to start the project, its files, and its limitations."""
    names = sources.names
    files = [
        (
            f"{names.script}.py",
            f"the training: {request.kind}, from connecting the ranks to saving the weights",
        ),
        *(
            (name, "the workload" if name == f"{sources.module}.py" else "used by the workload")
            for name in sources.files
        ),
        *([(f"{names.batch_norm}.py", "batch norm over the samples of all ranks")] if has_norms else []),
        *([(f"{names.script}.sbatch", "starts it in a job of Slurm")] if request.launcher == "slurm" else []),
        *((data.name, "data") for data in sources.data),
    ]
    weights = "`weights.pt` has the trained weights."
    if request.kind == "pipeline":
        weights = (
            "`weights-R.pt` has the weights of rank R.\n\n"
            f"The blocks are cut for {request.processes} ranks; for another number change STAGES."
        )
    notes = [weights]
    if facts.draws_in_model:
        notes.append(
            "Dropout draws different numbers than in everyrank, so the losses differ as with a different seed."
        )
    if facts.has_batch_norm and request.has_local_norm:
        notes.append("Batch norm uses the statistics of one rank or GPU, so the training depends on their number.")
    notes += [f"Put `{large.name}` next to the scripts: it was too large to copy." for large in sources.left_out]
    text = (importlib.resources.files("everyrank.eject.parts") / "README.md.txt").read_text(encoding="utf-8")
    return string.Template(text).substitute(
        name=workload.name,
        kind=request.kind,
        command=request.command,
        start=start_command(request, names.script),
        hosts="\n".join(_several_hosts(request, names.script)),
        files="\n".join(f"| `{name}` | {text} |" for name, text in files),
        weights="\n\n".join(notes),
    )


def _several_hosts(request: EjectRequest, script: str) -> list[str]:
    """Return the section on starting on several hosts."""
    count = request.processes
    return {
        "python": ["One host only, with all its visible GPUs; for fewer set `CUDA_VISIBLE_DEVICES`."],
        "horovodrun": [
            f"On two hosts: `horovodrun -np {2 * count} -H FIRST:{count},SECOND:{count} --gloo python {script}.py`, "
            "which reaches them by ssh.",
            "",
            "Horovod 0.28.1 has no wheels: build it for the torch of `requirements.txt`.",
        ],
        "spawn": ["One host only; `everyrank eject --launcher torchrun` writes it for several."],
        "torchrun": [
            "On two hosts, the same on each of them, with the address of the first:",
            "",
            "```",
            f"torchrun --nnodes 2 --nproc-per-node {count} --rdzv-backend c10d --rdzv-endpoint FIRST:29500 "
            f"--rdzv-id train {script}.py",
            "```",
        ],
        "slurm": [f"Nodes, tasks, time and account are in the first lines of `{script}.sbatch`."],
        "mpi": [
            "On several hosts the ranks need the address of the first host:",
            "",
            "```",
            f"MASTER_ADDR=FIRST MASTER_PORT=29500 mpirun -x MASTER_ADDR -x MASTER_PORT -n {count} --hostfile HOSTS "
            f"--bind-to none python {script}.py",
            "```",
        ],
    }[request.launcher]

"""How a project is started, as its README says it."""

from __future__ import annotations

import importlib.metadata
from importlib.metadata import packages_distributions

from everyrank.eject.facts import Facts
from everyrank.eject.request import EjectRequest
from everyrank.eject.sources import OwnSources
from everyrank.workload import Workload

__all__ = ["readme", "requirements", "start_command"]

_ALWAYS = ("torch", "numpy")


def start_command(request: EjectRequest) -> str:
    """The command that starts train.py."""
    count = request.processes
    return {
        "spawn": f"python train.py --processes {count}",
        "torchrun": f"torchrun --standalone --nproc-per-node {count} train.py",
        "slurm": "sbatch train.sbatch",
        "mpi": f"mpirun -n {count} --bind-to none python train.py",
    }[request.launcher]


def requirements(sources: OwnSources) -> str:
    """requirements.txt: the versions that are here."""
    distributions = packages_distributions()
    names = {name for module in sources.third_party for name in distributions.get(module, [])}
    names = {name.lower() for name in names} - {"everyrank"} | set(_ALWAYS)
    return "".join(f"{name}=={importlib.metadata.version(name).partition('+')[0]}\n" for name in sorted(names))


def readme(workload: Workload, facts: Facts, request: EjectRequest, sources: OwnSources, has_norms: bool) -> str:
    """README.md."""
    files = [
        ("train.py", f"the training: how {request.kind} is done, from meeting the other ranks to saving the weights"),
        *((name, "the workload" if name == f"{sources.module}.py" else "what it needs") for name in sources.files),
        *([("batch_norm.py", "batch norm over the samples of all ranks")] if has_norms else []),
        *([("train.sbatch", "starts it in a job of Slurm")] if request.launcher == "slurm" else []),
        *((data.name, "data") for data in sources.data),
    ]
    notes = [
        "Every line `update N loss L` is the mean loss over the whole batch of all ranks; every sample of the "
        "evaluation counts once. `weights.pt` is what was trained.",
    ]
    if request.kind == "pipeline":
        notes[0] = notes[0].replace("`weights.pt` is", "`weights-R.pt` is, of the blocks of rank R,")
        notes.append(f"The blocks are cut for {request.processes} ranks; for another number change STAGES.")
    if facts.draws_in_model:
        notes.append("Dropout draws other numbers than everyrank's: losses are those of another seed.")
    lines = [
        f"# {workload.name}, {request.kind}",
        "",
        "Plain PyTorch, yours to change. It was written by",
        "",
        "```",
        request.command,
        "```",
        "",
        "and trains as `everyrank train` does with the same words.",
        "",
        "```",
        "pip install -r requirements.txt",
        start_command(request),
        "```",
        "",
        *_several_hosts(request),
        "| file | what it is |",
        "|---|---|",
        *(f"| `{name}` | {text} |" for name, text in files),
        "",
        *(line for note in notes for line in (note, "")),
    ]
    for large in sources.left_out:
        lines += [f"Put `{large.name}` beside the scripts: it was too large to be copied.", ""]
    return "\n".join(lines)


def _several_hosts(request: EjectRequest) -> list[str]:
    """How to start it on more than one host."""
    count = request.processes
    text = {
        "spawn": ["One host only; `everyrank eject --launcher torchrun` writes it for several."],
        "torchrun": [
            "On two hosts, the same on each of them, with the address of the first:",
            "",
            "```",
            f"torchrun --nnodes 2 --nproc-per-node {count} --rdzv-backend c10d --rdzv-endpoint FIRST:29500 "
            "--rdzv-id train train.py",
            "```",
        ],
        "slurm": ["Nodes, tasks, time and account are in the first lines of `train.sbatch`."],
        "mpi": [
            "On several hosts the ranks need an address to meet at:",
            "",
            "```",
            f"MASTER_ADDR=FIRST MASTER_PORT=29500 mpirun -x MASTER_ADDR -x MASTER_PORT -n {count} --hostfile HOSTS "
            "--bind-to none python train.py",
            "```",
        ],
    }[request.launcher]
    return [*text, ""]

"""Renders train.py from the templates in parts/, with the lines whose conditions hold.

A line with conditions ends with them. For example, `  #? ddp clip` keeps a line only for ddp with clipping, and
`  #? !eval` only for scripts that do not evaluate. `$batch` and similar names are replaced by values.
"""

from __future__ import annotations

import ast
import importlib.resources
import json
import re
import string
from collections.abc import Mapping, Set

from everyrank.eject.facts import Facts
from everyrank.eject.imports import ImportLine, import_lines, prune_imports, render_imports
from everyrank.eject.request import EjectRequest
from everyrank.eject.sources import OwnSources
from everyrank.workload import Workload

__all__ = ["compose", "conditions_of", "render_template"]

_MARK = re.compile(r"\s*#\?\s*(?P<conditions>[!\w ]+)$")
_LAYOUT_PARTS = {
    "ddp": ("backward", "normalise"),
    "zero1": ("backward", "normalise", "zero1"),
    "fsdp": ("sharded", "backward", "normalise"),
    "hsdp": ("sharded", "backward", "normalise"),
    "tensor": ("tensor", "backward", "normalise"),
    "pipeline": ("pipeline", "normalise"),
    "horovod": ("backward", "normalise"),
    "dataparallel": ("backward", "normalise"),
}
"""The templates of each layout, in addition to those of all layouts."""

_HEADERS = {
    "ddp": """every rank holds the whole model, and gradients are averaged.

Memory         the whole model, its gradients and the optimizer state, on every rank
Communication  the gradients: averaged over ranks by all-reduce, bucket by bucket, while backward still runs""",
    "zero1": """as DDP, but each rank keeps the optimizer state of a part of the parameters.

Memory         the whole model and its gradients on every rank, and a part of the optimizer state
Communication  the gradients, by all-reduce as in DDP; after each step every parameter, from the rank that updated
               it""",
    "fsdp": """every rank holds a part of each parameter, and gathers what it computes with.

Memory         a part of each parameter, of its gradient and optimizer state
Communication  parameters, gathered block by block in forward and in backward; gradients, reduced and scattered""",
    "hsdp": """replicas of the model, each sharded over a group of ranks.

Memory         a part of each parameter, of its gradient and optimizer state; another replica has the same parts
Communication  inside a replica: parameters, gathered block by block; gradients, reduced and scattered. Between
               replicas: the gradient of each part, by all-reduce""",
    "tensor": """every rank holds a part of each large matrix, and all ranks compute on the same samples.

Memory         a part of each matrix in the plan, of its gradient and optimizer state; all else in full
Communication  activations: an all-reduce after each pair of matrices in forward, and before it in backward""",
    "pipeline": """every rank has some of the blocks, and the batch passes through in micro-batches.

Memory         some blocks on every rank, with their gradients and optimizer state; all other layers in full
Communication  per micro-batch the activations between neighbours, forward to the next rank, their gradients back""",
    "horovod": """every rank holds the whole model, and Horovod adds up the gradients.

Memory         the whole model, its gradients and the optimizer state, on every rank
Communication  each gradient: summed over ranks by all-reduce while backward still runs, several at once when ready""",
    "dataparallel": """one process copies the model to every GPU in each update, and adds up the gradients.

Memory         the whole model, its gradients and the optimizer state on the first GPU; copies of the model on the
               others
Communication  the weights and each GPU's part of the batch in forward, outputs and gradients back to the first GPU""",
}
"""The text about each layout in the docstring of train.py."""


def conditions_of(workload: Workload, facts: Facts, request: EjectRequest) -> frozenset[str]:
    """Return the conditions of the template lines that hold for this project."""
    kind, layout = request.kind, request.layout
    is_accumulating = kind != "pipeline" and layout.accumulate > 1
    is_alone = kind == "dataparallel"
    batch_norm = facts.has_batch_norm and not request.has_local_norm and kind in ("ddp", "zero1", "fsdp", "hsdp")
    holds = {
        kind: True,
        request.launcher: True,
        "ddp": kind in ("ddp", "zero1"),
        "sharded": kind in ("fsdp", "hsdp"),
        "whole": kind in ("ddp", "zero1", "horovod", "dataparallel"),
        "summed": kind in ("horovod", "dataparallel"),
        "grouped": kind not in ("horovod", "dataparallel"),
        "apart": kind not in ("tensor", "pipeline"),
        "averaged": kind in ("ddp", "zero1", "fsdp", "hsdp"),
        "dtensor": kind in ("fsdp", "hsdp", "tensor"),
        "shards": kind == "hsdp" and workload.clip_norm is not None,
        "accumulate": is_accumulating,
        "micro": is_accumulating or kind == "pipeline",
        "checked": (kind != "tensor" and not is_alone) or is_accumulating,
        "clip": workload.clip_norm is not None,
        "eval": workload.eval_data is not None,
        "metrics": bool(workload.metrics),
        "derived": bool(workload.derived),
        "hidden": any(name.startswith("_") for name in (*workload.metrics, *workload.derived)),
        "schedule": workload.schedule is not None,
        "plateau": facts.follows_plateau,
        "steps": workload.steps is not None,
        "epochs": workload.steps is None,
        "weights": workload.weights is not None,
        "drop_last": workload.drop_last and facts.samples % workload.global_batch > 0,
        "ragged": not workload.drop_last and facts.samples % workload.global_batch > 0,
        "collate": workload.collate is not None,
        "nested": facts.is_nested,
        "seeded": facts.draws_in_data,
        "draws": facts.draws_in_model,
        "batch_norm": batch_norm,
        "local_norm": facts.has_batch_norm and request.has_local_norm and not is_alone,
        "blocks": workload.blocks is not None,
        "reshard": layout.options.get("reshard_after_forward", True) is True,
        "bf16": layout.precision == "bf16",
        "scaler": layout.precision == "fp16",
        "compress": layout.options.get("compress", "none") != "none",
        "autocast": layout.precision in ("bf16", "fp16") and kind not in ("fsdp", "hsdp"),
        "split_loss": kind == "tensor" and "colwise_loss" in (workload.tensor_plan or {}).values(),
        "gather": kind == "tensor" and "gather" in (workload.tensor_plan or {}).values(),
    }
    return frozenset(condition for condition, is_true in holds.items() if is_true)


def compose(workload: Workload, facts: Facts, request: EjectRequest, sources: OwnSources, command: str) -> str:
    """Return the text of train.py; `command` is the command that starts it."""
    holds = set(conditions_of(workload, facts, request))
    if any("random" in text for text in sources.files.values()) and _draws_elsewhere(sources):
        holds.add("numpy_random")
    values = _values(workload, facts, request, sources, command)
    names = ["constants"]
    if "grouped" in holds:
        names += [f"place_{request.launcher}"] if request.launcher != "spawn" else []
        names += ["connect"]
    names += ["connect_horovod"] if "horovod" in holds else []
    names += ["data", *_LAYOUT_PARTS[request.kind]]
    names += ["evaluate"] if "eval" in holds else []
    imports = {ImportLine(sources.module, sources.attribute, sources.attribute)}
    if "batch_norm" in holds:
        imports.add(ImportLine(sources.names.batch_norm, "synchronise_batch_norm", "synchronise_batch_norm"))
    bodies: list[str] = []
    for name in [*names, "main"]:
        text = render_template(name, holds, values)
        imports |= import_lines(text)
        bodies.append(_without_imports(text))
    body = "\n\n\n".join(bodies) + "\n"
    first, _, description = _HEADERS[request.kind].partition("\n\n")
    header = f'"""Trains {workload.name}: {first}\n\nRun: {command}\n\n{description}\n"""'
    imports = prune_imports(imports, body)
    return "\n\n".join([header, render_imports(imports, {sources.module, sources.names.batch_norm}), body])


def render_template(name: str, holds: Set[str], values: Mapping[str, str]) -> str:
    """Render a template: keep the lines whose conditions hold, and fill in the values."""
    text = (importlib.resources.files("everyrank.eject.parts") / f"{name}.py.txt").read_text(encoding="utf-8")
    lines: list[str] = []
    for line in text.splitlines():
        match = _MARK.search(line)
        if match is None:
            lines.append(line)
        elif all(
            (condition.removeprefix("!") in holds) != condition.startswith("!")
            for condition in match["conditions"].split()
        ):
            lines.append(line[: match.start()])
    return string.Template("\n".join(lines).strip("\n") + "\n").substitute(values)


def _without_imports(text: str) -> str:
    tree = ast.parse(text)
    lines = text.splitlines()
    for node in reversed(tree.body):
        if isinstance(node, ast.Import | ast.ImportFrom):
            del lines[node.lineno - 1 : node.end_lineno]
    return "\n".join(lines).strip("\n")


def _draws_elsewhere(sources: OwnSources) -> bool:
    """Whether a file uses Python's or numpy's random generators."""
    modules = {(line.module, line.name) for text in sources.files.values() for line in import_lines(text)}
    return ("random", None) in modules or any("np.random" in text for text in sources.files.values())


def _values(
    workload: Workload, facts: Facts, request: EjectRequest, sources: OwnSources, command: str
) -> dict[str, str]:
    """Return the values for $name in the templates."""
    low_dtype = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}.get(request.layout.precision)
    floats = ["DTYPE" if is_float else "non_blocking=True" for is_float in facts.floats]
    return {
        "workload": sources.attribute + (f"({_settings(request, sources)})" if sources.is_called else ""),
        "batch": _field("global_batch", request.source.batch, "batch" in sources.takes),
        "accumulate": str(request.micro_batches),
        "stages": ", ".join(f"range({stage.start}, {stage.stop})" for stage in facts.stages),
        "eval_batch": "TASK.eval_batch" if workload.eval_batch else "BATCH",
        "epochs": _field("epochs", request.source.epochs, "epochs" in sources.takes) if workload.epochs else "1",
        "steps": _field("steps", request.source.steps, "steps" in sources.takes),
        "seed": "TASK.seed",
        "clip_norm": "TASK.clip_norm",
        "replicas": str(request.replicas),
        "dtype": "float32" if low_dtype else request.layout.precision,
        "low": str(low_dtype),
        "scaler": ", scaler" if request.layout.precision == "fp16" else "",
        "command": command,
        "script": f"{sources.names.script}.py",
        "processes": str(request.processes),
        "blocks": str(workload.blocks),
        "inputs": f"{facts.call}inputs",
        "input_dtype": floats[0],
        "target_dtype": floats[1],
        "dataset": "dataset" if facts.draws_in_data else "train_data",
        "length": "weights" if workload.weights else "len(train_data)",
        "plan": _plan(workload, facts),
        "ddp_options": _ddp_options(request, facts),
    }


def _settings(request: EjectRequest, sources: OwnSources) -> str:
    """Return the arguments for the workload's function: settings, and --batch, --epochs and --steps if it has them."""
    requested = {"batch": request.source.batch, "epochs": request.source.epochs, "steps": request.source.steps}
    accepted = {name: value for name, value in requested.items() if value is not None and name in sources.takes}
    settings = {**request.source.settings, **accepted}
    return ", ".join(  # with quotes as ruff writes them
        f"{name}={json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)}"
        for name, value in settings.items()
    )


def _field(name: str, requested: int | None, is_setting: bool) -> str:
    """Return the expression for the workload's value, or the value from the command line."""
    return f"TASK.{name}" if requested is None or is_setting else str(requested)


def _plan(workload: Workload, facts: Facts) -> str:
    """Return the tensor plan as lines with the ParallelStyles of torch."""
    rows: list[str] = []
    for pattern, style_name in (workload.tensor_plan or {}).items():
        style = {
            "colwise": "ColwiseParallel()",
            "rowwise": "RowwiseParallel()",
            "colwise_gather": "ColwiseParallel(output_layouts=Replicate())",
            "colwise_loss": "ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)",
            "vocabulary": "RowwiseParallel(input_layouts=Replicate())",
        }.get(style_name)
        if style_name == "gather":
            matches = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
            count = next((count for name, count in facts.num_args.items() if matches.fullmatch(name)), 1)
            layouts = ", ".join(["Replicate()", *["None"] * (count - 1)]) + ("," if count == 1 else "")
            style = f"PrepareModuleInput(input_layouts=({layouts}), desired_input_layouts=({layouts}))"
        if style is not None:
            row = f'        "{pattern}": {style},'
            if len(row) > 120:
                arguments = style.replace("PrepareModuleInput(", "").removesuffix(")")
                first, second = arguments.split(", desired_input_layouts=")
                row = (
                    f'        "{pattern}": PrepareModuleInput(\n            {first}, desired_input_layouts={second}\n'
                    "        ),"
                )
            rows.append(row)
    return "\n".join(rows)


def _ddp_options(request: EjectRequest, facts: Facts) -> str:
    """Return the arguments of DistributedDataParallel after the model."""
    names = {"bucket_mb": "bucket_cap_mb", "find_unused": "find_unused_parameters", "static_graph": "static_graph"}
    options = [f", {names[key]}={value!r}" for key, value in request.layout.options.items() if key in names]
    return "".join([*options, ", broadcast_buffers=False" if facts.has_batch_norm else ""])

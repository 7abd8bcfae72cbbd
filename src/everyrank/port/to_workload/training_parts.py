"""Finds the parts of a training in a script: model, data, loss, optimizer, schedule and numbers."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Sequence
from typing import Any

from everyrank.port.facts import CallSite, Fact
from everyrank.port.source import NotPortedError, ScriptSource, start_of
from everyrank.port.to_workload.batch_loop import Loss, Metric, find_loss, find_metrics
from everyrank.port.to_workload.changing_names import changing_names
from everyrank.port.to_workload.loop_ends import note_loop_ends, note_other_backwards, refuse_changed_model
from everyrank.port.to_workload.observed_run import ObservedRun
from everyrank.port.to_workload.slices import Script, ScriptSlice, ScriptStatement, loaded_names

__all__ = ["Code", "TrainingParts", "find_training"]

_SEVERAL = "the script trains several times from the beginning; a workload is one training: keep one of them"
_BY_HAND = "write it as the workload's `schedule`"


@dataclasses.dataclass(frozen=True)
class Code:
    """An expression and the statements that it needs."""

    statements: list[ScriptStatement]
    text: str
    line: int


@dataclasses.dataclass
class TrainingParts:
    """All parts of a workload.

    per_epoch   updates of an epoch if the schedule is stepped once per epoch, else 0
    reductions  the reductions of the loss to try, in this order: "mean" or "sum" over the samples of a batch
    ignored     a target that the mean ignores; None if there is none
    backwards   backward passes of one update
    early_passes  passes over the training loader before the first update
    """

    script: Script
    model: Code
    train_data: Code
    eval_data: Code | None
    optimizer: Code
    optimizer_model: str
    schedule: Code | None
    schedule_optimizer: str
    per_epoch: int
    loss: Loss
    metrics: list[Metric]
    collate: Code | None
    eval_batch: int | None
    batch: str
    batch_size: int
    backwards: int
    epochs: str
    drop_last: bool
    clip_norm: str
    seed: str
    weights: Code | None
    loader: dict[str, Any]
    early_passes: int
    reductions: list[str]
    ignored: int | None
    notes: list[tuple[int, str]]
    lines: dict[str, int] = dataclasses.field(default_factory=dict[str, int])


def find_training(source: ScriptSource, events: Sequence[Fact], backwards: int) -> TrainingParts:
    """Return the parts of a training with this number of `backwards` (backward passes) per update.

    Raises `NotPortedError` with the line of code that a workload cannot express.
    """
    observed = ObservedRun(source, events)
    script = Script(source)
    script.module_values = next((each.chain[-1].values for each in observed.facts_of("backward")), {})
    script.devices = {
        name for event in events for site in event.chain for name, value in site.values.items() if value[0] == "device"
    }
    optimizer = _only_optimizer(observed)
    backward = _only_backward(observed)
    loader = _training_loader(observed, backward)
    forward = _only_forward(observed, backward)
    changing = changing_names(script, backward)
    loss, call = find_loss(observed, script, backward, forward, changing)
    _refuse_changed_globals(script, changing)
    refuse_changed_model(script, backward, forward.details["id"], changing)
    _refuse_draws(observed, forward, backward, call)
    _refuse_changed_data(observed, loader, backward)
    details = observed.loader_details(loader.details["id"])
    model = _model(observed, script, forward, call)
    optimizer_code, optimizer_model = _optimizer(observed, script, optimizer, forward)
    schedule, schedule_optimizer, per_epoch = _schedule(
        observed, script, optimizer, -(-details["batches"] // backwards)
    )
    train_data, weights = _dataset(observed, script, loader, details)
    notes: list[tuple[int, str]] = []
    if not details["sampler"].startswith(("Random", "Subset", "Weighted")):
        notes.append((loader.line, "the script reads its samples in order; everyrank shuffles them in each epoch"))
    _note_rates(observed, notes)
    note_loop_ends(script, backward, changing, notes)
    note_other_backwards(script, backward, changing, notes)
    evaluation = _evaluation(observed, loader)
    losses = observed.facts_of("loss")
    reductions = ["sum"] if losses and {each.details["reduction"] for each in losses} == {"sum"} else []
    ignored = next((each.details["ignored"] for each in losses if each.details["ignored"] is not None), None)
    training = TrainingParts(
        script=script,
        model=model,
        train_data=train_data,
        eval_data=None,
        optimizer=optimizer_code,
        optimizer_model=optimizer_model,
        schedule=schedule,
        schedule_optimizer=schedule_optimizer,
        per_epoch=per_epoch,
        loss=loss,
        metrics=[],
        collate=_collate(observed, script, loader, details),
        eval_batch=None,
        batch=_batch(observed, script, loader, details, backwards),
        batch_size=details["batch_size"],
        backwards=backwards,
        epochs=_epochs(observed, script, backward),
        drop_last=details["drop_last"],
        clip_norm=_clip(observed, script, backward, changing),
        seed=_seed(observed, backward),
        weights=weights,
        loader=details,
        early_passes=_early_passes(observed, loader, backward),
        reductions=[*reductions, "mean", *([] if reductions else ["sum"])],
        ignored=ignored,
        notes=notes,
        lines={"model": model.line, "loss": backward.line, "optimizer": optimizer.line, "data": loader.line},
    )
    if evaluation is not None:
        eval_details = observed.loader_details(evaluation.details["id"])
        training.eval_data, _ = _dataset(observed, script, evaluation, eval_details)
        if eval_details["batch_size"] != details["batch_size"] * backwards:
            training.eval_batch = eval_details["batch_size"]
        training.metrics = find_metrics(observed, script, loss)
    return training


# --- parts of which there must be exactly one


def _only_backward(observed: ObservedRun) -> Fact:
    grad = observed.facts_of("autograd.grad")
    if grad:
        raise NotPortedError(
            grad[0].line,
            "torch.autograd.grad: everyrank computes the gradient of a workload's only loss; train by hand",
        )
    backwards = observed.facts_of("backward")
    if not backwards:
        raise NotPortedError(1, "no backward was called, so there is no training to port")
    first = backwards[0]
    if not first.is_inner:
        raise NotPortedError(
            first.line,
            f"the training loop is in {first.file.rpartition('/')[2]}, not in the script: move it into the script",
        )
    other = next((each for each in backwards if each.span != first.span), None)
    if other is not None:
        raise NotPortedError(
            other.line, f"a second backward after that of line {first.line}: a workload has one loss in each update"
        )
    if first.details["couples"]:
        raise NotPortedError(
            first.line,
            "this loss compares samples of a batch with each other: write the workload by hand, with "
            "everyrank.gather(x) around the outputs in its loss",
        )
    return first


def _only_optimizer(observed: ObservedRun) -> Fact:
    steps = observed.facts_of("step")
    if not steps:
        raise NotPortedError(
            observed.facts_of("backward")[0].line, "no torch optimizer steps: write the update as your own Optimizer"
        )
    # a class that calls the constructor of its base class is recorded twice, first with the names
    optimizers = {event.details["id"]: event for event in reversed(observed.facts_of("optimizer"))}
    stepped_ids = list(dict.fromkeys(step.details["id"] for step in steps))
    if len(stepped_ids) > 1:
        line = optimizers[stepped_ids[1]].line if stepped_ids[1] in optimizers else steps[0].line
        if len({optimizers[each].span for each in stepped_ids if each in optimizers}) == 1:
            raise NotPortedError(line, _SEVERAL)
        raise NotPortedError(
            line, "a second optimizer: a workload has one. Copy a recipe and change it: everyrank new --list"
        )
    optimizer = optimizers.get(stepped_ids[0])
    if optimizer is None:
        raise NotPortedError(
            steps[0].line, "the call that creates the optimizer was not recorded: create it in the script"
        )
    if optimizer.details["name"] == "LBFGS":
        raise NotPortedError(
            optimizer.line,
            "LBFGS computes the loss several times per update: use another optimizer, or train by hand",
        )
    return optimizer


def _only_forward(observed: ObservedRun, backward: Fact) -> Fact:
    calls = [each for each in observed.facts_of("forward") if each.details["reached"]]
    if not calls:
        raise NotPortedError(
            backward.line,
            "no call of a module led to this backward: a workload calls model(input). Move the code into forward",
        )
    models = dict.fromkeys(each.details["id"] for each in calls)
    first_call = calls[0]
    other_model_call = next((each for each in calls if each.details["id"] not in list(models)[:1]), None)
    if other_model_call is not None:
        raise NotPortedError(
            other_model_call.line,
            f"a second model after that of line {first_call.line}: put both into one module, with one forward",
        )
    second_call = next((each for each in calls if each.span != first_call.span), None)
    if second_call is not None:
        raise NotPortedError(
            second_call.line, f"the model is called again, after line {first_call.line}: let one forward do both"
        )
    if not first_call.is_inner:
        raise NotPortedError(
            first_call.line, f"the model is called in {first_call.file.rpartition('/')[2]}: call it in the script"
        )
    return first_call


def _training_loader(observed: ObservedRun, backward: Fact) -> Fact:
    loader_ids = dict.fromkeys(
        each.details["loader"] for each in observed.facts_of("backward") if each.details["loader"]
    )
    loaders = {event.details["id"]: event for event in observed.facts_of("loader")}
    if not loader_ids or not all(each in loaders for each in loader_ids):
        raise NotPortedError(
            backward.line,
            "the batches do not come from a DataLoader: put the tensors into a TensorDataset with a DataLoader",
        )
    if len(loader_ids) > 1:
        spans = {loaders[each].span for each in loader_ids}
        line = loaders[list(loader_ids)[1]].line
        if len(spans) > 1:
            raise NotPortedError(line, "a second loader of training batches: a workload has one set of training data")
        raise NotPortedError(line, "a new loader in each epoch: create it once, before the loop over the epochs")
    loader = loaders[next(iter(loader_ids))]
    if not observed.loader_details(loader.details["id"])["plain_batches"]:
        raise NotPortedError(
            loader.line, "the loader has a custom batch sampler: a workload has batches of one size, in random order"
        )
    return loader


def _refuse_changed_globals(script: Script, changing: dict[str, int]) -> None:
    """Raise `NotPortedError` if a function or class that the loss needs reads a name that the training changes."""
    definitions = [
        node
        for node in script.source.tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    read, unseen = set[str](), set(script.definitions)
    while unseen:
        read |= unseen
        unseen = {name for node in definitions if node.name in unseen for name in loaded_names(node)} - read
    for name in sorted((read - script.definitions) & changing.keys()):
        raise NotPortedError(
            changing[name],
            f"`{name}` may change during the training, and the loss calls a function that reads it: train by hand",
        )


def _refuse_draws(observed: ObservedRun, forward: Fact, backward: Fact, call: ast.Call) -> None:
    """Raise `NotPortedError` for random numbers of the whole batch, which would depend on the rank of a sample."""
    loops = observed.source.loops(call)
    for draw in observed.facts_of("draw"):
        if not draw.details["in_loop"] or draw.details["in_data"]:
            continue
        within = [site for site in draw.chain[1:] if site.span == forward.span]
        is_in_loop = draw.is_inner and loops and start_of(loops[0]) <= draw.span[:2] < backward.span[:2]
        if within or (is_in_loop and draw.chain[0].function == forward.chain[0].function):
            where = "in forward" if within else "for the whole batch"
            raise NotPortedError(
                draw.line,
                f"random numbers are drawn {where}: draw them in the data set, as a part of the sample, because "
                "samples of a workload do not depend on the rank",
            )


def _refuse_changed_data(observed: ObservedRun, loader: Fact, backward: Fact) -> None:
    """Raise `NotPortedError` if the script changes the data set in each epoch: `dataset.sample_negatives()`."""
    source = observed.source
    for depth, site in enumerate(backward.chain):
        node = source.at(site.span, ast.Call)
        names = {
            name
            for name, value in {**site.values, **backward.chain[-1].values}.items()
            if value[2] == loader.details["id"] or (value[0] == "object" and value[3] and "Dataset" in value[1])
        }
        loops = source.loops(node) if node is not None else []
        for loop in loops[1:] if not depth else loops:
            for each in ast.walk(loop):
                call = each.value if isinstance(each, ast.Expr) else None
                if (
                    isinstance(call, ast.Call)
                    and isinstance(call.func, ast.Attribute)
                    and call.func.attr != "set_epoch"
                ):
                    owner = source.code(call.func.value)
                    if owner in names or owner.partition(".dataset")[0] in names:
                        raise NotPortedError(
                            call.lineno,
                            f"{source.code(call.func)}() changes the data set in each epoch: draw in its "
                            "__getitem__ instead, whose random numbers everyrank seeds by epoch",
                        )


# --- model, optimizer, schedule


def _names_of(site: CallSite, identity: int) -> list[str]:
    """Return the names of an object in a frame, the shortest first, and attributes last."""
    names = [name for name, value in site.values.items() if value[2] == identity]
    return sorted(names, key=lambda name: (name.count("."), len(name)))


def _code_with_parameter(script: Script, node: ast.AST, event: Fact, names: list[str]) -> tuple[Code, str]:
    """Return the code of a call as a function of an object, and the parameter: the name of the object in that code.

    The script may use several names, `model = net = Net()`. The others are assigned from the parameter.
    """
    attribute = next(
        (code for each in ast.walk(node) if "." in (code := script.source.code(each)) and code in names), ""
    )
    names = [name for name in names if "." not in name]
    if attribute:
        raise NotPortedError(event.line, f"attributes of a class are not followed: write {names[0]} for {attribute}")
    needed = ScriptSlice(script, names)
    needed.needs(node, event)
    text = script.rendered(node)
    reads = loaded_names(ast.parse(text)).union(*(loaded_names(ast.parse(each.text)) for each in needed.ordered))
    parameter, *others = [name for name in names if name in reads] or names[:1]
    assignments = [
        ScriptStatement((-1, event.line, number), f"{name} = {parameter}", frozenset({name}), event.line, False)
        for number, name in enumerate(others)
    ]
    return Code([*assignments, *needed.ordered], text, event.line), parameter


def _model(observed: ObservedRun, script: Script, forward: Fact, call: ast.Call) -> Code:
    needed = ScriptSlice(script)
    needed.needs(call.func, forward)
    statements = needed.ordered
    name = observed.source.code(call.func)
    if "." in name:
        raise NotPortedError(
            call.lineno, f"the model is an attribute, {name}: a class that holds the training loop is not followed"
        )
    line = next((statement.line for statement in statements if name in statement.names), forward.line)
    return Code(statements, name, line)


def _optimizer(observed: ObservedRun, script: Script, optimizer: Fact, forward: Fact) -> tuple[Code, str]:
    """Return the call that creates the optimizer, and the name of the model at this call."""
    node = observed.source.at(optimizer.span, ast.Call)
    assert node is not None
    names = _names_of(optimizer.chain[0], forward.details["id"])
    if not names:
        raise NotPortedError(
            optimizer.line,
            "the model has no name at the line that creates the optimizer: create the optimizer after the model",
        )
    if "." in names[0]:
        raise NotPortedError(
            optimizer.line, f"the model is an attribute, {names[0]}: attributes of a class are not followed"
        )
    return _code_with_parameter(script, node, optimizer, names)


def _schedule(
    observed: ObservedRun, script: Script, optimizer: Fact, updates_per_epoch: int
) -> tuple[Code | None, str, int]:
    schedules = [each for each in observed.facts_of("schedule") if each.details["of"] == optimizer.details["id"]]
    nested_ids = {nested_id for each in schedules for nested_id in each.details["parts"]}
    stepped_ids = {each.details["id"] for each in observed.facts_of("schedule_step")}
    schedules = [
        each for each in schedules if each.details["id"] in stepped_ids and each.details["id"] not in nested_ids
    ]
    if not schedules:
        return None, "", 0
    if len(schedules) > 1:
        raise NotPortedError(schedules[1].line, "a second schedule: combine both in a ChainedScheduler or SequentialLR")
    [event] = schedules
    node = observed.source.at(event.span, ast.Call)
    assert node is not None
    names = _names_of(event.chain[0], optimizer.details["id"])
    if not names or "." in names[0]:
        raise NotPortedError(
            event.line, "the optimizer has no name at the line that creates the schedule: create the schedule after it"
        )
    if event.details["name"] == "ReduceLROnPlateau":
        modes = {each.details["mode"] for each in observed.facts_of("schedule_step")}
        if modes - {"min"}:
            raise NotPortedError(
                event.line,
                "ReduceLROnPlateau maximizes a metric; in a workload it minimizes the evaluation loss",
            )
    code, parameter = _code_with_parameter(script, node, event, names)
    steps = sum(each.details["id"] == event.details["id"] for each in observed.facts_of("schedule_step"))
    updates = len(observed.facts_of("step"))
    # everyrank also steps ReduceLROnPlateau once per epoch
    is_per_epoch = steps < updates - 1 and event.details["name"] != "ReduceLROnPlateau"
    return code, parameter, updates_per_epoch if is_per_epoch else 0


# --- data


def _keyword(node: ast.Call, name: str, position: int = -1) -> ast.expr | None:
    value = next((keyword.value for keyword in node.keywords if keyword.arg == name), None)
    if value is None and 0 <= position < len(node.args):
        value = node.args[position]
    return None if isinstance(value, ast.Starred) else value


def _dataset(observed: ObservedRun, script: Script, loader: Fact, details: dict[str, Any]) -> tuple[Code, Code | None]:
    """Return the data set of a loader, and the weights of its samples."""
    node = observed.source.at(loader.span, ast.Call)
    assert isinstance(node, ast.Call)
    expression = _keyword(node, "dataset", 0) if loader.is_inner else None
    needed = ScriptSlice(script)
    if expression is None or (isinstance(node.func, ast.Attribute) and node.func.attr == "__init__"):
        raise NotPortedError(
            loader.line, "the DataLoader is created in another file: create it in the script, DataLoader(dataset)"
        )
    needed.needs(expression, loader)
    text = script.rendered(expression)
    weights = None
    sampler = _keyword(node, "sampler")
    if sampler is not None and details["sampler"] not in ("RandomSampler", "SequentialSampler"):
        sampler_call = _made_by(observed, sampler)
        if sampler_call is None:
            raise NotPortedError(
                loader.line, "the call that creates the sampler cannot be followed: create the sampler in this call"
            )
        if details["sampler"] == "SubsetRandomSampler":
            needed.needs(sampler_call.args[0], loader)
            text = f"torch.utils.data.Subset({text}, {script.rendered(sampler_call.args[0])})"
            script.definitions.add("torch")
        elif details["sampler"] == "WeightedRandomSampler" and details["num_samples"] == details["length"]:
            weights_slice = ScriptSlice(script)
            weights_slice.needs(sampler_call.args[0], loader)
            weights = Code(weights_slice.ordered, script.rendered(sampler_call.args[0]), loader.line)
        else:
            raise NotPortedError(
                loader.line, f"a {details['sampler']}: a workload shuffles all samples, or draws as many with `weights`"
            )
    elif details["replacement"]:
        raise NotPortedError(
            loader.line,
            "samples are drawn with replacement; a workload reads each once per epoch: remove the sampler",
        )
    return Code(needed.ordered, text, loader.line), weights


def _made_by(observed: ObservedRun, expression: ast.expr) -> ast.Call | None:
    """Return the call that created an object: the expression itself, or the last assignment to its name."""
    if isinstance(expression, ast.Call):
        return expression
    name = observed.source.code(expression)
    scope = observed.source.scope(expression)
    calls = [
        node.value
        for node in ast.walk(scope)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and observed.source.code(node.targets[0]) == name
        and start_of(node) < start_of(expression)
    ]
    return calls[-1] if calls else None


def _collate(observed: ObservedRun, script: Script, loader: Fact, details: dict[str, Any]) -> Code | None:
    if details["default_collate"]:
        return None
    node = observed.source.at(loader.span, ast.Call)
    assert isinstance(node, ast.Call)
    expression = _keyword(node, "collate_fn")
    if expression is None:
        raise NotPortedError(loader.line, "this call has no collate_fn: pass it here, DataLoader(..., collate_fn=f)")
    needed = ScriptSlice(script)
    needed.needs(expression, loader)
    return Code(needed.ordered, script.rendered(expression), loader.line)


def _early_passes(observed: ObservedRun, loader: Fact, backward: Fact) -> int:
    return max(
        0,
        sum(
            each.details["id"] == loader.details["id"] and each.number < backward.number
            for each in observed.facts_of("pass")
        )
        - 1,
    )


def _evaluation(observed: ObservedRun, loader: Fact) -> Fact | None:
    """Return the first other loader that is read after the first backward."""
    loaders = {event.details["id"]: event for event in observed.facts_of("loader")}
    start = observed.facts_of("backward")[0].number
    for each in observed.facts_of("pass"):
        other_loader = loaders.get(each.details["id"])
        if (
            each.number > start
            and other_loader is not None
            and other_loader.is_inner
            and each.details["id"] != loader.details["id"]
        ):
            return other_loader
    return None


# --- numbers


def _plain(observed: ObservedRun, script: Script, expression: ast.expr | None, event: Fact, value: Any) -> str:
    """Return the text of an expression if all its names have plain values, else the value."""
    if expression is None or isinstance(expression, ast.Constant):
        return repr(value)
    names = event.chain[0].values
    name_nodes = [each for each in ast.walk(expression) if isinstance(each, ast.Name | ast.Attribute)]
    codes = {observed.source.code(each) for each in name_nodes}
    is_plain = not any(isinstance(each, ast.Call | ast.Subscript) for each in ast.walk(expression)) and all(
        names.get(code, script.module_values.get(code, [""]))[0] in ("literal", "namespace") for code in codes
    )
    if not is_plain:
        return repr(value)
    needed = ScriptSlice(script)
    try:
        needed.needs(expression, event)
    except NotPortedError:
        return repr(value)
    return script.rendered(expression) if not needed.statements else repr(value)


def _batch(observed: ObservedRun, script: Script, loader: Fact, details: dict[str, Any], backwards: int) -> str:
    node = observed.source.at(loader.span, ast.Call)
    size = _keyword(node, "batch_size", 1) if isinstance(node, ast.Call) else None
    text = _plain(observed, script, size, loader, details["batch_size"])
    return text if backwards == 1 else f"{backwards} * {text}"


def _clip(observed: ObservedRun, script: Script, backward: Fact, changing: dict[str, int]) -> str:
    clips = observed.facts_of("clip")
    if not clips:
        return ""
    first = clips[0]
    if first.details["name"] == "clip_grad_value_" or first.details["norm_type"] != 2.0:
        raise NotPortedError(
            first.line, "a workload clips the norm of all gradients (clip_norm), not single values or another norm"
        )
    if not first.is_inner:
        return repr(first.details["most"])
    node = observed.source.at(first.span, ast.Call)
    expression = _keyword(node, "max_norm", 1) if isinstance(node, ast.Call) else None
    if expression is not None and first.chain[0].function == backward.chain[0].function:
        for name in sorted(loaded_names(expression) & changing.keys()):
            raise NotPortedError(
                first.line, f"`{name}` may change during the training; a workload has one clip_norm for all updates"
            )
    return _plain(observed, script, expression, first, first.details["most"])


def _seed(observed: ObservedRun, backward: Fact) -> str:
    seeds = [each for each in observed.facts_of("torch_seed") if each.is_inner and each.number < backward.number]
    return repr(seeds[0].details["value"]) if seeds and 0 <= seeds[0].details["value"] < 2**63 else ""


def _epochs(observed: ObservedRun, script: Script, backward: Fact) -> str:
    """Return the number of epochs, from the loop over a range around the loop over batches; "" if there is none."""
    source = observed.source
    for depth, site in enumerate(backward.chain):
        node = source.at(site.span, ast.Call)
        loops = source.loops(node) if node is not None else []
        for loop in loops[1:] if not depth else loops:
            if isinstance(loop, ast.For) and isinstance(loop.iter, ast.Call):
                call = loop.iter
                range_call = next(
                    (
                        each
                        for each in ast.walk(call)
                        if isinstance(each, ast.Call) and source.code(each.func) in ("range", "trange")
                    ),
                    None,
                )
                if range_call is None:
                    continue
                values = {**script.module_values, **site.values}
                numbers = [_number(source, arg, values) for arg in range_call.args]
                if any(number is None for number in numbers) or not numbers:
                    continue
                count = len(range(*[number for number in numbers if number is not None]))
                end_expression = range_call.args[0] if len(range_call.args) == 1 else range_call.args[1]
                event = dataclasses.replace(backward, chain=backward.chain[depth:])
                if len(range_call.args) == 3 and numbers[2] != 1:
                    return repr(count)
                if len(range_call.args) == 1 or numbers[0] == 0:
                    return _plain(observed, script, end_expression, event, count)
                is_one_more = (
                    isinstance(end_expression, ast.BinOp)
                    and isinstance(end_expression.op, ast.Add)
                    and isinstance(end_expression.right, ast.Constant)
                    and end_expression.right.value == 1
                    and numbers[0] == 1
                )
                return _plain(
                    observed,
                    script,
                    end_expression.left if is_one_more and isinstance(end_expression, ast.BinOp) else None,
                    event,
                    count,
                )
    return ""


def _number(source: ScriptSource, node: ast.expr, values: dict[str, list[Any]]) -> int | None:
    """Return the value of a sum or difference of names and whole numbers; None for other expressions."""
    value = values.get(source.code(node))
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if value is not None and value[0] == "literal":
        number = ast.literal_eval(value[1]) if value[1].lstrip("-").isdigit() else None
        return number if isinstance(number, int) else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        left, right = _number(source, node.left, values), _number(source, node.right, values)
        if left is not None and right is not None:
            return left + right if isinstance(node.op, ast.Add) else left - right
    return None


def _note_rates(observed: ObservedRun, notes: list[tuple[int, str]]) -> None:
    """Note lines that set a learning rate by hand."""
    for node in ast.walk(observed.source.tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            key = node.slice
            if isinstance(key, ast.Constant) and key.value == "lr":
                notes.append((node.lineno, f"the script sets the learning rate by hand: {_BY_HAND}"))

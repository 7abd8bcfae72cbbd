"""Writes the file of a workload from the parts of a training."""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from everyrank.port.facts import Fact
from everyrank.port.source import NotPortedError, ScriptSource
from everyrank.port.to_workload.batch_loop import Loss, bound_names_of
from everyrank.port.to_workload.definitions import find_definitions
from everyrank.port.to_workload.slices import Script, ScriptStatement, bound_names, decided, loaded_names
from everyrank.port.to_workload.training_parts import Code, TrainingParts

__all__ = ["WorkloadChoice", "workload_text"]

PER_EPOCH = '''class EachEpoch:
    """Steps a schedule once per epoch, where everyrank steps it once per update."""

    def __init__(self, schedule, updates):
        self.schedule, self.updates, self.count = schedule, updates, 0

    def step(self):
        self.count += 1
        if self.count % self.updates == 0:
            self.schedule.step()

    def state_dict(self):
        return {"count": self.count, "schedule": self.schedule.state_dict()}

    def load_state_dict(self, state):
        self.count = state["count"]
        self.schedule.load_state_dict(state["schedule"])
'''


@dataclasses.dataclass(frozen=True)
class WorkloadChoice:
    """Decisions that cannot be read from the source; the check tries them.

    reduction   how the loss combines samples: "mean", "sum", or "masked" (mean without ignored targets)
    evaluates   whether the file has evaluation data and metrics
    """

    reduction: str
    evaluates: bool = True


class _File:
    """The parts of the workload's file that have been collected so far."""

    def __init__(self, training: TrainingParts, source: ScriptSource, backward: Fact, imports_from: str) -> None:
        self.training, self.source, self.backward = training, source, backward
        self.script: Script = training.script
        self.imports_from = imports_from
        self.module_statements: dict[tuple[int, int, int], ScriptStatement] = {}
        self.functions: list[str] = []
        self.imports: dict[tuple[int, int], str] = {}
        self.copies: dict[int, str] = {}
        self.imported: list[str] = []
        self.needs_everyrank = False
        self.taken: set[str] = set()

    def name(self, wanted: str) -> str:
        """Return `wanted`, or a longer name if the file already has that name."""
        while wanted in self.taken:
            wanted += "_for_workload"
        self.taken.add(wanted)
        return wanted


def workload_text(
    training: TrainingParts,
    choice: WorkloadChoice,
    source: ScriptSource,
    backward: Fact,
    python_args: Sequence[str],
    imports_from: str,
    pass_batches: int = 0,
) -> str:
    """Return the text of the file.

    imports_from  the module that the file imports definitions from; "" to copy them
    pass_batches  number of batches of an epoch that is shortened for a comparison; 0 for all

    Raises `NotPortedError` if a definition cannot be found.
    """
    file = _File(training, source, backward, imports_from)
    has_eval = choice.evaluates and training.eval_data is not None
    fields: dict[str, str] = {"name": repr(_workload_name(Path(python_args[0])))}
    _add_setups(file, has_eval)
    definitions = find_definitions(file.script, backward, imports_from)
    file.imports, file.copies, file.imported = definitions.imports, definitions.copies, definitions.imported
    file.taken = _module_names(file, definitions.statements)
    sources: dict[str, Code] = {"train_data": training.train_data}
    if has_eval and training.eval_data is not None:
        sources["eval_data"] = training.eval_data
    _add_data(file, sources, fields)
    fields["loss"] = _add_loss(file, choice)
    fields["optimizer"] = _function(file, "optimizer", training.optimizer_model, training.optimizer)
    if training.schedule is not None:
        schedule = training.schedule
        if training.per_epoch:
            file.functions.append(PER_EPOCH)
            updates = min(training.per_epoch, -(-pass_batches // training.backwards) or training.per_epoch)
            schedule = dataclasses.replace(schedule, text=f"EachEpoch({schedule.text}, {updates})")
        fields["schedule"] = _function(file, "schedule", training.schedule_optimizer, schedule)
    fields["global_batch"] = training.batch
    fields |= _numbers(training, has_eval)
    collate = _add_collate(file)
    if collate:
        fields["collate"] = collate
    if training.weights is not None:
        fields["weights"] = _function(file, "weights", "", training.weights)
    if has_eval and training.metrics:
        fields["metrics"] = _add_metrics(file)
    file.module_statements |= definitions.statements
    return _joined(file, fields, python_args)


def _module_names(file: _File, statements_of_definitions: dict[tuple[int, int, int], ScriptStatement]) -> set[str]:
    """Return the names that the file has at module level before its own functions.

    Raises `NotPortedError` if the script has a name that each workload's file needs.
    """
    script = file.script
    statements = [*file.module_statements.values(), *statements_of_definitions.values()]
    names = {*script.constants, *script.namespaces, *script.definitions}
    names |= {name for statement in statements for name in statement.names}
    fixed_names = {"Workload", "workload", *(["EachEpoch"] if file.training.per_epoch else [])}
    for name in sorted(names & fixed_names):
        raise NotPortedError(
            _line_of(file, name), f"the file of a workload needs the name `{name}`: use a different name in the script"
        )
    return names | fixed_names


def _line_of(file: _File, name: str) -> int:
    """Return the first line of the script that binds a name."""
    return next(
        (
            node.lineno
            for node in ast.walk(file.source.tree)
            if isinstance(node, ast.stmt) and name in bound_names(node)
        ),
        1,
    )


def _workload_name(script: Path) -> str:
    """Return the name of the script, or of its folder if the script is called main, train, script or run."""
    name = script.absolute().parent.name if script.stem in ("main", "train", "script", "run") else script.stem
    return re.sub(r"[^\w-]", "_", name) or "workload"


def _numbers(training: TrainingParts, has_eval: bool) -> dict[str, str]:
    fields: dict[str, str] = {}
    if has_eval and training.eval_batch is not None:
        fields["eval_batch"] = str(training.eval_batch)
    if training.epochs:
        fields["epochs"] = training.epochs
    if training.drop_last:
        fields["drop_last"] = "True"
    if training.clip_norm:
        fields["clip_norm"] = training.clip_norm
    if training.seed:
        fields["seed"] = training.seed
    return fields


# --- functions


def _indented(text: str) -> str:
    lines = text.split("\n")
    return "\n".join(f"    {line}" if line.strip() else "" for line in lines) if _may_indent(text) else f"    {text}"


def _may_indent(text: str) -> bool:
    """Whether no string of a statement spans several lines."""
    return not any(
        isinstance(node, ast.Constant) and isinstance(node.value, str) and node.lineno != node.end_lineno
        for node in ast.walk(ast.parse(text))
    )


def _assigned_value(text: str, name: str) -> str:
    """Return the value in the text of `name = value`; "" for other statements, and for values that need brackets."""
    statement = ast.parse(text).body[0]
    if (
        not isinstance(statement, ast.Assign)
        or [ast.unparse(target) for target in statement.targets] != [name]
        or isinstance(statement.value, ast.Tuple | ast.NamedExpr)
    ):
        return ""
    return ast.get_source_segment(text, statement.value) or ""


def _function(file: _File, name: str, parameter: str, code: Code) -> str:
    """Return a lambda, or the name of a function that is added to the file."""
    statements = [statement for statement in code.statements if statement.order not in file.module_statements]
    if not statements and "\n" not in code.text and len(code.text) < 90:
        if code.text.endswith("()") and code.text[:-2].isidentifier() and not parameter:
            return code.text[:-2]
        return f"lambda {parameter}: {code.text}" if parameter else f"lambda: {code.text}"
    if len(statements) == 1 and "\n" not in statements[0].text:
        value = _assigned_value(statements[0].text, code.text)
        if value:
            return _function(file, name, parameter, Code([], value, code.line))
    name = file.name(f"build_{name}" if name in ("model", "optimizer", "schedule") else name)
    lines = [_indented(statement.text) for statement in statements]
    file.functions.append(f"def {name}({parameter}):\n" + "\n".join([*lines, _indented(f"return {code.text}")]) + "\n")
    return name


def _add_setups(file: _File, has_eval: bool) -> None:
    """Put the statements of loss, metrics and collate, and those that several functions share, at module level."""
    training = file.training
    statements = list(training.loss.setup)
    if has_eval:
        statements += [statement for metric in training.metrics for statement in metric.setup]
    if training.collate is not None:
        statements += training.collate.statements
    for statement in statements:
        file.module_statements[statement.order] = statement
    codes = [training.train_data, training.model, training.optimizer]
    codes += [each for each in (training.eval_data if has_eval else None, training.schedule, training.weights) if each]
    counts = Counter(statement.order for code in codes for statement in code.statements)
    heavy = set[str]()
    for statement in sorted(
        {statement.order: statement for code in codes for statement in code.statements}.values(), key=lambda p: p.order
    ):
        reads = loaded_names(ast.parse(statement.text))
        if statement.is_heavy or reads & heavy:
            heavy |= statement.names
        elif counts[statement.order] > 1:
            file.module_statements[statement.order] = statement


def _add_data(file: _File, sources: dict[str, Code], fields: dict[str, str]) -> None:
    """Add the functions of the data sets and the model; one function for the data if they share statements."""
    model = file.training.model
    codes = [*sources.values(), model]
    counts = Counter(
        statement.order
        for code in codes
        for statement in code.statements
        if statement.order not in file.module_statements
    )
    shared = {order for order, count in counts.items() if count > 1}
    data_orders = {statement.order for code in sources.values() for statement in code.statements}
    if not shared:
        fields["model"] = _function(file, "model", "", model)
        for name, code in sources.items():
            fields[name] = _function(file, name, "", code)
        return
    data_statements = {
        statement.order: statement
        for code in sources.values()
        for statement in code.statements
        if statement.order not in file.module_statements
    }
    model_statements = [
        statement
        for statement in model.statements
        if statement.order not in data_orders and statement.order not in file.module_statements
    ]
    reads = {name for statement in model_statements for name in loaded_names(ast.parse(statement.text))} | loaded_names(
        ast.parse(model.text, mode="eval")
    )
    passed_names = sorted(
        {name for statement in data_statements.values() for name in statement.names}
        & reads - _bound_first(model_statements)
    )
    file.imports[-2, 0] = "import functools"
    # a local variable of that name would hide the function
    file.taken |= {*passed_names, *(each for statement in model_statements for each in statement.names)}
    name = file.name("data")
    texts = [*(code.text for code in sources.values()), *passed_names]
    body = "\n".join(_indented(data_statements[order].text) for order in sorted(data_statements))
    file.functions.append(f"@functools.cache\ndef {name}():\n{body}\n    return {', '.join(texts)}\n")
    index = {} if len(texts) == 1 else {text: f"[{number}]" for number, text in enumerate(texts)}
    if passed_names:
        lines = [f"    {each} = {name}(){index.get(each, '')}" for each in passed_names]
        lines += [_indented(statement.text) for statement in model_statements]
        builder = file.name("build_model")
        file.functions.append(f"def {builder}():\n" + "\n".join([*lines, f"    return {model.text}"]) + "\n")
        fields["model"] = builder
    else:
        fields["model"] = _function(file, "model", "", Code(model_statements, model.text, model.line))
    for number, field in enumerate(sources):
        fields[field] = f"lambda: {name}()" + (f"[{number}]" if len(texts) > 1 else "")


def _bound_first(statements: Sequence[ScriptStatement]) -> set[str]:
    """Return the names that statements bind before they read them."""
    bound, read_before = set[str](), set[str]()
    for statement in statements:
        read_before |= loaded_names(ast.parse(statement.text)) - bound
        bound |= statement.names
    return bound - read_before


# --- loss, collate and metrics


def _rows(loss: Loss) -> str:
    return loss.rows if loss.rows in loss.targets or not loss.targets else loss.targets[0]


def _target_text(loss: Loss) -> str:
    """Return the expression that collate returns as the target."""
    if loss.targets:
        return ", ".join(loss.targets) if len(loss.targets) == 1 else f"({', '.join(loss.targets)})"
    if loss.rows:
        return loss.rows
    return "next(iter(batch.values()))"


def _head(name: str, output: str, loss: Loss) -> list[str]:
    """Return the first lines of a function of output and target."""
    names = loss.targets or ["target"]
    if len(names) == 1:
        return [f"def {name}({output}, {names[0]}):"]
    return [f"def {name}({output}, target):", f"    {', '.join(names)} = target"]


def _undivided(file: _File) -> tuple[list[str], str, int]:
    """Return the statements to the loss, the loss, and the factor to multiply it by.

    If the last operation divides the loss by the backward passes of an update, it is removed, and the factor is 1.
    Else the factor is the number of these passes.
    """
    after, value, backwards = list(file.training.loss.after), file.training.loss.value, file.training.backwards
    if backwards == 1:
        return after, value, 1
    undivided = _dividend(file, value, ast.parse(value, mode="eval").body)
    if undivided:
        return after, undivided, 1
    number, text = next(
        ((number, text) for number, text in reversed(list(enumerate(after))) if value in bound_names_of(text)), (0, "")
    )
    statement = ast.parse(text).body[0] if text else None
    if (
        isinstance(statement, ast.AugAssign)
        and isinstance(statement.op, ast.Div)
        and _is_number_of_backwards(file, statement.value)
    ):
        return [*after[:number], *after[number + 1 :]], value, 1
    if isinstance(statement, ast.Assign) and [ast.unparse(target) for target in statement.targets] == [value]:
        undivided = _dividend(file, text, statement.value)
        if undivided:
            kept = [] if undivided == value else [f"{value} = {undivided}"]
            return [*after[:number], *kept, *after[number + 1 :]], value, 1
    return after, value, backwards


def _dividend(file: _File, text: str, node: ast.expr) -> str:
    """Return `a` of `a / b` if b is the number of backward passes of an update, else ""."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and _is_number_of_backwards(file, node.right):
        return ast.get_source_segment(text, node.left) or ""
    return ""


def _is_number_of_backwards(file: _File, divisor: ast.expr) -> bool:
    values = {**file.script.module_values, **file.backward.chain[0].values}
    test = ast.Compare(divisor, [ast.Eq()], [ast.Constant(file.training.backwards)])
    return decided(ast.fix_missing_locations(test), values) is True


def _add_loss(file: _File, choice: WorkloadChoice) -> str:
    """Add the loss function; returns its name."""
    training, loss = file.training, file.training.loss
    rows = _rows(loss) if loss.targets else "target"
    after, value, factor = _undivided(file)
    if after and "\n" not in after[-1]:
        assigned = _assigned_value(after[-1], value)
        if assigned and isinstance(ast.parse(assigned, mode="eval").body, ast.Call):
            after, value = after[:-1], assigned
    if not isinstance(ast.parse(value, mode="eval").body, ast.Call | ast.Name | ast.Attribute):
        value = f"({value})"
    multiplier = f" * {factor}" if factor > 1 else ""
    count = f"len({rows})"
    if choice.reduction == "masked":
        after = [*after, f"count = ({rows} != {training.ignored}).sum()"]
        count = "count"
    if choice.reduction == "sum":
        file.needs_everyrank = True
        # the sum over the whole batch counts as one term
        result = f"return {value}{multiplier}, float(everyrank.first_row() == 0)"
    else:
        result = f"return {value}{multiplier} * {count}, {count}"
    name = file.name("loss")
    lines = [*_head(name, loss.output, loss), *(_indented(text) for text in after), f"    {result}"]
    file.functions.append("\n".join(lines) + "\n")
    return name


def _add_collate(file: _File) -> str:
    """Add the function from samples to (input, target); returns its name, "" for torch's default_collate."""
    loss, collate = file.training.loss, file.training.collate
    is_plain = not loss.before and not loss.keywords and len(loss.inputs) == 1 and len(loss.targets) == 1
    if is_plain and loss.target == f"{loss.inputs[0]}, {loss.targets[0]}":
        if collate is None:
            return ""
        return collate.text
    if collate is None:
        file.imports[-1, 0] = "from torch.utils.data import default_collate"
    function = collate.text if collate is not None else "default_collate"
    if function.startswith("lambda"):
        function = f"({function})"
    lines = [f"{loss.target} = {function}(samples)", *loss.before]
    if loss.inputs[0].startswith("**"):
        batch_name = loss.inputs[0][2:]
        inputs = f"dict({batch_name})"
        if not loss.targets and not loss.rows:
            return _add_function(file, "collate", [*lines, f"return {inputs}, next(iter({batch_name}.values()))"])
    elif loss.keywords:
        inputs = (
            "dict(" + ", ".join(f"{name}={text}" for name, text in zip(loss.keywords, loss.inputs, strict=True)) + ")"
        )
    else:
        inputs = loss.inputs[0] if len(loss.inputs) == 1 else f"({', '.join(loss.inputs)})"
    return _add_function(file, "collate", [*lines, f"return {inputs}, {_target_text(loss)}"])


def _add_function(file: _File, name: str, lines: Sequence[str]) -> str:
    name = file.name(name)
    file.functions.append(f"def {name}(samples):\n" + "\n".join(_indented(line) for line in lines) + "\n")
    return name


def _add_metrics(file: _File) -> str:
    """Add a function for each metric; returns the dict of them."""
    loss, entries = file.training.loss, list[str]()
    for metric in file.training.metrics:
        name = file.name(metric.name)
        rows = _rows(loss) if loss.targets else "target"
        value = metric.value
        lines = [*_head(name, metric.output, loss), *(_indented(text) for text in metric.after)]
        file.functions.append("\n".join([*lines, f"    return {value}, len({rows})"]) + "\n")
        entries.append(f'"{metric.name}": {name}')
    return "{" + ", ".join(entries) + "}"


# --- the whole file


def _joined(file: _File, fields: dict[str, str], python_args: Sequence[str]) -> str:
    script, name = file.script, Path(python_args[0]).name
    command = shlex.join(["everyrank", "port", "--to", "workload", name, *python_args[1:]])
    docstring = (
        f"The training of {name} as a workload for everyrank.\n\nMade and compared with the script by: {command}\n"
    )
    docstring = docstring.replace("\\", "\\\\").replace('"""', r"\"\"\"")
    head = [f'"""{docstring}"""']
    imports = [file.imports[key] for key in sorted(file.imports)]
    if script.namespaces:
        imports.insert(0, "from argparse import Namespace")
    if "torch" in script.definitions and not any(re.match(r"import torch$|import torch,", line) for line in imports):
        imports.append("import torch")
    everyrank_imports = ["import everyrank"] if file.needs_everyrank else []
    everyrank_imports.append("from everyrank import Workload")
    if file.imported:
        everyrank_imports.append(f"from {file.imports_from} import {', '.join(sorted(set(file.imported)))}")
    constants = [f"{each} = {text}" for each, text in script.constants.items()]
    for each, attributes in script.namespaces.items():
        if attributes:
            inner = ", ".join(f"{key}={text}" for key, text in attributes.items())
            line = f"{each} = Namespace({inner})"
            if len(line) > 100:
                line = (
                    f"{each} = Namespace(\n" + "".join(f"    {key}={text},\n" for key, text in attributes.items()) + ")"
                )
            constants.append(line)
    # definitions are of the module, whose statements ran before those of the functions that it called
    blocks = [((0, line, -1), text, True) for line, text in file.copies.items()]
    blocks += [(statement.order, statement.text, False) for statement in file.module_statements.values()]
    future_imports = [line for line in imports if line.startswith("from __future__")]
    other_imports = [line for line in dict.fromkeys(imports) if line not in future_imports]
    text = "\n".join([*head, "", *future_imports, *other_imports, "", *everyrank_imports, ""])
    if constants:
        text += "\n" + "\n".join(constants) + "\n"
    was_definition = not constants
    for _, block, is_definition in sorted(blocks):
        separator = "\n\n" if is_definition or was_definition else ""
        text += f"{separator if text else ''}{block}\n" if is_definition or was_definition else f"{block}\n"
        was_definition = is_definition
    for function in file.functions:
        text += f"\n\n{function}"
    ordered = ["name", "model", "train_data", "eval_data", "collate", "loss", "metrics", "optimizer", "schedule"]
    other_fields = [key for key in fields if key not in ordered]
    lines = [f"    {key}={fields[key]},\n" for key in [*ordered, *other_fields] if key in fields]
    text += "\n\nworkload = Workload(\n" + "".join(lines) + ")\n"
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise NotPortedError(
            1, f"the file of the workload would not be valid Python ({error.msg}, line {error.lineno})"
        ) from error
    return text

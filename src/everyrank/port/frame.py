"""Imports, helper functions, the start and the end of the process group, and the random numbers of each rank."""

from __future__ import annotations

import ast
import dataclasses
import math

from everyrank.port.helpers import helper_text
from everyrank.port.names import new_names, rename_helpers
from everyrank.port.plan import Plan
from everyrank.port.prepare import PREPARES, import_of, start_lines
from everyrank.port.source import NotPortedError, holds_line

__all__ = ["add_frame", "imported_names", "imports_in", "leading_imports", "main_of"]

_REASON = "imports and helper functions of the port"
# libraries that draw from numpy's global generator
_DRAWING_LIBRARIES = {"sklearn", "scipy", "imblearn"}
_NUMPY_RANDOM = {"np.random", "numpy.random"}
_GENERATORS = {"default_rng", "RandomState"}  # with their own seed
_EXITS = ("sys.exit", "exit", "quit")
_FIRST_KINDS = ("loader", "seed", "optimizer", "forward", "draw")


def add_frame(plan: Plan) -> None:
    """Add the imports, helper functions, start and end that all other edits need."""
    _add_own_noise(plan)
    _choose_seed(plan)
    source, border = plan.source, plan.files.num_lines
    body, main = _body(plan), main_of(plan)
    other_body = [node for node in source.tree.body if border and node.lineno > border]
    last_import = leading_imports(body)
    reason = _REASON if plan.idiom is not None else f"{_REASON}, in plain PyTorch"
    start = _start(plan, imported_names(imports_in(body)), is_function=bool(other_body))
    start += ["same_seed()"] if plan.has_same_seed else []
    if other_body:
        source.insert_after(leading_imports(other_body), _helpers(plan, other_body), reason)
        _import_other(plan, body)
        block = "\n".join(_imports_of_helpers(plan, body, start))
    else:
        block = _helpers(plan, body)
    if main is not None:
        source.insert_after(last_import, block, reason)
        source.insert_first(main, "\n".join(start), "before anything else")
        last_in_main = main.body[-1]
    else:
        source.insert_after(last_import, f"{block}\n\n\n" + "\n".join(start), f"{reason}, before anything else")
        last_statement = body[-1]
        last_in_main = (
            last_statement.body[-1]
            if isinstance(last_statement, ast.If) and _is_main(plan, last_statement)
            else last_statement
        )
    if plan.choice.target != "fabric":  # Fabric destroys its process group itself
        _leave(plan, last_in_main)
    source.edits = [dataclasses.replace(edit, text=plan.in_idiom(edit.text)) for edit in source.edits]
    rename_helpers(plan)


def _leave(plan: Plan, last: ast.stmt) -> None:
    """Destroy the process group after the last statement; before the exit of `sys.exit(main())`."""
    source, reason = plan.source, "all ranks leave together"
    match last:
        case ast.Expr(value=ast.Call(args=[ast.Call(args=[], keywords=[]) as result]) as call) if (
            source.code(call.func) in _EXITS
        ):
            pass
        case ast.Raise(exc=ast.Call(func=ast.Name(id="SystemExit"), args=[ast.Call(args=[], keywords=[]) as result])):
            pass
        case _:
            source.insert_after(last, "dist.destroy_process_group()", reason)
            return
    source.insert_before(last, f"exit_status = {source.code(result)}\ndist.destroy_process_group()", reason)
    source.replace(result, "exit_status", "")


def _body(plan: Plan) -> list[ast.stmt]:
    """Return the statements of the script itself."""
    border = plan.files.num_lines
    return [node for node in plan.source.tree.body if not border or node.lineno <= border]


def _is_main(plan: Plan, node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__main__" in plan.source.code(node.test)


def main_of(plan: Plan) -> ast.If | None:
    """Return the `if __name__ == "__main__":` of the script, if it holds all facts of the kinds `_FIRST_KINDS`."""
    main = next((node for node in _body(plan) if isinstance(node, ast.If) and _is_main(plan, node)), None)
    first_facts = [fact for fact in plan.facts if fact.kind in _FIRST_KINDS]
    is_in_main = main is not None and all(
        any(holds_line(main, call.span[0]) for call in fact.chain) for fact in first_facts
    )
    return main if is_in_main else None


def _start(plan: Plan, imported: set[str], is_function: bool) -> list[str]:
    """Return the lines that join the ranks; with `is_function`, setup() makes the library's object."""
    if plan.idiom is None:
        return ["setup()"]
    return [f"{plan.object_name} = setup()"] if is_function else start_lines(plan, "logging" in imported)


def leading_imports(body: list[ast.stmt]) -> ast.stmt:
    """Return the last of the imports at the top of a file. Raises `NotPortedError` if there are none."""
    first = next(
        (node for node in body if not isinstance(node, ast.Import | ast.ImportFrom) and not _is_text(node)), None
    )
    if first is None or not imports_in(body):
        raise NotPortedError(1, "the script has no import before its first statement: import torch at the top")
    leading = [node for node in imports_in(body) if node.lineno < first.lineno]
    if not leading:
        raise NotPortedError(first.lineno, "this statement comes before all imports: move the imports to the top")
    return leading[-1]


def imports_in(body: list[ast.stmt]) -> list[ast.Import | ast.ImportFrom]:
    """Return the import statements of a file outside of functions and conditions."""
    return [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]


def _helpers(plan: Plan, body: list[ast.stmt]) -> str:
    """Return the imports and helper functions for the file with these statements."""
    last_line = leading_imports(body).lineno
    imports = [node for node in imports_in(body) if node.lineno <= last_line]  # a later import is not executed yet
    names = plan.helpers if plan.idiom is None else plan.helpers - {"setup"}
    helpers = helper_text(
        names,
        has_batch_norm=plan.has_batch_norm,
        finds_unused=plan.finds_unused,
        sums=plan.choice.loss == "sum",
        sampler=plan.choice.sampler,
        has_wandb=plan.has_wandb,
        has_logging="logging" in imported_names(imports),
        reseeded=plan.reseeded,
        has_numpy="np" in imported_names(imports) or _draws_from_numpy(plan),
        device=f"{plan.object_name}.device" if plan.idiom is not None else "",
    )
    if plan.idiom is not None and plan.files.other is not None:
        helpers = f"{_setup_of_library(plan, imports)}\n\n\n{helpers}"
    return "\n\n\n".join(text for text in (_imports(plan, imports), helpers) if text)


def _setup_of_library(plan: Plan, imports: list[ast.Import | ast.ImportFrom]) -> str:
    """Return the function that makes a library's object for both files."""
    lines = start_lines(plan, "logging" in imported_names(imports))
    body = [f"global {plan.object_name}", *lines, f"return {plan.object_name}"]
    return "\n".join(
        ["def setup():", '    """Join the other processes; only rank 0 prints."""', *(f"    {line}" for line in body)]
    )


def _imports_of_helpers(plan: Plan, body: list[ast.stmt], start: list[str]) -> list[str]:
    """Return the imports of a script whose helper functions are in the other file."""
    texts = [*start, *(edit.text for edit in plan.source.edits if edit.start[0] <= plan.files.num_lines)]
    renamed = new_names(plan)
    used_helpers = sorted(renamed.get(name, name) for name in plan.helpers if any(f"{name}(" in text for text in texts))
    needs_os = any("os." in text for text in texts) and "os" not in imported_names(imports_in(body))
    return [
        *(["import os"] if needs_os else []),
        f"from {plan.files.module}_{plan.files.target} import {', '.join(used_helpers)}",
        *(["import torch.distributed as dist"] if plan.idiom is None else []),
    ]


def _import_other(plan: Plan, body: list[ast.stmt]) -> None:
    """Let the script import the port of the other file in place of the other file."""
    source, module = plan.source, plan.files.module
    package, _, name = module.rpartition(".")
    has_import = False
    for node in (each for statement in body for each in ast.walk(statement)):
        if isinstance(node, ast.ImportFrom) and node.module == module and not node.level:
            text = source.code(node).replace(f"from {module}", f"from {module}_{plan.files.target}", 1)
            source.replace(node, text, "the port of the other file")
            has_import = True
        elif (isinstance(node, ast.ImportFrom) and node.module == package) or isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name != (name if isinstance(node, ast.ImportFrom) else module):
                    continue
                if "." in alias.name and not alias.asname:
                    raise NotPortedError(
                        node.lineno, f"write: from {package} import {name}, so that its port can take its place"
                    )
                text = f"{alias.name}_{plan.files.target} as {alias.asname or alias.name}"
                source.replace(alias, text, "the port of the other file")
                has_import = True
    if not has_import:
        raise NotPortedError(1, f"the script does not import {module} itself, so its port cannot take its place")


def _add_own_noise(plan: Plan) -> None:
    """Give each rank its own random numbers if training draws them, as dropout and augmentation do."""
    source = plan.source
    drops = any(fact.details["has_dropout"] for fact in plan.training_forwards)
    draws = [fact for fact in plan.of("draw") if fact.details["in_loop"]]
    # a draw in the loop itself may decide what all ranks do next
    shared = {fact.details["library"] for fact in draws if not fact.details["in_data"]} - {"torch"}
    draws = [fact for fact in draws if fact.details["library"] not in shared]
    if not drops and not draws:
        return
    plan.reseeded = {fact.details["library"] for fact in draws} - {"torch"}
    first_forward = next((index for index, fact in enumerate(plan.facts) if fact.kind == "forward"), 0)
    is_drawn = any(fact.kind == "draw" and fact.details["library"] == "torch" for fact in plan.facts[first_forward:])
    has_own_sequences = "own_sequences" in plan.helpers and not is_drawn
    if not has_own_sequences and ("split" not in plan.helpers or not plan.training_loaders):
        line = (draws or plan.training_forwards)[0].line
        plan.note(line, "all ranks draw the same random numbers here, because their batches come from the same draws")
        return
    wrappers = [edit for edit in source.edits if edit.reason == PREPARES or edit.text.lstrip().startswith("shard(")]
    last_wrapper = max(wrappers, key=lambda edit: edit.start)
    indent = last_wrapper.text[: len(last_wrapper.text) - len(last_wrapper.text.lstrip())]
    plan.helpers.add("own_noise")
    source.edits.append(
        dataclasses.replace(
            last_wrapper, text=f"{indent}own_noise()\n", reason="random numbers of its own on each rank"
        )
    )


def _choose_seed(plan: Plan) -> None:
    """Add same_seed() if random numbers are drawn, or may be, before the script sets a seed for them."""
    seeded: set[str] = set()
    before_loaders = {"torch"} | ({"numpy"} if _may_draw_from_numpy(plan) else set())
    is_unseeded = _splits_unseeded(plan)
    for fact in plan.facts:
        if fact.kind == "seed":
            seeded.add(fact.details["library"])
        drawn_libraries = (
            {fact.details["library"]}
            if fact.kind == "draw" and not fact.details["in_data"]
            else before_loaders
            if fact.kind in ("loader", "optimizer")
            else set()
        )
        is_unseeded |= bool(drawn_libraries - seeded)
    if is_unseeded:
        plan.has_same_seed = True
        plan.helpers.add("same_seed")


def _splits_unseeded(plan: Plan) -> bool:
    """Whether a random_split comes before the seed of torch. A run does not record its draws."""
    seed_line = min((fact.line for fact in plan.of("seed") if fact.details["library"] == "torch"), default=math.inf)
    return any(
        isinstance(node, ast.Call)
        and plan.source.code(node.func).rpartition(".")[2] == "random_split"
        and not any(keyword.arg == "generator" for keyword in node.keywords)
        and node.lineno < seed_line
        for node in ast.walk(plan.source.tree)
    )


def _may_draw_from_numpy(plan: Plan) -> bool:
    """Whether the script has calls that draw from numpy. A run does not record those of sklearn and pandas."""
    code, draws = plan.source.code, False
    for node in ast.walk(plan.source.tree):
        match node:
            case ast.Import(names=names) if any(alias.name.partition(".")[0] in _DRAWING_LIBRARIES for alias in names):
                draws = True
            case ast.ImportFrom(module=str(module)) if module == "numpy.random":
                draws = True
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in _DRAWING_LIBRARIES:
                draws = True
            case ast.Call(func=ast.Attribute(value=owner, attr=name)) if code(owner) in _NUMPY_RANDOM:
                if name in _GENERATORS and not (node.args or node.keywords):
                    plan.note(node.lineno, f"each rank draws other numbers here: write {code(node.func)}(seed)")
                elif name not in _GENERATORS:
                    draws = True
            case ast.Call(func=ast.Attribute(attr="sample"), keywords=keywords):  # of a pandas table
                if any(keyword.arg in ("frac", "n") for keyword in keywords):
                    draws = True
            case _:
                pass
    return draws


def _imports(plan: Plan, imports: list[ast.Import | ast.ImportFrom]) -> str:
    bound = imported_names(imports)
    reseeds = plan.reseeded if "own_noise" in plan.helpers else set[str]()
    needed = ["os", "sys", *(["random"] if plan.has_same_seed or "random" in reseeds else []), "torch"]
    if any("contextlib." in edit.text for edit in plan.source.edits):
        needed.insert(0, "contextlib")
    needed += ["tempfile"] if "Silent" in plan.helpers else []
    lines = [f"import {name}" for name in needed if name not in bound]
    if ((plan.has_same_seed and _draws_from_numpy(plan)) or "numpy" in reseeds) and "np" not in bound:
        lines.append("import numpy as np")
    lines.append("import torch.distributed as dist" if plan.idiom is None else import_of(plan))
    return "\n".join([*lines, *(["from torch.distributed.fsdp import fully_shard"] if "shard" in plan.helpers else [])])


def _draws_from_numpy(plan: Plan) -> bool:
    """Whether numpy draws random numbers, also in another file, as for the splits of a cross validation."""
    return _may_draw_from_numpy(plan) or any(fact.details["library"] == "numpy" for fact in plan.of("draw"))


def imported_names(imports: list[ast.Import | ast.ImportFrom]) -> set[str]:
    """Return the names in plain imports: "np" of `import numpy as np`, "os.path" of `import os.path`."""
    return {alias.asname or alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)

"""Ranks the lines of a script to look at for a finding, most likely first.

A finding has the line where a mistake has an effect, for example `optimizer.step()`. The line to change is often an
earlier one, which constructs the wrapper, the sampler or the schedule, or divides by the number of ranks. This module
follows the data flow back from the line of a finding, and prefers lines whose actions fit the kind of finding.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from everyrank.audit.data_flow import SourceFile, Statement, called_name, read_source

__all__ = ["likely_lines"]

_MAX_LINES = 4  # more lines would hide the one that matters
_BASE_WEIGHT = 0.2  # of each line
_RECORDED_WEIGHT = 0.35  # of a line that was recorded with the finding
_DECAY = 0.9  # factor of a line's weight for each step between it and a finding
_UNREACHED_DISTANCE = 4.0  # in steps, of a line that the data flow does not reach
_AFTER_LOOP_DISTANCE = 1.0  # in steps, of a line that uses the results of the loop around the finding
_RECORDED_DISTANCE = 0.5  # in steps, of a line that was recorded with the finding
_MAX_STATEMENTS = 12  # of a function whose actions count for the lines that call it
_CALLEE_FACTOR = 0.85  # of the weight of actions in a called function
_UNREACHED_FACTOR = 0.7  # of the weight of a line that the data flow does not reach, in a function that is called
_MIN_SHARE = 0.25  # of the best weight; lines below are left out

_ABOUT_RANKS = re.compile(
    r"(?:^|_)(?:world|ranks?|replicas?|nprocs?|processes|ngpus?|gpus|mesh|group|fsdp|tp|dp|cp|shards?)(?:$|_)|world_?size|get_rank|local_rank",
    re.IGNORECASE,
)
_ACTION_NAMES: Mapping[str, re.Pattern[str]] = {
    "ranks": _ABOUT_RANKS,
    "collective": re.compile(
        r"^(?:all_?reduce|reduce|all_?gather\w*|gather\w*|reduce_scatter\w*|broadcast\w*|all_to_all\w*|scatter)_?$"
    ),
    "no-gradient": re.compile(r"^(?:detach_?|no_grad|item|tolist|numpy|to_local)$"),
    "local": re.compile(r"^(?:module|to_local|_orig_mod|full_tensor)$"),
    "mean": re.compile(
        r"^(?:mean|sum|nanmean|median|std|var|quantile|max|min|exp|reduction|average|div_?|numel|norm|nll_loss|cross_entropy|mse_loss|count\w*)$"
    ),
    "wrap": re.compile(
        r"^(?:DDP|DistributedDataParallel|FSDP|FullyShardedDataParallel|fully_shard|SyncBatchNorm|"
        r"convert_sync_batchnorm|parallelize_module|init_device_mesh|prepare|DataParallel|ignored_\w+|add_param_group|"
        r"register_comm_hook|find_unused_parameters|process_group|device_mesh)$"
    ),
    "sync": re.compile(
        r"^(?:no_sync|require_backward_grad_sync|set_requires_gradient_sync|set_is_last_backward|accumulate|sync\w*)$"
    ),
    "trainable": re.compile(r"^(?:requires_grad_?|requires_gradient|freeze|unfreeze)$"),
    "optimizer": re.compile(
        r"^(?:Adam\w*|SGD|RMSprop|Adagrad|Adafactor|Lion|\w*Optimizer|param_groups?|parameters|named_parameters)$"
    ),
    "groups": re.compile(r"^(?:ndim|endswith|startswith|weight_decay|shape|dim|isinstance)$"),
    "schedule": re.compile(
        r"^(?:\w*LR|\w*[Ss]chedul\w*|\w*warmup\w*|\w*_steps|total_\w*|T_max|max_steps|epochs|num_steps|ReduceLROnPlateau|\w*per_epoch)$"
    ),
    "sampler": re.compile(r"^\w*[Ss]ampler$"),
    "loader": re.compile(r"^(?:\w*[Ll]oader|DataLoader)$"),
    "split": re.compile(r"^(?:random_split|Subset|train_test_split|chunk|shard|split\w*|islice|indices)$"),
    "order": re.compile(r"^(?:shuffle\w*|randperm|permutation|sample|choices?|glob|listdir)$"),
    "epoch": re.compile(r"^set_epoch$"),
    "workers": re.compile(r"^(?:persistent_workers|num_workers|worker_init_fn|get_worker_info|worker_id|worker\w*)$"),
    "seed": re.compile(
        r"^(?:\w*[sS]eed\w*|SEED\w*|Generator|Random|RandomState|default_rng|\w*rng_state\w*|set_state|setstate)$"
    ),
    "clip": re.compile(r"^(?:clip\w*|unscale_|norm|max_norm|vector_norm|sqrt)$"),
    "mode": re.compile(r"^(?:eval|train)$"),
    "buffers": re.compile(r"^(?:broadcast_buffers|running_\w+|buffers|SyncBatchNorm)$"),
    "save": re.compile(r"^(?:save\w*|state_dict)$"),
    "load": re.compile(r"^(?:load|load_\w+|map_location)$"),
    "gradients": re.compile(r"^(?:grad|\w*gradients?|\w+_grads?|autograd)$"),
    "zero": re.compile(r"^zero_grad$"),
    "backward": re.compile(r"^backward$"),
    "step": re.compile(r"^step$"),
    "recompute": re.compile(r"^(?:checkpoint\w*|use_reentrant)$"),
}
"""The actions of a line, and the names that indicate them."""
_CALL_ACTIONS = {"collective", "order", "mode", "zero", "backward", "step"}  # only count if the name is called

_GRADIENT = {
    "collective": 0.8,
    "ranks": 0.7,
    "mean": 0.5,
    "divide": 0.5,
    "no-gradient": 0.4,
    "sync": 0.5,
    "clip": 0.4,
    "backward": 0.2,
    "loss": 0.45,
    "no-gradient-yet": 0.4,
    "remainder": 0.3,
}
_REPLICAS = {
    "wrap": 0.8,
    "trainable": 1.0,
    "sync": 1.0,
    "remainder": 0.4,
    "local": 0.6,
    "collective": 0.5,
    "ranks": 0.2,
    "clip": 0.2,
    "return": 0.1,
    "gradients": 0.5,
    "some-ranks": 1.2,
    "load": 0.8,
    "skip": 0.6,
    "no-gradient-yet": 0.6,
    "loss": 0.2,
}
_DATA = {
    "sampler": 0.8,
    "split": 0.8,
    "stride": 1.2,
    "order": 0.8,
    "loader": 0.4,
    "seed": 0.5,
    "ranks": 0.5,
    "workers": 0.5,
    "dataset": 0.4,
    "epoch": 0.3,
    "unseeded": 0.8,
}
_RESULT = {"return": 0.5, "divide": 0.6, "collective": 0.5, "mean": 0.3, "ranks": 0.2, "after-loop": 0.6}

_WEIGHTS_BY_RULE: Sequence[tuple[tuple[str, ...], float, Mapping[str, float]]] = (
    (("clip.",), 1.0, {"clip": 0.6, "collective": 0.4, "backward": 0.2, "ranks": 0.4}),
    (("gradient.local", "gradient.unsynced", "ranks.own-gradient"), 0.1, _REPLICAS),
    (("gradient.weights",), 0.1, {**_REPLICAS, "wrap": 0.6, "remainder": 0.9}),
    (
        ("gradient.carried", "gradient.thrown-away", "gradient.zero"),
        0.3,
        {"zero": 1.0, "backward": 0.4, "remainder": 0.7, "step": 0.3},
    ),
    (("replicas.unwrapped",), 1.5, {"local": 0.8}),
    (("schedule.differs",), 0.8, {"collective": 0.8, "return": 0.3, "mean": 0.3, "divide": 0.3}),
    (
        ("replicas.rate", "ranks.rate", "schedule."),
        0.2,
        {"schedule": 0.5, "ranks": 1.0, "divide": 0.4, "collective": 0.4},
    ),
    (("replicas.frozen",), 0.3, {"seed": 0.6, "constructed": 1.0, "load": 0.6}),
    (("replicas.buffers",), 0.4, {"state": 0.4, "buffers": 0.8, "mode": 0.6, "wrap": 0.6, "collective": 0.3}),
    (("replicas.", "weights.uninitialised"), 0.3, {**_REPLICAS, "seed": 0.5}),
    (("ranks.parameters",), 0.1, {"optimizer": 0.4, "groups": 0.8, "wrap": 0.2, "clip": 0.3}),
    (("weights.", "optimizer.", "precision."), 0.6, {"optimizer": 0.5, "groups": 0.7, "wrap": 0.2}),
    (("ranks.state", "average."), 0.2, {"state": 0.8, "mean": 0.5, "collective": 0.5, "divide": 0.2}),
    (("ranks.draws", "random."), 0.1, {"seed": 1.4, "workers": 0.6, "order": 0.2}),
    (("ranks.gradient",), 0.9, {**_GRADIENT, "backward": -0.5, "step": -0.5}),
    (("gradient.", "same.", "replay."), 0.4, _GRADIENT),
    (("eval.mode", "train.mode", "eval.dropout"), 0.6, {"mode": 0.6}),
    (("eval.padded", "eval.dropped"), 0.4, {**_DATA, "collective": 0.3}),
    (("eval.shard",), 0.1, _RESULT),
    (("ranks.input",), 0.4, {**_RESULT, "after-loop": 0.0, "no-gradient": 0.3}),
    (("ranks.printed", "eval.", "numbers."), 0.4, _RESULT),
    (("data.epoch",), 0.6, {"epoch": 2.0, "loop": 0.3, "sampler": 0.2}),
    (("data.frozen-workers",), 0.3, {"workers": 1.0, "loader": 0.2, "seed": 0.3}),
    (("data.untrained",), 0.3, {"skip": 1.0}),
    (("data.content", "data.split"), 0.3, {"order": 1.2, "split": 1.4, "seed": 0.6}),
    (("data.rows",), 0.3, {**_DATA, "seed": 1.2}),
    (("data.",), 0.4, _DATA),
    (("save.", "resume."), 0.6, {"save": 0.8, "load": 0.8, "return": 0.2}),
    (("recompute.",), 0.4, {"recompute": 1.0}),
    (("collective.", "run.hangs"), 1.0, {"collective": 0.4, "ranks": 0.4, "remainder": 0.2}),
)
"""(prefixes of rules, extra weight of the finding's own line, weights of actions). The first match counts."""


_DEFAULT_WEIGHTS = {"setting": 1.0}


def likely_lines(
    rule: str, location: str, recorded: Sequence[str] = (), variables: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return at most four lines, most likely first. The line of the finding is one of them.

    recorded   other lines that the audit has recorded with the finding
    variables  variables of the line to follow; () for all

    Example:
        likely_lines("ranks.rate", "train.py:50")  # ("train.py:42", "train.py:50")

    """
    lines = [line for line in dict.fromkeys((location, *recorded)) if line]
    rule_weights = next(
        ((line_weight, weights) for rules, line_weight, weights in _WEIGHTS_BY_RULE if rule.startswith(rules)), None
    )
    if not lines or rule_weights is None:
        return tuple(lines[:_MAX_LINES])
    scores: dict[str, float] = defaultdict(float)
    for number, line in enumerate(lines):
        path, _, digits = line.rpartition(":")
        source = read_source(path)
        scores[line] = max(scores[line], _RECORDED_WEIGHT * _DECAY ** max(0, number - 1))
        if source is None or not digits.isdigit():
            continue
        extra_distance = 0.0 if line == location else _RECORDED_DISTANCE + 0.1 * number
        for candidate, score in _scores(
            source, int(digits), extra_distance, *rule_weights, variables if line == location else ()
        ).items():
            candidate_line = f"{path}:{candidate}"
            scores[candidate_line] = max(scores[candidate_line], score)
    ranked = sorted(scores, key=lambda line: -scores[line])
    shown = [line for line in ranked if scores[line] >= _MIN_SHARE * scores[ranked[0]]][:_MAX_LINES]
    if location and location not in shown:
        shown = [*shown[: _MAX_LINES - 1], location]
    return tuple(shown)


def _scores(
    source: SourceFile,
    line: int,
    extra_distance: float,
    line_weight: float,
    weights: Mapping[str, float],
    variables: Sequence[str],
) -> dict[int, float]:
    """Return the weight of each line of a file."""
    distances = source.leading_to(line, variables)
    function = next((each.function for each in distances if distances[each] == 0), None)
    scores: dict[int, float] = {}
    for statement in source.statements:
        if isinstance(
            statement.node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
        ):
            continue
        if _is_routine(statement.node):
            continue
        actions = _actions(source, statement)
        is_after_loop = (
            "after-loop" in weights and statement.function is function and source.uses_results_of_loop(statement)
        )
        distance = (
            distances.get(statement, _AFTER_LOOP_DISTANCE if is_after_loop else _UNREACHED_DISTANCE) + extra_distance
        )
        for number in {statement.line, *actions}:
            line_actions = actions.get(number, {})
            weights_of_actions = [
                weights.get(name, _DEFAULT_WEIGHTS.get(name, 0.0)) * share for name, share in line_actions.items()
            ]
            weight = sum(sorted(weights_of_actions, reverse=True)[:3]) + min([0.0, *weights_of_actions])
            if number != line and statement not in distances:
                if weight < 0.5:
                    continue
                weight *= _UNREACHED_FACTOR if source.is_called(statement.function) else 1.0
            if number == line:
                weight += _RECORDED_WEIGHT if extra_distance else line_weight
            weight += _BASE_WEIGHT * (number == statement.line)
            scores[number] = max(scores.get(number, 0.0), weight * _DECAY**distance)
    return scores


_ROUTINE = {"print", "init_process_group", "destroy_process_group", "init_distributed", "barrier", "set_num_threads"}


def _is_routine(node: ast.stmt) -> bool:
    """Whether a statement only prints, reads the rank, or opens and closes process groups."""
    if isinstance(node, ast.If) and not node.orelse:
        return all(_is_routine(inner) for inner in node.body)
    names = {called_name(inner) for inner in ast.walk(node) if isinstance(inner, ast.Call)}
    if isinstance(node, ast.Assign):
        is_plain = isinstance(node.value, ast.Call | ast.Tuple)
        return is_plain and bool(names) and names <= {"get_rank", "get_world_size", "len"}
    return isinstance(node, ast.Expr) and bool(names & _ROUTINE)


@functools.cache
def _actions(source: SourceFile, statement: Statement) -> dict[int, dict[str, float]]:
    """Return line -> action -> weight: 1 for actions of the statement, less for those of functions that it calls."""
    actions: dict[int, dict[str, float]] = defaultdict(dict)
    for line, action in _direct_actions(statement):
        actions[line][action] = 1.0
    if any(called_name(call) in source.classes for call in statement.calls):
        actions[statement.line]["constructed"] = 1.0
    if source.is_loss(statement):
        actions[statement.line]["loss"] = 1.0
    for line in _lines_for_some_ranks(source, statement.node):
        actions[line]["some-ranks"] = 1.0
    if source.uses_results_of_loop(statement) and "collective" not in actions[statement.line]:
        actions[statement.line]["after-loop"] = 1.0
    for function in source.called_by(statement):
        for inner in source.body_of(function) if len(source.body_of(function)) <= _MAX_STATEMENTS else ():
            for _, action in _direct_actions(inner):
                if action in ("collective", "trainable", "seed", "mode", "no-gradient", "epoch", "clip"):
                    actions[statement.line].setdefault(action, _CALLEE_FACTOR)
    return actions


def _direct_actions(statement: Statement) -> Iterator[tuple[int, str]]:
    """Yield (line, action) for each action of a statement."""
    called = {call.func for call in statement.calls}
    for node in statement.nodes:
        line = getattr(node, "lineno", statement.line)
        for name in _names_in(node):
            for action, pattern in _ACTION_NAMES.items():
                if pattern.search(name) and (action not in _CALL_ACTIONS or node in called):
                    yield line, action
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            yield line, _OPERATORS[type(node.op)]
        if isinstance(node, ast.Slice) and node.step is not None:
            yield line, "stride"
        if isinstance(node, ast.Compare) and _checks_gradient(node):
            yield line, "no-gradient-yet"
        if isinstance(node, ast.Call) and _is_unseeded(node):
            yield line, "unseeded"
    for action in _statement_actions(statement):
        yield statement.line, action


_OPERATORS: Mapping[type, str] = {ast.Div: "divide", ast.FloorDiv: "divide", ast.Mod: "remainder"}


def _statement_actions(statement: Statement) -> Iterator[str]:
    """Yield the actions that follow from the kind of statement, such as "return"."""
    node = statement.node
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
        yield "divide"
    if isinstance(node, ast.Return):
        yield "return"
    if isinstance(node, ast.For):
        yield "loop"
    if isinstance(node, ast.Continue) or (
        isinstance(node, ast.If) and any(isinstance(each, ast.Continue) for each in node.body)
    ):
        yield "skip"
    if getattr(statement.function, "name", "") in ("__iter__", "__next__", "__getitem__"):
        yield "dataset"
    if _writes_state(statement):
        yield "state"
    if _is_setting(statement):
        yield "setting"


def _checks_gradient(node: ast.Compare) -> bool:
    """Whether a comparison is `p.grad is None` or `p.grad is not None`."""
    return (
        isinstance(node.left, ast.Attribute)
        and node.left.attr == "grad"
        and any(isinstance(each, ast.Constant) and each.value is None for each in node.comparators)
    )


_GENERATORS = {"Random", "default_rng", "RandomState"}
_GLOBAL_DRAWS = {"shuffle", "permutation", "choice", "choices", "sample", "randint"}


def _is_unseeded(call: ast.Call) -> bool:
    """Whether a call constructs a generator without a seed, or uses the global generator of `random` or `numpy`."""
    name = called_name(call)
    if name in _GENERATORS:
        return not call.args and not call.keywords
    module = call.func.value if isinstance(call.func, ast.Attribute) else None
    is_module = isinstance(module, ast.Name | ast.Attribute) and ast.unparse(module) in ("random", "np.random")
    return name in _GLOBAL_DRAWS and is_module


def _is_setting(statement: Statement) -> bool:
    """Whether a statement defines an option or a field of a configuration whose name is about ranks."""
    is_option = any(isinstance(c.func, ast.Attribute) and c.func.attr == "add_argument" for c in statement.calls)
    is_field = statement.function is None and bool(statement.class_name) and isinstance(statement.node, ast.AnnAssign)
    names = (name for each in statement.nodes for name in _names_in(each))
    # a rank is not a setting: the launcher sets it, or the name means something else
    return (is_option or is_field) and any(
        _ABOUT_RANKS.search(name) and not name.lower().endswith("rank") for name in names
    )


def _lines_for_some_ranks(source: SourceFile, node: ast.stmt) -> list[int]:
    """The line of a condition on the rank and the lines in it that load or change something; [] if none does."""
    if not isinstance(node, ast.If):
        return []
    if not any(_ABOUT_RANKS.search(name) for inner in ast.walk(node.test) for name in _names_in(inner)):
        return []
    changes = [inner.lineno for inner in node.body if _changes_training(source, inner)]
    return [node.lineno, *changes] if changes else []


def _changes_training(source: SourceFile, node: ast.stmt) -> bool:
    """Whether a statement loads, steps, clips or freezes something, or calls a function that writes tensors."""
    called = {called_name(each) for each in ast.walk(node) if isinstance(each, ast.Call)}
    if any(_ACTION_NAMES[action].search(name) for name in called for action in ("load", "step", "clip", "trainable")):
        return True
    functions = [function for name in called for function in source.functions.get(name, [])]
    return any(_writes_tensors(inner) for function in functions for inner in source.body_of(function))


def _writes_tensors(statement: Statement) -> bool:
    """Whether a statement copies values into tensors, or sets their `data`."""
    return any(called_name(call) in ("copy_", "swap_tensors", "load_state_dict") for call in statement.calls) or any(
        isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and each.attr == "data"
        for each in statement.nodes
    )


def _names_in(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.keyword) and node.arg:
        yield node.arg
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        name = node.value.lstrip("-").replace("-", "_")  # also the name of an option
        if name.isidentifier():
            yield name


def _writes_state(statement: Statement) -> bool:
    """Whether a method other than a constructor writes an attribute of its object, or a tensor in place."""
    if getattr(statement.function, "name", "") == "__init__":
        return False
    stores = any(
        isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and each.attr != "grad"
        for each in statement.nodes
    )
    in_place = any(
        isinstance(call.func, ast.Attribute)
        and call.func.attr.endswith("_")
        and not call.func.attr.startswith(("requires_grad", "zero_", "unscale", "clip"))
        for call in statement.calls
    )
    return stores or in_place

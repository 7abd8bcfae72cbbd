"""Plan: the script, the facts of its run, the tried choice, and the state that the edits share."""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Sequence

from everyrank.port.facts import Fact
from everyrank.port.files import ScriptFiles
from everyrank.port.idioms import IDIOMS, in_idiom
from everyrank.port.source import NotPortedError, ScriptSource

__all__ = ["Choice", "Plan"]


@dataclasses.dataclass(frozen=True)
class Choice:
    """Decisions that cannot be read from the source; the check tries them.

    loss        "mean" or "sum": how the loss depends on the samples of a batch
    evaluation  "split" over the ranks, or "whole": every rank evaluates everything
    target      "ddp", "fsdp", or a library: "accelerate" or "fabric"
    sampler     "batches": each batch is split over the ranks; "torch": DistributedSampler, with another order
    """

    loss: str
    evaluation: str
    sampler: str = "batches"
    target: str = "ddp"


class Plan:
    """The source with its edits, and the state that the edits share.

    helpers       names of the helper functions that are added to the port
    notes         work that is left to the user: (line, sentence)
    has_batch_norm, finds_unused   properties of the wrapped models
    has_wandb     whether Weights & Biases is used, which only rank 0 may log to
    has_same_seed  whether all ranks set one seed before random numbers are drawn
    reseeded       "random" and "numpy" if the dataset draws from them: each rank has its own seed in training
    training_uses  nodes with the name of a model in training forwards, and in calls that pass it to one
    sharded        nodes with the names of the models that FSDP shards
    passed_models  functions with a model as parameter: scope, name, span of the call
    idiom         how the port calls its library; None for torch.distributed
    prepared      models that a library wraps: scope, name, the statement after which they are ready
    """

    def __init__(self, files: ScriptFiles, facts: Sequence[Fact], choice: Choice) -> None:
        self.files, self.facts, self.choice = files, facts, choice
        self.source = ScriptSource(files.whole)
        self.helpers = {"setup"}
        self.notes: list[tuple[int, str]] = []
        self.has_batch_norm = False
        self.has_wandb = False
        self.finds_unused = any(fact.details["unused"] for fact in self.of("step"))
        self.has_same_seed = False
        self.reseeded: set[str] = set()
        self.training_uses: list[ast.expr] = []
        self.sharded: list[ast.expr] = []
        self.cuts: set[str] = set()  # batches without a name, which each rank takes its part of: `data[i : i + 32]`
        self.passed_models: list[tuple[ast.FunctionDef, str, tuple[int, int, int, int]]] = []
        self.idiom = IDIOMS.get(choice.target)
        self.prepared: list[tuple[ast.AST, str, ast.stmt]] = []
        self._seen: set[tuple[ast.AST, str]] = set()

    def code_of_part(self, node: ast.expr) -> str:
        """Return the text of an expression in which each rank has its part of the batch."""
        text = self.source.code(node)
        for cut in self.cuts:
            text = text.replace(cut, f"part({cut})")
        return text

    def of(self, kind: str) -> list[Fact]:
        """Return the facts of a kind, in the order of the run."""
        return [fact for fact in self.facts if fact.kind == kind]

    def once(self, node: ast.AST, purpose: str = "") -> bool:
        """Whether this is the first call with this node and purpose."""
        key = (node, purpose)
        is_first = key not in self._seen
        self._seen.add(key)
        return is_first

    @property
    def training_loaders(self) -> set[int]:
        """The ids of the loaders whose batches led to a backward."""
        return {fact.details["loader"] for fact in self.of("backward")} - {0}

    @property
    def training_forwards(self) -> list[Fact]:
        """Calls of modules whose outputs a backward reached. Raises `NotPortedError` if there are none."""
        forwards = [fact for fact in self.of("forward") if fact.details["reached"]]
        if not forwards:
            raise NotPortedError(
                self.of("backward")[0].line,
                "no call of a module led to this backward: DistributedDataParallel needs model(x), no other method. "
                "Call the model itself, and let forward choose",
            )
        return forwards

    def batch_names(self, loop: ast.For) -> list[str]:
        """Return the loop variables for the parts of a batch, without a counter."""
        target, iterated = loop.target, loop.iter
        while isinstance(iterated, ast.Call) and iterated.args:  # tqdm(enumerate(loader))
            if self.source.code(iterated.func) == "enumerate" and isinstance(target, ast.Tuple):
                target = target.elts[-1]
                break
            iterated = iterated.args[0]
        return [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]

    @functools.cached_property
    def data_names(self) -> list[str]:
        """The names of the arguments of training forwards and their losses."""
        names: list[str] = []
        modules = {
            (alias.asname or alias.name).partition(".")[0]
            for node in ast.walk(self.source.tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        for fact in [*self.training_forwards, *(loss for loss in self.of("loss") if loss.is_inner)]:
            call = self.source.at(fact.span)
            for node in getattr(call, "args", []):
                while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):  # inputs.to(device)
                    node = node.func.value
                if isinstance(node, ast.Name) and node.id not in [*names, *modules]:
                    names.append(node.id)
        return names

    def is_data(self, statement: ast.stmt) -> bool:
        """Whether a statement assigns data: it calls no model, no loss and no class."""
        if not isinstance(statement, ast.Assign):
            return False
        unpacks = isinstance(statement.targets[0], ast.Tuple) and isinstance(statement.value, ast.Name)  # x, y = batch
        if not unpacks and not isinstance(statement.value, ast.Call | ast.Subscript | ast.Tuple | ast.BinOp):
            return False
        calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
        spans = {fact.span[:2] for kind in ("forward", "loss", "optimizer") for fact in self.of(kind)}
        makes_object = any(self.source.code(call.func).rpartition(".")[2][:1].isupper() for call in calls)
        return not makes_object and not any((call.lineno, call.col_offset) in spans for call in calls)

    @functools.cached_property
    def object_name(self) -> str:
        """A name for the library's object that the script does not use."""
        used = {getattr(node, "id", getattr(node, "arg", "")) for node in ast.walk(self.source.tree)}
        name = self.idiom.object if self.idiom is not None else ""
        return f"{name}_" if name in used else name

    def in_idiom(self, text: str) -> str:
        """Return a text with the calls of torch.distributed replaced by those of the port's library."""
        return text if self.idiom is None else in_idiom(text, self.idiom, self.object_name)

    def unwrapped(self, name: str) -> str:
        """Return the expression for the model in the wrapper of this name."""
        if self.idiom is None:
            return f"{name}.module"
        return self.idiom.unwrapped.replace("{x}", self.object_name).replace("{model}", name)

    def split_loader(self, call: ast.AST, reason: str, evaluates: bool = False) -> None:
        """Let each rank read its part of the batches of the loader that a call creates."""
        self.helpers.add("split")
        before, after = "split(", ", evaluates=True)" if evaluates else ")"
        if self.choice.target == "fabric":
            before = f"{self.object_name}.setup_dataloaders({before}"
            after = f"{after}, use_distributed_sampler=False)"
        self.source.wrap(call, before, after, reason)

    def custom_sampler(self, loader: Fact) -> str:
        """Return the name of the sampler of a loader that chooses among its samples; "" if it reads all of them."""
        call = self.source.at(loader.span)
        if any(keyword.arg == "batch_sampler" for keyword in getattr(call, "keywords", [])):
            return "batch_sampler"
        name = loader.details.get("sampler", "")
        return "" if name in ("RandomSampler", "SequentialSampler") else name

    def wrapper_of(self, model: ast.expr) -> str:
        """Return the name of the wrapper of a model that training forwards call."""
        name = self.source.code(model)
        if model in self.training_uses:  # in a function whose parameter is the wrapper
            return name
        owner, _, attribute = name.rpartition(".")
        return f"{owner}.ddp_{attribute}" if owner else f"ddp_{attribute}"

    def note(self, line: int, sentence: str) -> None:
        """Add a note about work that is left to the user."""
        if (line, sentence) not in self.notes:
            self.notes.append((line, sentence))

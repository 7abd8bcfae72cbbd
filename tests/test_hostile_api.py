"""Unusual and invalid arguments of the Python API: changed workloads, strings for paths and layouts, wrong types."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from everyrank import BenchOptions, Launch, Layout, Workload, api, bench, find_workload, run, verify
from everyrank.errors import EveryrankError, UsageError, WorkloadError
from everyrank.launch.torchrun import TorchrunOptions
from everyrank.workload import Source, load
from processes import Cli

DIGITS = Source("digits")
NAN = float("nan")
WORKLOAD = '''\
"""A small workload that a test changes with dataclasses.replace."""
import torch
from torch import nn
from torch.utils.data import TensorDataset

from everyrank import Workload


def random(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def squared_error(output, target):
    return ((output - target) ** 2).sum(), target.numel()


workload = Workload(
    name="mine",
    model=lambda: nn.Linear(3, 2),
    train_data=lambda: TensorDataset(random(0, 16, 3), random(1, 16, 2)),
    eval_data=lambda: TensorDataset(random(2, 8, 3), random(3, 8, 2)),
    loss=squared_error,
    metrics={"error": squared_error},
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    global_batch=4,
    steps=3,
)
'''


# --- a workload changed with dataclasses.replace: the ranks run the changed workload


def raise_zero_division(*_: object) -> Any:
    raise ZeroDivisionError("the replaced function was called")


CHANGES: dict[str, Any] = {
    "name": "changed",
    "model": lambda: nn.Linear(3, 2, bias=False),
    "train_data": lambda: TensorDataset(torch.zeros(8, 3), torch.zeros(8, 2)),
    "loss": lambda output, target: ((output - target).abs().sum(), target.numel()),
    "optimizer": lambda model: torch.optim.Adam(model.parameters()),
    "global_batch": 8,
    "eval_data": lambda: TensorDataset(torch.zeros(4, 3), torch.zeros(4, 2)),
    "collate": lambda samples: (torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])),
    "metrics": {"zero": lambda output, target: (output.sum() * 0, len(target))},
    "derived": {"twice": lambda means: 2 * means["eval_loss"]},
    "predict": lambda output: output.argmax(1),
    "schedule": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
    "on_epoch": lambda epoch, metrics, predict: None,
    "steps": 2,
    "drop_last": True,
    "eval_batch": 2,
    "order": "shard",
    "weights": lambda: [1.0] * 16,
    "seed": 7,
    "dropout": "torch",
    "ema_decay": 0.5,
    "clip_norm": 0.25,
    "blocks": "layers",
    "tensor_plan": {"weight": "colwise"},
    "experts": "layers.*.experts",
    "sequence_dim": 1,
    "num_devices": 2,
}


@pytest.fixture
def file_workload(tmp_path: Path) -> Iterator[Workload]:
    """The workload in hostile_workload.py, found with `find_workload`."""
    (tmp_path / "hostile_workload.py").write_text(WORKLOAD, encoding="utf-8")
    previous_path = list(sys.path)
    yield find_workload(str(tmp_path / "hostile_workload.py"))
    sys.path[:] = previous_path
    for name in [name for name in sys.modules if "hostile_workload" in name]:
        del sys.modules[name]


class RunRanksCall(NamedTuple):
    """The arguments of `run_ranks`: the launch, the function, and the arguments of the function."""

    launch: Launch
    function: str
    workload: Any
    layout: Any
    rank_launch: Launch
    options: Any


@pytest.fixture
def run_ranks_calls(monkeypatch: pytest.MonkeyPatch) -> list[RunRanksCall]:
    """Record the arguments of each call of `run_ranks`, and start no rank."""
    calls: list[RunRanksCall] = []

    def start_nothing(*arguments: Any, **_: Any) -> Mapping[int, Any]:
        calls.append(RunRanksCall(*arguments))
        return {}

    monkeypatch.setattr(api, "run_ranks", start_nothing)
    return calls


def workload_in_rank(run_ranks_calls: list[RunRanksCall]) -> Workload:
    """Return the workload of the last call as a rank loads it, after pickling."""
    return load(cloudpickle.loads(cloudpickle.dumps(run_ranks_calls[-1].workload)))


def code_of(value: Any) -> Any:
    """Replace functions by their bytecode, which is equal before and after pickling. Return other values unchanged."""
    if isinstance(value, Mapping):
        return {name: code_of(item) for name, item in value.items()}
    return (value.__code__.co_code, value.__code__.co_names) if hasattr(value, "__code__") else value


@pytest.mark.parametrize("field", CHANGES)
@pytest.mark.parametrize("call", ["run", "verify", "bench"])
def test_replaced_field_reaches_the_ranks(
    call: str, field: str, file_workload: Workload, run_ranks_calls: list[RunRanksCall]
) -> None:
    changed = dataclasses.replace(file_workload, **{field: CHANGES[field]})
    if call == "run":
        run(changed, Layout("single"), Launch(), show=False)
    else:
        {"verify": verify, "bench": bench}[call](changed, [Layout("ddp")], Launch(), show=False)
    assert code_of(getattr(workload_in_rank(run_ranks_calls), field)) == code_of(CHANGES[field])


def test_changes_cover_all_fields_that_users_set() -> None:
    """Three fields are missing: `epochs` excludes `steps`, and users do not set `batch_rule` and `source`."""
    names = {field.name for field in dataclasses.fields(Workload)}
    assert names - set(CHANGES) == {"epochs", "batch_rule", "source"}


def test_replaced_fields_of_a_built_in_workload_reach_the_ranks(run_ranks_calls: list[RunRanksCall]) -> None:
    changed = dataclasses.replace(find_workload("digits"), global_batch=32, epochs=1)
    run(changed, Layout("single"), Launch(), show=False)
    workload = workload_in_rank(run_ranks_calls)
    assert (workload.global_batch, workload.epochs) == (32, 1)


def test_replacing_a_field_keeps_the_settings(run_ranks_calls: list[RunRanksCall]) -> None:
    changed = dataclasses.replace(find_workload("digits", lr=0.25, seed=3), clip_norm=1.0)
    run(changed, Layout("single"), Launch(), show=False)
    workload = workload_in_rank(run_ranks_calls)
    assert (workload.clip_norm, workload.seed) == (1.0, 3)
    assert workload.optimizer(nn.Linear(2, 2)).param_groups[0]["lr"] == 0.25


def test_fields_replaced_in_two_calls_reach_the_ranks(
    file_workload: Workload, run_ranks_calls: list[RunRanksCall]
) -> None:
    changed = dataclasses.replace(dataclasses.replace(file_workload, seed=5), clip_norm=0.5)
    run(changed, Layout("single"), Launch(), show=False)
    assert (workload_in_rank(run_ranks_calls).seed, workload_in_rank(run_ranks_calls).clip_norm) == (5, 0.5)


def test_unchanged_workload_reaches_the_ranks(file_workload: Workload, run_ranks_calls: list[RunRanksCall]) -> None:
    for workload in (file_workload, dataclasses.replace(file_workload), find_workload("digits", epochs=2)):
        run(workload, Layout("single"), Launch(), show=False)
        assert workload_in_rank(run_ranks_calls).name == workload.name
        assert workload_in_rank(run_ranks_calls).epochs == workload.epochs


@pytest.mark.usefixtures("python")
@pytest.mark.parametrize("field", ["loss", "model", "train_data", "optimizer"])
def test_rank_calls_the_replaced_function(field: str, file_workload: Workload) -> None:
    """A real rank fails in the replaced function. The original function would train without an error."""
    changed = dataclasses.replace(file_workload, **{field: raise_zero_division})
    with pytest.raises(EveryrankError, match="the replaced function was called"):
        run(changed, Layout("single"), Launch(device="cpu"), steps=1, show=False)


@pytest.mark.usefixtures("python")
def test_verify_runs_the_replaced_loss(file_workload: Workload) -> None:
    """verify fails in the replaced loss, and does not report `equal` for the original loss."""
    changed = dataclasses.replace(file_workload, loss=raise_zero_division)
    with pytest.raises(EveryrankError, match="the replaced function was called"):
        verify(changed, [Layout("single")], Launch(device="cpu"), quick=True, show=False)


@pytest.mark.usefixtures("python")
def test_record_describes_the_changed_workload(file_workload: Workload) -> None:
    """The Record has the changed name, the changed number of updates, and different losses."""
    layout_and_launch = Layout("single"), Launch(device="cpu")
    (original_record,) = run(file_workload, *layout_and_launch, show=False)
    changed = dataclasses.replace(file_workload, name="changed", steps=2, seed=11)
    (changed_record,) = run(changed, *layout_and_launch, show=False)
    assert (original_record.workload, len(original_record.loss)) == ("mine", 3)
    assert (changed_record.workload, len(changed_record.loss)) == ("changed", 2)
    assert changed_record.loss[0] != original_record.loss[0]


# --- strings for paths and layouts


@pytest.mark.parametrize("name", ["out", "pretrained", "profile"])
def test_path_may_be_a_string(name: str, run_ranks_calls: list[RunRanksCall], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    run(DIGITS, Layout("single"), Launch(), show=False, **{name: "folder/x"})
    assert getattr(run_ranks_calls[0].options, name) == tmp_path / "folder" / "x"


def test_resume_path_may_be_a_string(tmp_path: Path) -> None:
    """The error is that the checkpoint does not exist, not an AttributeError."""
    with pytest.raises(UsageError, match="absent"):
        run(DIGITS, Layout("single"), Launch(), resume=str(tmp_path / "absent"), show=False)


def test_logs_may_be_a_string(tmp_path: Path, run_ranks_calls: list[RunRanksCall]) -> None:
    assert Launch(logs=str(tmp_path)).logs == tmp_path  # pyright: ignore[reportArgumentType]


def test_layouts_may_be_strings(run_ranks_calls: list[RunRanksCall]) -> None:
    verify(DIGITS, ["ddp", "fsdp:shard=2"], Launch(processes=2), show=False)  # pyright: ignore[reportArgumentType]
    bench(DIGITS, ["ddp"], Launch(processes=2), show=False)  # pyright: ignore[reportArgumentType]
    run(DIGITS, "ddp:accumulate=2", Launch(processes=2), show=False)  # pyright: ignore[reportArgumentType]
    assert list(run_ranks_calls[0].layout) == [Layout("ddp"), Layout("fsdp", {"shard": 2})]
    assert list(run_ranks_calls[1].layout) == [Layout("ddp")]
    assert run_ranks_calls[2].layout == Layout("ddp", accumulate=2)


def test_misspelled_layout_string_is_named(run_ranks_calls: list[RunRanksCall]) -> None:
    with pytest.raises(EveryrankError, match="dpp"):
        verify(DIGITS, ["dpp"], Launch(processes=2), show=False)  # pyright: ignore[reportArgumentType]
    assert run_ranks_calls == []


def is_accepted(call: Callable[[], object], value: str) -> bool:
    """Return whether the call raised no error. An error must be an EveryrankError that names the value."""
    usage_error: EveryrankError | None = None
    try:
        call()
    except EveryrankError as error:
        usage_error = error
    assert usage_error is None or (value in str(usage_error) and usage_error.exit_status == 2)
    return usage_error is None


def test_string_instead_of_a_list_of_layouts(run_ranks_calls: list[RunRanksCall]) -> None:
    """The string is one layout, or an error names it. Its letters are not taken as layouts."""
    if is_accepted(lambda: verify(DIGITS, "ddp", Launch(processes=2), show=False), "ddp"):  # pyright: ignore
        assert list(run_ranks_calls[0].layout) == [Layout("ddp")]


def test_string_instead_of_a_launch(run_ranks_calls: list[RunRanksCall]) -> None:
    """The string is the name of the launcher, or an error names it."""
    if is_accepted(lambda: run(DIGITS, Layout("single"), "spawn", show=False), "spawn"):  # pyright: ignore
        assert run_ranks_calls[0].launch == Launch("spawn")


@pytest.mark.parametrize("value", [3, True, ["a"]])
def test_logs_of_the_wrong_type_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match="logs"):
        Launch(logs=value)


@pytest.mark.parametrize("value", [3, ["a"]])
@pytest.mark.parametrize("name", ["out", "pretrained"])
def test_path_of_the_wrong_type_is_refused(name: str, value: Any, run_ranks_calls: list[RunRanksCall]) -> None:
    with pytest.raises(UsageError, match=name):
        run(DIGITS, Layout("single"), Launch(), show=False, **{name: value})
    assert run_ranks_calls == []


@pytest.mark.parametrize("value", [None, 3, "", object()])
def test_layout_of_the_wrong_type_is_refused(value: Any, run_ranks_calls: list[RunRanksCall]) -> None:
    with pytest.raises(EveryrankError):
        verify(DIGITS, [value], Launch(), show=False)
    assert run_ranks_calls == []


def test_launch_is_optional(run_ranks_calls: list[RunRanksCall]) -> None:
    run(DIGITS, Layout("single"), show=False)  # pyright: ignore[reportCallIssue]
    verify(DIGITS, [Layout("ddp")], show=False)  # pyright: ignore[reportCallIssue]
    bench(DIGITS, [Layout("ddp")], show=False)  # pyright: ignore[reportCallIssue]
    assert run_ranks_calls[0].launch == Launch()
    assert all(isinstance(call.launch, Launch) for call in run_ranks_calls)


@pytest.mark.parametrize("path", ["x" * 100_000 + ".py", "/".join(["x" * 200] * 500) + ".py", "a\0b.py"])
def test_find_workload_refuses_an_impossible_path(path: str) -> None:
    """No file system has such a path: it is too long, or has a null character."""
    with pytest.raises(UsageError) as caught:
        find_workload(path)
    assert "workload" in str(caught.value)


def test_command_line_refuses_an_impossible_path(cli: Cli, tmp_path: Path) -> None:
    result = cli(tmp_path, "train", "x" * 100_000 + ".py")
    assert result.status == 2
    assert len(result.err.splitlines()) == 1
    assert len(result.err) < 2000


# --- values of the wrong type or out of range


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loader_workers", NAN),
        ("loader_workers", 1.5),
        ("loader_workers", True),
        ("loader_workers", "2"),
        ("processes", True),
        ("processes", 2.0),
        ("processes", NAN),
        ("processes", "2"),
        ("processes", None),
        ("nodes", True),
        ("nodes", 1.0),
        ("timeout_seconds", "x"),
        ("timeout_seconds", NAN),
        ("start_timeout_seconds", "x"),
        ("node_rank", "0"),
    ],
)
def test_invalid_number_in_a_launch_is_refused(name: str, value: Any) -> None:
    """The message has the value and its name, either the flag or the Python argument."""
    with pytest.raises(UsageError) as caught:
        Launch(**{name: value})
    flags = {"loader_workers": "workers", "timeout_seconds": "timeout", "start_timeout_seconds": "start-timeout"}
    message = str(caught.value)
    assert name in message or flags.get(name, name).replace("_", "-") in message
    assert str(value) in message


@pytest.mark.parametrize("value", ["--x", [1], (1,), b"--x", 3])
def test_launcher_arguments_that_are_not_a_list_of_strings_are_refused(value: Any) -> None:
    """For example, a string would be split into its letters."""
    with pytest.raises(UsageError) as caught:
        Launch("torchrun", arguments=value)
    assert "arguments" in str(caught.value) or "--launcher-args" in str(caught.value)


def test_launcher_arguments_may_be_a_tuple_or_a_list() -> None:
    assert Launch("torchrun", arguments=("--x", "1")).arguments == ("--x", "1")
    assert list(Launch("torchrun", arguments=["--x"]).arguments) == ["--x"]  # pyright: ignore[reportArgumentType]
    assert Launch("torchrun").options == TorchrunOptions()


def workload_with(**fields: Any) -> Workload:
    """Return a valid workload with some fields replaced."""
    valid_fields = {
        "name": "mine",
        "model": lambda: nn.Linear(3, 2),
        "train_data": lambda: TensorDataset(torch.ones(8, 3), torch.ones(8, 2)),
        "loss": lambda output, target: ((output - target).square().sum(), target.numel()),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        "global_batch": 4,
    }
    return Workload(**{**valid_fields, **fields})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tensor_plan", [1]),
        ("tensor_plan", "colwise"),
        ("tensor_plan", {1: "colwise"}),
        ("tensor_plan", {"weight": 3}),
        ("name", "../../x"),
        ("name", "/etc/x"),
        ("name", 3),
        ("derived", [1]),
        ("blocks", 3),
        ("experts", 3),
        ("sequence_dim", "1"),
        ("clip_norm", NAN),
        ("clip_norm", True),
        ("seed", True),
    ],
)
def test_invalid_field_of_a_workload_is_refused(name: str, value: Any) -> None:
    with pytest.raises(WorkloadError, match=name):
        workload_with(**{name: value})


@pytest.mark.parametrize("name", ["my model", "llama-3.1", "größe", "text_124m", "a+b", "v1.0 (test)"])
def test_valid_workload_names(name: str) -> None:
    assert workload_with(name=name).name == name


@pytest.fixture
def no_rank_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The test fails if a call starts ranks."""

    def start(*_: object, **__: object) -> None:
        raise AssertionError("ranks were started for a call that is wrong")

    monkeypatch.setattr(api, "run_ranks", start)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.usefixtures("no_rank_starts")
@pytest.mark.parametrize("call", [verify, bench])
def test_empty_list_of_layouts_is_refused(call: Callable[..., object]) -> None:
    with pytest.raises(UsageError, match="layout"):
        call(DIGITS, [], Launch(), show=False)


@pytest.mark.usefixtures("no_rank_starts")
@pytest.mark.parametrize("layouts", [None, 3])
@pytest.mark.parametrize("call", [verify, bench])
def test_layouts_that_are_no_list_are_refused(call: Callable[..., object], layouts: Any) -> None:
    with pytest.raises(UsageError, match=f"layouts={layouts}: give one or more"):
        call(DIGITS, layouts, Launch(), show=False)


@pytest.mark.usefixtures("no_rank_starts")
@pytest.mark.parametrize(
    ("call", "options"),
    [
        ("verify", {"steps": NAN}),
        ("verify", {"steps": 1.5}),
        ("verify", {"steps": "3"}),
        ("verify", {"steps": True}),
        ("verify", {"quick": "yes"}),
        ("bench", {"trials": "x"}),
        ("bench", {"trials": NAN}),
        ("bench", {"trials": 2.5}),
        ("bench", {"trials": None}),
        ("run", {"steps": NAN}),
        ("run", {"epochs": "3"}),
        ("run", {"epochs": 1.5}),
        ("run", {"keep": NAN}),
        ("run", {"save_every": 1.5}),
        ("run", {"evaluate_every": NAN}),
        ("run", {"mtbf": "x"}),
        ("run", {"evaluate": "no"}),
        ("run", {"out": ""}),
        ("run", {"resume": ""}),
        ("run", {"options": BenchOptions()}),
        ("verify", {"options": {"steps": 3}}),
        ("bench", {"verify_steps": 0}),
        ("bench", {"batch_factor": 0}),
    ],
)
def test_option_of_the_wrong_type_is_refused(call: str, options: dict[str, Any]) -> None:
    """The error names the option, and is raised before ranks start."""
    [(name, value)] = options.items()
    function: Any = {"run": run, "verify": verify, "bench": bench}[call]
    layouts = Layout("single") if call == "run" else [Layout("ddp")]
    with pytest.raises(UsageError) as caught:
        function(DIGITS, layouts, Launch(), show=False, **options)
    assert f"--{name.replace('_', '-')}" in str(caught.value) or name in str(caught.value)
    assert str(value) in str(caught.value)

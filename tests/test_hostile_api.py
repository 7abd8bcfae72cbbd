"""Hostile use of the Python API: changed workloads, strings for paths and layouts, values of the wrong type.

The findings are numbers 1, 7 and 14 of the second round of hostile use.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from everyrank import Launch, Layout, Workload, api, bench, find_workload, run, verify
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


# --- finding 1: a workload that dataclasses.replace has changed is the one that runs


def divides_by_zero(*_: object) -> Any:
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
def mine(tmp_path: Path) -> Iterator[Workload]:
    """The workload of a file, as `find_workload` gives it."""
    (tmp_path / "hostile_workload.py").write_text(WORKLOAD, encoding="utf-8")
    before = list(sys.path)
    yield find_workload(str(tmp_path / "hostile_workload.py"))
    sys.path[:] = before
    for name in [name for name in sys.modules if "hostile_workload" in name]:
        del sys.modules[name]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What a call in this process would have sent to its ranks: (launch, target, workload, layout, launch, options)."""
    found: list[tuple[Any, ...]] = []

    def start_nothing(*arguments: Any, **_: Any) -> Mapping[int, Any]:
        found.append(arguments)
        return {}

    monkeypatch.setattr(api, "run_ranks", start_nothing)
    return found


def as_a_rank_loads_it(sent: list[tuple[Any, ...]]) -> Workload:
    """The workload of the last call, after the way through the pickle."""
    return load(cloudpickle.loads(cloudpickle.dumps(sent[-1][2])))


def code_of(value: Any) -> Any:
    """What two copies of a function have in common after a pickle; any other value as it is."""
    if isinstance(value, Mapping):
        return {name: code_of(item) for name, item in value.items()}
    return (value.__code__.co_code, value.__code__.co_names) if hasattr(value, "__code__") else value


@pytest.mark.parametrize("field", CHANGES)
@pytest.mark.parametrize("call", ["run", "verify", "bench"])
def test_a_replaced_field_reaches_the_ranks(call: str, field: str, mine: Workload, sent: list[tuple[Any, ...]]) -> None:
    if field == "order":
        changed = dataclasses.replace(mine, order="shard")
    else:
        changed = dataclasses.replace(mine, **{field: CHANGES[field]})
    if call == "run":
        run(changed, Layout("single"), Launch(), show=False)
    else:
        {"verify": verify, "bench": bench}[call](changed, [Layout("ddp")], Launch(), show=False)
    assert code_of(getattr(as_a_rank_loads_it(sent), field)) == code_of(CHANGES[field])


def test_every_field_of_a_workload_is_tried() -> None:
    """`epochs` excludes `steps`; the last two are not a user's."""
    names = {field.name for field in dataclasses.fields(Workload)}
    assert names - set(CHANGES) == {"epochs", "batch_rule", "source"}


def test_a_built_in_workload_that_was_replaced_reaches_the_ranks(sent: list[tuple[Any, ...]]) -> None:
    changed = dataclasses.replace(find_workload("digits"), global_batch=32, epochs=1)
    run(changed, Layout("single"), Launch(), show=False)
    found = as_a_rank_loads_it(sent)
    assert (found.global_batch, found.epochs) == (32, 1)


def test_settings_stay_where_another_field_is_replaced(sent: list[tuple[Any, ...]]) -> None:
    changed = dataclasses.replace(find_workload("digits", lr=0.25, seed=3), clip_norm=1.0)
    run(changed, Layout("single"), Launch(), show=False)
    found = as_a_rank_loads_it(sent)
    assert (found.clip_norm, found.seed) == (1.0, 3)
    assert found.optimizer(nn.Linear(2, 2)).param_groups[0]["lr"] == 0.25


def test_replaced_twice(mine: Workload, sent: list[tuple[Any, ...]]) -> None:
    changed = dataclasses.replace(dataclasses.replace(mine, seed=5), clip_norm=0.5)
    run(changed, Layout("single"), Launch(), show=False)
    assert (as_a_rank_loads_it(sent).seed, as_a_rank_loads_it(sent).clip_norm) == (5, 0.5)


def test_what_was_not_changed_still_runs(mine: Workload, sent: list[tuple[Any, ...]]) -> None:
    for workload in (mine, dataclasses.replace(mine), find_workload("digits", epochs=2)):
        run(workload, Layout("single"), Launch(), show=False)
        assert as_a_rank_loads_it(sent).name == workload.name
        assert as_a_rank_loads_it(sent).epochs == workload.epochs


@pytest.mark.usefixtures("python")
@pytest.mark.parametrize("field", ["loss", "model", "train_data", "optimizer"])
def test_a_replaced_function_is_called(field: str, mine: Workload) -> None:
    """In a real rank: the original function would train without an error."""
    changed = dataclasses.replace(mine, **{field: divides_by_zero})
    with pytest.raises(EveryrankError, match="the replaced function was called"):
        run(changed, Layout("single"), Launch(device="cpu"), steps=1, show=False)


@pytest.mark.usefixtures("python")
def test_verify_runs_the_replaced_loss(mine: Workload) -> None:
    """And does not report `equal` for the original."""
    changed = dataclasses.replace(mine, loss=divides_by_zero)
    with pytest.raises(EveryrankError, match="the replaced function was called"):
        verify(changed, [Layout("single")], Launch(device="cpu"), quick=True, show=False)


@pytest.mark.usefixtures("python")
def test_the_record_names_and_shows_what_ran(mine: Workload) -> None:
    """The Record has the changed name, the changed number of updates, and other losses."""
    how = Layout("single"), Launch(device="cpu")
    (before,) = run(mine, *how, show=False)
    changed = dataclasses.replace(mine, name="changed", steps=2, seed=11)
    (after,) = run(changed, *how, show=False)
    assert (before.workload, len(before.loss)) == ("mine", 3)
    assert (after.workload, len(after.loss)) == ("changed", 2)
    assert after.loss[0] != before.loss[0]


# --- finding 7: strings for paths and layouts


@pytest.mark.parametrize("name", ["out", "pretrained", "profile"])
def test_a_path_may_be_a_string(name: str, sent: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    run(DIGITS, Layout("single"), Launch(), show=False, **{name: "folder/x"})
    assert getattr(sent[0][5], name) == tmp_path / "folder" / "x"


def test_a_checkpoint_may_be_a_string(tmp_path: Path) -> None:
    """There is none: that is the error, and no AttributeError."""
    with pytest.raises(UsageError, match="absent"):
        run(DIGITS, Layout("single"), Launch(), resume=str(tmp_path / "absent"), show=False)


def test_logs_may_be_a_string(tmp_path: Path, sent: list[tuple[Any, ...]]) -> None:
    assert Launch(logs=str(tmp_path)).logs == tmp_path  # pyright: ignore[reportArgumentType]


def test_layouts_may_be_strings(sent: list[tuple[Any, ...]]) -> None:
    verify(DIGITS, ["ddp", "fsdp:shard=2"], Launch(processes=2), show=False)  # pyright: ignore[reportArgumentType]
    bench(DIGITS, ["ddp"], Launch(processes=2), show=False)  # pyright: ignore[reportArgumentType]
    run(DIGITS, "ddp:accumulate=2", Launch(processes=2), show=False)  # pyright: ignore[reportArgumentType]
    assert list(sent[0][3]) == [Layout("ddp"), Layout("fsdp", {"shard": 2})]
    assert list(sent[1][3]) == [Layout("ddp")]
    assert sent[2][3] == Layout("ddp", accumulate=2)


def test_a_layout_string_that_is_wrong_is_named(sent: list[tuple[Any, ...]]) -> None:
    with pytest.raises(EveryrankError, match="dpp"):
        verify(DIGITS, ["dpp"], Launch(processes=2), show=False)  # pyright: ignore[reportArgumentType]
    assert sent == []


def taken_or_refused(call: Callable[[], object], word: str) -> bool:
    """Whether the call was taken; an error has to be ours, and to name the value."""
    refusal: EveryrankError | None = None
    try:
        call()
    except EveryrankError as error:
        refusal = error
    assert refusal is None or (word in str(refusal) and refusal.exit_status == 2)
    return refusal is None


def test_one_string_instead_of_a_list_of_layouts(sent: list[tuple[Any, ...]]) -> None:
    """Either it is that layout, or an error that names it; its letters are no layouts."""
    if taken_or_refused(lambda: verify(DIGITS, "ddp", Launch(processes=2), show=False), "ddp"):  # pyright: ignore
        assert list(sent[0][3]) == [Layout("ddp")]


def test_a_string_as_launch(sent: list[tuple[Any, ...]]) -> None:
    """Either it is the launcher of that name, or an error that names it."""
    if taken_or_refused(lambda: run(DIGITS, Layout("single"), "spawn", show=False), "spawn"):  # pyright: ignore
        assert sent[0][0] == Launch("spawn")


@pytest.mark.parametrize("value", [3, True, ["a"]])
def test_logs_that_are_no_path(value: Any) -> None:
    with pytest.raises(UsageError, match="logs"):
        Launch(logs=value)


@pytest.mark.parametrize("value", [3, ["a"]])
@pytest.mark.parametrize("name", ["out", "pretrained"])
def test_a_value_that_is_no_path(name: str, value: Any, sent: list[tuple[Any, ...]]) -> None:
    with pytest.raises(UsageError, match=name):
        run(DIGITS, Layout("single"), Launch(), show=False, **{name: value})
    assert sent == []


@pytest.mark.parametrize("value", [None, 3, "", object()])
def test_a_value_that_is_no_layout(value: Any, sent: list[tuple[Any, ...]]) -> None:
    with pytest.raises(EveryrankError):
        verify(DIGITS, [value], Launch(), show=False)
    assert sent == []


def test_a_launch_is_not_needed(sent: list[tuple[Any, ...]]) -> None:
    run(DIGITS, Layout("single"), show=False)  # pyright: ignore[reportCallIssue]
    verify(DIGITS, [Layout("ddp")], show=False)  # pyright: ignore[reportCallIssue]
    bench(DIGITS, [Layout("ddp")], show=False)  # pyright: ignore[reportCallIssue]
    assert sent[0][0] == Launch()
    assert all(isinstance(arguments[0], Launch) for arguments in sent)


@pytest.mark.parametrize("place", ["x" * 100_000 + ".py", "/".join(["x" * 200] * 500) + ".py", "a\0b.py"])
def test_a_name_that_no_file_system_has(place: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_workload(place)
    assert "workload" in str(caught.value)


def test_a_name_that_no_file_system_has_at_the_command_line(cli: Cli, tmp_path: Path) -> None:
    done = cli(tmp_path, "train", "x" * 100_000 + ".py")
    assert done.status == 2
    assert len(done.err.splitlines()) == 1
    assert len(done.err) < 2000


# --- finding 14: values that cannot be meant


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
def test_a_number_of_a_launch_that_is_none(name: str, value: Any) -> None:
    """The message names the value, as the command line or as Python has it."""
    with pytest.raises(UsageError) as caught:
        Launch(**{name: value})
    flags = {"loader_workers": "workers", "timeout_seconds": "timeout", "start_timeout_seconds": "start-timeout"}
    said = str(caught.value)
    assert name in said or flags.get(name, name).replace("_", "-") in said
    assert str(value) in said


@pytest.mark.parametrize("value", ["--x", [1], (1,), b"--x", 3])
def test_arguments_of_a_launcher_that_are_no_list_of_words(value: Any) -> None:
    """A string would be taken apart into its letters."""
    with pytest.raises(UsageError) as caught:
        Launch("torchrun", arguments=value)
    assert "arguments" in str(caught.value) or "--launcher-args" in str(caught.value)


def test_arguments_of_a_launcher_that_are_right() -> None:
    assert Launch("torchrun", arguments=("--x", "1")).arguments == ("--x", "1")
    assert list(Launch("torchrun", arguments=["--x"]).arguments) == ["--x"]  # pyright: ignore[reportArgumentType]
    assert Launch("torchrun").options == TorchrunOptions()


def workload_with(**fields: Any) -> Workload:
    right = {
        "name": "mine",
        "model": lambda: nn.Linear(3, 2),
        "train_data": lambda: TensorDataset(torch.ones(8, 3), torch.ones(8, 2)),
        "loss": lambda output, target: ((output - target).square().sum(), target.numel()),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        "global_batch": 4,
    }
    return Workload(**{**right, **fields})


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
def test_a_field_of_a_workload_that_cannot_be_meant(name: str, value: Any) -> None:
    with pytest.raises(WorkloadError, match=name):
        workload_with(**{name: value})


@pytest.mark.parametrize("name", ["my model", "llama-3.1", "größe", "text_124m", "a+b", "v1.0 (test)"])
def test_a_name_that_is_right(name: str) -> None:
    assert workload_with(name=name).name == name


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A call that starts ranks fails the test."""

    def start(*_: object, **__: object) -> None:
        raise AssertionError("ranks were started for a call that is wrong")

    monkeypatch.setattr(api, "run_ranks", start)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("call", [verify, bench])
def test_no_layout_at_all(call: Callable[..., object]) -> None:
    with pytest.raises(UsageError, match="layout"):
        call(DIGITS, [], Launch(), show=False)


@pytest.mark.usefixtures("nothing_starts")
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
    ],
)
def test_an_option_of_the_wrong_kind(call: str, options: dict[str, Any]) -> None:
    """It is refused here, by its name, and does not fail in a rank."""
    [(name, value)] = options.items()
    function: Any = {"run": run, "verify": verify, "bench": bench}[call]
    layouts = Layout("single") if call == "run" else [Layout("ddp")]
    with pytest.raises(UsageError) as caught:
        function(DIGITS, layouts, Launch(), show=False, **options)
    assert f"--{name.replace('_', '-')}" in str(caught.value) or name in str(caught.value)
    assert str(value) in str(caught.value)

"""The options of a call are described once: for the command line, and by name in Python."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from everyrank import BenchOptions, Launch, Layout, TrainOptions, VerifyOptions, api, run, verify
from everyrank.cli import _parser
from everyrank.commands.shared import options_of
from everyrank.errors import UsageError
from everyrank.options import PredictOptions, arguments_of, check_minimums
from everyrank.workload import Source
from processes import Cli

DIGITS = Source("digits")


def typed(options: type[Any], *words: str) -> Any:
    return options_of(_parser().parse_args(words), options)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options that a call in this process would have sent to its ranks."""
    found: list[Any] = []

    def start_nothing(*arguments: Any, **_: Any) -> Mapping[int, Any]:
        found.append(dataclasses.replace(arguments[5], command=[], started=0.0))
        return {}

    monkeypatch.setattr(api, "run_ranks", start_nothing)
    return found


@pytest.mark.parametrize(
    ("command", "options"), [("train", TrainOptions), ("verify", VerifyOptions), ("bench", BenchOptions)]
)
def test_nothing_typed_is_the_default(command: str, options: type[Any]) -> None:
    parsed = dataclasses.asdict(typed(options, command, "digits"))
    defaults = dataclasses.asdict(options())
    assert {**parsed, "trackers": ()} == {**defaults, "trackers": ()}


def test_every_kind_of_option_can_be_typed() -> None:
    words = "--epochs 2 --out a/b --evaluate --best loss:min --tracker wandb --tracker tensorboard --save-every 0"
    found = typed(TrainOptions, "train", "digits", *words.split())
    assert (found.epochs, found.out, found.evaluate, found.best_by) == (2, Path("a/b"), True, "loss:min")
    assert (found.trackers, found.save_every, found.keep) == (["wandb", "tensorboard"], 0, 3)
    found = typed(PredictOptions, "predict", "digits", "--out", "p.npy", "--train-data")
    assert (found.out, found.training_data, found.resume) == (Path("p.npy"), True, None)
    with pytest.raises(UsageError, match="the following arguments are required: --out"):
        _parser().parse_args(["predict", "digits"])


def test_by_name_or_as_options(sent: list[Any], tmp_path: Path) -> None:
    """Also where `options` are given and one of them is replaced."""
    trained = Layout("single"), Launch()
    run(DIGITS, *trained, epochs=2, out=tmp_path, trackers=["wandb"], show=False)
    run(DIGITS, *trained, options=TrainOptions(epochs=2, out=tmp_path, trackers=("wandb",), show=False))
    run(DIGITS, *trained, options=TrainOptions(epochs=9, out=tmp_path, trackers=("wandb",), show=False), epochs=2)
    assert sent[0] == sent[1] == sent[2] == TrainOptions(epochs=2, out=tmp_path, trackers=("wandb",), show=False)
    verify(DIGITS, [Layout("ddp")], Launch(), steps=3, explicit=False)
    assert sent[3] == VerifyOptions(steps=3, explicit=False)
    with pytest.raises(TypeError, match="epochz"):
        run(DIGITS, *trained, epochz=2)


def test_folders_reach_the_ranks_whole(sent: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    run(DIGITS, Layout("single"), Launch(), out=Path("a"), pretrained=Path("b"), profile=Path("c"))
    assert [sent[0].out, sent[0].pretrained, sent[0].profile] == [tmp_path / name for name in "abc"]


@pytest.mark.parametrize("options", [TrainOptions, VerifyOptions, BenchOptions])
def test_numbers_too_small_are_refused(options: type[Any]) -> None:
    """Every number has a smallest one, and the error says the argument and the rule."""
    for name, (kind, about) in arguments_of(options).items():
        if kind not in (int, int | None):
            continue
        assert about.minimum is not None, name
        check_minimums(options(**{name: about.minimum}))
        with pytest.raises(UsageError, match=rf"^{about.flag} {about.minimum - 1}: give (at least 1|a number of upd)"):
            check_minimums(options(**{name: about.minimum - 1}))


def test_two_lengths_are_one_too_many(sent: list[Any]) -> None:
    with pytest.raises(UsageError, match=r"^--epochs 1 --steps 2: "):
        run(DIGITS, Layout("single"), Launch(), epochs=1, steps=2)
    assert not sent


@pytest.mark.parametrize("options", [TrainOptions, PredictOptions, VerifyOptions, BenchOptions])
def test_help_lists_the_fields(options: type[Any]) -> None:
    lines = (options.__doc__ or "").splitlines()
    for name in arguments_of(options):
        assert any(line.split()[:1] == [f"{name}:"] for line in lines), name


KERNELS = """
import torch
from everyrank.builtin.digits import workload as digits

def data():
    dataset = digits().train_data()
    said = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    print("kernels", *said, flush=True)
    return dataset

def workload():
    import dataclasses
    return dataclasses.replace(digits(), train_data=data)
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [((), "False False"), (("--deterministic",), "True False"), (("--cudnn-benchmark",), "False True")],
)
def test_kernels_that_are_asked_for(words: tuple[str, ...], said: str, tmp_path: Path, cli: Cli) -> None:
    """Torch is told while the training runs, and not otherwise."""
    (tmp_path / "mine.py").write_text(KERNELS)
    done = cli.on_ranks(tmp_path, "train", "mine.py", "--steps", 1, *words)
    assert done.status == 0, done.err
    assert f"kernels {said}" in done.out


def test_settings_of_torch_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deterministic and benchmark together are refused, as is CUDA without cuBLAS's variable."""
    import torch

    from everyrank.train.rank import chosen_kernels

    def settings() -> tuple[bool, bool, bool]:
        fills = torch.utils.deterministic.fill_uninitialized_memory
        return torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, fills

    before = settings()
    with chosen_kernels(TrainOptions(deterministic=True), torch.device("cpu")):
        assert settings() == (True, False, False)
    assert settings() == before
    both = TrainOptions(deterministic=True, cudnn_benchmark=True)
    with pytest.raises(UsageError, match="give one"), chosen_kernels(both, torch.device("cpu")):
        pass
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    asked = chosen_kernels(TrainOptions(deterministic=True), torch.device("cuda"))
    with pytest.raises(UsageError, match="CUBLAS_WORKSPACE_CONFIG=:4096:8"), asked:
        pass

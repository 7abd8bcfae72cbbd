"""The options of train, verify, bench and predict: the same on the command line and in Python."""

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
from everyrank.options import ChaosOptions, PredictOptions, arguments_of, check_minimums
from everyrank.workload import Source
from processes import Cli

DIGITS = Source("digits")


def parse_options(options: type[Any], *args: str) -> Any:
    """Parse a command line into options."""
    return options_of(_parser().parse_args(args), options)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Options that calls send to their ranks, without command and start time. No rank starts."""
    sent_options: list[Any] = []

    def start_nothing(*arguments: Any, **_: Any) -> Mapping[int, Any]:
        sent_options.append(dataclasses.replace(arguments[5], command=[], started=0.0))
        return {}

    monkeypatch.setattr(api, "run_ranks", start_nothing)
    return sent_options


@pytest.mark.parametrize(
    ("command", "options"), [("train", TrainOptions), ("verify", VerifyOptions), ("bench", BenchOptions)]
)
def test_command_line_without_flags_gives_the_defaults(command: str, options: type[Any]) -> None:
    parsed = dataclasses.asdict(parse_options(options, command, "digits"))
    defaults = dataclasses.asdict(options())
    assert {**parsed, "trackers": ()} == {**defaults, "trackers": ()}


def test_flags_of_every_type_are_parsed() -> None:
    flags = "--epochs 2 --out a/b --evaluate --best loss:min --tracker wandb --tracker tensorboard --save-every 0"
    options = parse_options(TrainOptions, "train", "digits", *flags.split())
    assert (options.epochs, options.out, options.evaluate, options.best_by) == (2, Path("a/b"), True, "loss:min")
    assert (options.trackers, options.save_every, options.keep) == (["wandb", "tensorboard"], 0, 3)
    options = parse_options(PredictOptions, "predict", "digits", "--out", "p.npy", "--train-data")
    assert (options.out, options.training_data, options.resume) == (Path("p.npy"), True, None)
    with pytest.raises(UsageError, match="the following arguments are required: --out"):
        _parser().parse_args(["predict", "digits"])


def test_keywords_and_options_are_equivalent(sent: list[Any], tmp_path: Path) -> None:
    """A call accepts keywords, `options`, or both. A keyword replaces the field of `options`."""
    layout_and_launch = Layout("single"), Launch()
    run(DIGITS, *layout_and_launch, epochs=2, out=tmp_path, trackers=["wandb"], show=False)
    run(DIGITS, *layout_and_launch, options=TrainOptions(epochs=2, out=tmp_path, trackers=("wandb",), show=False))
    run(
        DIGITS,
        *layout_and_launch,
        options=TrainOptions(epochs=9, out=tmp_path, trackers=("wandb",), show=False),
        epochs=2,
    )
    assert sent[0] == sent[1] == sent[2] == TrainOptions(epochs=2, out=tmp_path, trackers=("wandb",), show=False)
    verify(DIGITS, [Layout("ddp")], Launch(), steps=3, explicit=False)
    assert sent[3] == VerifyOptions(steps=3, explicit=False)
    with pytest.raises(TypeError, match="epochz"):
        run(DIGITS, *layout_and_launch, epochz=2)


def test_ranks_get_absolute_paths(sent: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    run(DIGITS, Layout("single"), Launch(), out=Path("a"), pretrained=Path("b"), profile=Path("c"))
    assert [sent[0].out, sent[0].pretrained, sent[0].profile] == [tmp_path / name for name in "abc"]


@pytest.mark.parametrize("options", [TrainOptions, VerifyOptions, BenchOptions, ChaosOptions])
def test_number_below_its_minimum_is_refused(options: type[Any]) -> None:
    """Every integer option has a minimum, and the error has the flag and the rule."""
    for name, (kind, argument) in arguments_of(options).items():
        if kind not in (int, int | None):
            continue
        minimum = argument.minimum
        assert minimum is not None, name
        check_minimums(options(**{name: minimum}))
        with pytest.raises(UsageError, match=rf"^{argument.flag} {minimum - 1}: give at least {minimum}$"):
            check_minimums(options(**{name: minimum - 1}))


def test_epochs_and_steps_together_are_refused(sent: list[Any]) -> None:
    with pytest.raises(UsageError, match=r"^--epochs 1 --steps 2: "):
        run(DIGITS, Layout("single"), Launch(), epochs=1, steps=2)
    assert not sent


@pytest.mark.parametrize("options", [TrainOptions, PredictOptions, VerifyOptions, BenchOptions])
def test_docstring_lists_all_fields(options: type[Any]) -> None:
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
    ("flags", "settings"),
    [((), "False False"), (("--deterministic",), "True False"), (("--cudnn-benchmark",), "False True")],
)
def test_train_sets_deterministic_algorithms_and_cudnn_benchmark(
    flags: tuple[str, ...], settings: str, tmp_path: Path, cli: Cli
) -> None:
    """The settings of torch change only while the training runs, and only if a flag is given."""
    (tmp_path / "mine.py").write_text(KERNELS)
    result = cli.on_ranks(tmp_path, "train", "mine.py", "--steps", 1, *flags)
    assert result.status == 0, result.err
    assert f"kernels {settings}" in result.out


def test_settings_of_torch_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """`deterministic` is refused together with `cudnn_benchmark`, and on CUDA without CUBLAS_WORKSPACE_CONFIG."""
    import torch

    from everyrank.train.rank import chosen_kernels

    def settings() -> tuple[bool, bool, bool, bool]:
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.benchmark,
            torch.utils.deterministic.fill_uninitialized_memory,
        )

    for is_enabled, warn_only in ((True, True), (True, False), (False, False)):
        torch.use_deterministic_algorithms(is_enabled, warn_only=warn_only)
        previous_settings = settings()
        with chosen_kernels(TrainOptions(deterministic=True), torch.device("cpu")):
            assert settings() == (True, False, False, False)
        assert settings() == previous_settings
        with chosen_kernels(TrainOptions(), torch.device("cpu")):
            assert settings() == previous_settings
        assert settings() == previous_settings
    both = TrainOptions(deterministic=True, cudnn_benchmark=True)
    with pytest.raises(UsageError, match="give one"), chosen_kernels(both, torch.device("cpu")):
        pass
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    deterministic_on_cuda = chosen_kernels(TrainOptions(deterministic=True), torch.device("cuda"))
    with pytest.raises(UsageError, match="CUBLAS_WORKSPACE_CONFIG=:4096:8"), deterministic_on_cuda:
        pass

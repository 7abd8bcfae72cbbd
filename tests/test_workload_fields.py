"""Workload fields for batches, samples, schedule and callbacks: same result under every layout, or refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from everyrank import Layout, Workload, parse_layout
from everyrank.checkpoint.saver import _check_same_training
from everyrank.cli import main
from everyrank.data import all_updates, planned_updates, samples_per_epoch
from everyrank.data.parts import order_of
from everyrank.errors import RankFailedError, UsageError, WorkloadError
from everyrank.loop import evaluate, open_data, run_updates
from everyrank.parallel.mesh import open_mesh
from everyrank.parity import check_layout, parity_case, trace
from everyrank.parity.samples import check_samples
from everyrank.record import read_records
from everyrank.runs import Checkpoint, CheckpointMetadata
from everyrank.strategies import prepare
from everyrank.train.buffers import different_buffers
from everyrank.train.log import Log
from everyrank.train.on_epoch import after_epoch
from everyrank.train.training import Training
from everyrank.world import World, single_process_world
from processes import Cli


def test_drop_last_skips_an_incomplete_batch(ranks: Any) -> None:
    """All counts of updates and samples agree. 23 samples in batches of 7 are 3 updates of 21 samples."""
    workload = zoo.workload("frozen", drop_last=True)
    assert samples_per_epoch(workload, 23) == 21
    assert samples_per_epoch(zoo.workload("frozen"), 23) == 23
    assert planned_updates(workload, zoo.Points(23)) == 6
    for num_samples, problems, text in ranks(2, train_with_drop_last):
        assert num_samples == 21
        assert problems == []
        assert "except 2 of an incomplete last batch" in text


def train_with_drop_last(world: World) -> tuple[int, list[str], str]:
    """Return the number of samples in an epoch, the problems of the samples, and the summary of their check."""
    workload = zoo.workload("frozen", drop_last=True)
    mesh = open_mesh(Layout("ddp"), world)
    case = parity_case(workload, *open_data(workload, world), steps=20)
    counts = trace(case, Layout("ddp"), world, case.planned("float64")).counts
    return int(sum(counts[:3])), *check_samples(workload, zoo.Points(23), None, Layout("ddp"), mesh)


def test_drop_last_with_less_than_one_batch_is_refused(ranks: Any) -> None:
    """5 samples in batches of 7 leave no update."""
    changes = {"drop_last": True, "train_data": lambda: zoo.Points(5)}
    for [text] in ranks(2, data_errors, [changes]):
        assert text.startswith("drop_last=True: train_data has 5 samples")


def data_errors(world: World, cases: list[dict[str, Any]]) -> list[str]:
    """Return the error for the data of each of these workloads."""
    errors: list[str] = []
    for changes in cases:
        with pytest.raises(WorkloadError) as caught:
            open_data(zoo.workload("frozen", **changes), world)
        errors.append(str(caught.value))
    return errors


def test_eval_batch_affects_only_the_evaluation(ranks: Any) -> None:
    """Evaluating 13 samples in batches of 7 or 1 gives the same loss."""
    [(sizes, eval_losses)] = ranks(1, evaluations)
    assert sizes == [7, 6, *[1] * 13]
    assert eval_losses[0] == pytest.approx(eval_losses[1], rel=1e-12)


def evaluations(world: World) -> tuple[list[int], list[Any]]:
    """Return the sizes of all evaluated batches, and the loss with the default eval_batch and with eval_batch=1."""
    sizes: list[int] = []

    def counted(output: torch.Tensor, target: torch.Tensor) -> Any:
        sizes.append(len(target))
        return zoo.squared_error(output, target)

    eval_losses: list[Any] = []
    for eval_batch in (None, 1):
        workload = zoo.workload("frozen", eval_batch=eval_batch, steps=1, epochs=None, metrics={"own": counted})
        case = parity_case(workload, *open_data(workload, world), steps=1)
        eval_losses.append(
            trace(case, Layout("single", precision="float64"), world, case.planned("float64")).evaluation["loss"]
        )
    return sizes, eval_losses


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "single"])
def test_batch_of_one_with_batch_norm_is_refused_before_training(ranks: Any, layout: str) -> None:
    """The last of 22 samples would be a batch of one. The error comes before the first update. drop_last avoids it."""
    for text, num_updates in ranks(2, train_with_batch_of_one, layout):
        assert text.startswith("update 0: batch norm")
        assert "update 3 has 1 of 22 samples" in text
        assert "set Workload.drop_last=True" in text
        assert num_updates == 3


def train_with_batch_of_one(world: World, layout: str) -> tuple[str, int]:
    """Return the error without drop_last, and the number of updates with it."""
    workload = zoo.workload("norm", train_data=lambda: zoo.Points(22), epochs=1)
    with pytest.raises(WorkloadError) as caught:
        losses(workload, layout, world)
    return str(caught.value), len(losses(dataclasses.replace(workload, drop_last=True), layout, world))


def losses(workload: Workload, layout: str, world: World) -> list[torch.Tensor]:
    """Train for an epoch, and return the local loss sum and count of each update."""
    prepared = prepare(workload, Layout(layout), world)
    updates = all_updates(planned_updates(workload, zoo.Points(22)), 4 - workload.drop_last)
    return list(run_updates(prepared, zoo.Points(22), updates))


def sample_weights() -> list[float]:
    """Return weights that grow with the index. Sample 0 has weight 0."""
    return [float(number) for number in range(23)]


def test_weighted_sampling_matches_weighted_random_sampler(ranks: Any) -> None:
    """All ranks get the order of torch's WeightedRandomSampler. The sample check accepts repeated samples."""
    sampler = torch.utils.data.WeightedRandomSampler(sample_weights(), 23, generator=torch.Generator().manual_seed(1))
    orders = ranks(2, drawn)
    assert orders[0] == orders[1]
    assert orders[0][0] == list(sampler)
    assert 0 not in orders[0][0]
    assert orders[0][1] == []
    assert "23 samples, drawn with weights" in orders[0][2]


def drawn(world: World) -> tuple[list[int], list[str], str]:
    """Return the order of epoch 1, the problems of the samples, and the summary of their check."""
    workload = zoo.workload("frozen", weights=sample_weights, drop_last=True)
    open_data(workload, world)
    mesh = open_mesh(Layout("ddp"), world)
    order = order_of(workload, zoo.Points(23), 1)
    return [int(sample) for sample in order], *check_samples(workload, zoo.Points(23), None, Layout("ddp"), mesh)


def test_weighted_sampling_is_equal_under_every_layout(ranks: Any) -> None:
    for statuses in ranks(3, weighted):
        assert statuses == ["equal"] * 3


def weighted(world: World) -> list[str]:
    workload = zoo.workload("tied", weights=sample_weights, drop_last=True, eval_batch=5)
    case = parity_case(workload, *open_data(workload, world), steps=6)
    layouts = [parse_layout(text) for text in ("ddp", "zero1:accumulate=2", "fsdp")]
    return [check_layout(case, layout, world, f"weighted/{layout}")[0].status for layout in layouts]


def _weights_that_differ_between_ranks() -> list[float]:
    """Return weights that depend on the process id."""
    import os

    return [1.0 + os.getpid() % 1000] + [1.0] * 22


WRONG_WEIGHTS: list[tuple[dict[str, Any], str]] = [
    ({"weights": lambda: [1.0] * 22}, "weights: shape (22,) for 23 training samples; give one for each"),
    ({"weights": lambda: [0.0] * 23}, "weights: give finite numbers of at least 0, not all of them 0"),
    ({"weights": lambda: [1.0] * 22 + [float("nan")]}, "weights: give finite numbers of at least 0"),
    (
        {"weights": _weights_that_differ_between_ranks},
        "weights: not the same on all ranks; compute them from the data only",
    ),
    ({"weights": sample_weights, "train_data": lambda: iter_points()}, "weights: train_data is a stream"),
]


def test_invalid_weights_are_refused(ranks: Any) -> None:
    for texts in ranks(2, data_errors, [changes for changes, _ in WRONG_WEIGHTS]):
        assert len(texts) == len(WRONG_WEIGHTS)
        for text, (_, message) in zip(texts, WRONG_WEIGHTS, strict=True):
            assert text.startswith(message)


def iter_points() -> Any:
    """Return a stream of 23 points."""

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            points = zoo.Points(23)
            return (points[index] for index in range(23))

    return Stream()


def test_weights_in_shard_order_are_refused() -> None:
    with pytest.raises(WorkloadError, match="use order='global'"):
        zoo.workload("frozen", weights=sample_weights, order="shard")


@pytest.mark.parametrize(
    ("fields", "fragment"),
    [
        ({"metrics": {"loss": zoo.sign_accuracy}}, "metrics: the name 'loss' is that of the loss on eval_data"),
        ({"metrics": {"eval_loss": zoo.sign_accuracy}}, "metrics: the name 'eval_loss'"),
        ({"derived": {"eval_loss": max}}, "derived: the name 'eval_loss'"),
        ({"derived": {"side": max}}, "derived: the name 'side' is that of one of metrics"),
    ],
)
def test_metric_that_would_replace_another_value_is_refused(ranks: Any, fields: dict[str, Any], fragment: str) -> None:
    """Its mean would be printed, and followed by a schedule, as the loss of the evaluation."""
    for [text] in ranks(2, data_errors, [fields]):
        assert fragment in text


def test_metric_named_like_a_column_does_not_replace_it(tmp_path: Path) -> None:
    """epochs.csv has the number of updates. The metric is in events.jsonl."""
    row = {"step": 4, "epoch": 0, "epoch_seconds": 1.5, "mean_loss": 0.5, "evaluation": {"step": 7.0, "top1": 0.25}}
    log = Log(tmp_path, [row], ["step", "top1"], [], SimpleNamespace())  # pyright: ignore[reportArgumentType]
    log.close()
    assert (tmp_path / "epochs.csv").read_text() == "epoch,step,seconds,loss,top1\n0,4,1.5,0.5,0.25\n"


def test_learning_rate_in_a_tensor_is_logged() -> None:
    """torch.optim takes both numbers and tensors."""
    optimizer = torch.optim.Adam(nn.Linear(2, 2).parameters(), lr=torch.tensor(0.25))
    training: Any = SimpleNamespace(prepared=SimpleNamespace(trainable=SimpleNamespace(optimizer=optimizer)))
    assert Training._rate(training) == 0.25


def test_resume_with_different_drop_last_is_refused() -> None:
    """The metadata of a checkpoint contains drop_last. The error names the field."""
    metadata = CheckpointMetadata(1, "w", {}, 0, 7, None, 23, None, "ddp", 2, 3, "eval_loss", {}, "")
    saved = Checkpoint(Path("c"), dataclasses.replace(metadata, settings={"Workload.drop_last": True}))
    with pytest.raises(UsageError, match=r"Workload\.drop_last=True.* no Workload\.drop_last"):
        _check_same_training(saved, metadata)


PLATEAU = """
import torch
import zoo
from everyrank import Workload

def workload(optimizer="sgd", evaluated=True, average=0.0):
    optimizers = {
        "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.4),
        "lbfgs": lambda model: torch.optim.LBFGS(model.parameters()),
        "two": lambda model: [torch.optim.SGD([p], lr=0.1) for p in model.parameters()],
    }
    return Workload(
        name="plateau", model=zoo.TiedModel, train_data=lambda: zoo.Sentences(23),
        eval_data=(lambda: zoo.Sentences(13)) if evaluated else None, loss=zoo.masked_loss, blocks="blocks",
        optimizer=optimizers[optimizer], global_batch=7, epochs=6, drop_last=True,
        ema_decay=average or None,
        schedule=lambda made: torch.optim.lr_scheduler.ReduceLROnPlateau(made, patience=0, factor=0.5))
"""


def trained(cli: Cli, folder: Path, layout: str, *args: str, size: int = 2) -> list[dict[str, Any]]:
    """Train the plateau workload, and return the log row of each update."""
    (folder / "plateau.py").write_text(PLATEAU)
    all_args = ["--out", layout, "--evaluate-every", "0", "--keep", "9", *args]
    process = cli.on_ranks(
        folder, "train", "plateau.py", "--layout", f"{layout}:precision=float64", *all_args, size=size
    )
    assert process.status == 0, process.err
    rows = [json.loads(line) for line in (folder / layout / "log.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def test_reduce_lr_on_plateau_is_equal_under_every_layout(cli: Cli, tmp_path: Path) -> None:
    """The schedule steps once an epoch, with the evaluation loss. Its state is saved in checkpoints."""
    single = trained(cli, tmp_path, "single", size=1)
    learning_rates = [row["lr"] for row in single]
    assert len(learning_rates) == 18
    assert all(len(set(learning_rates[first : first + 3])) == 1 for first in range(0, 18, 3))
    assert len(set(learning_rates)) > 1
    for layout in ("ddp", "fsdp"):
        rows = trained(cli, tmp_path, layout)
        assert [row["lr"] for row in rows] == learning_rates
        assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in single], rel=1e-10)
    after_3 = tmp_path / "ddp" / "checkpoints" / "step-00000009"
    rows = trained(cli, tmp_path, "zero1", "--resume", str(after_3))
    assert [row["lr"] for row in rows] == learning_rates


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluated=False"], "ReduceLROnPlateau"),
        (["optimizer=lbfgs"], "LBFGS computes the loss several times"),
        (["optimizer=two"], "returned list, not a torch.optim.Optimizer"),
    ],
)
def test_unsupported_optimizer_or_schedule_is_refused(cli: Cli, tmp_path: Path, words: str, message: str) -> None:
    """The exit code is 2, and the error has no traceback."""
    (tmp_path / "plateau.py").write_text(PLATEAU)
    process = cli.on_ranks(tmp_path, "train", "plateau.py", "--layout", "ddp", "--set", *words, size=2)
    assert process.status == 2
    assert message in process.err
    assert "Traceback" not in process.err


@pytest.mark.integration
def test_ema_evaluation_is_equal_under_every_layout(ranks: Any) -> None:
    """The averaged weights are evaluated under every layout. Without averaging, the loss differs."""
    for eval_losses in ranks(2, ema_eval_losses):
        for layout, eval_loss in eval_losses.items():
            if layout != "without":
                assert eval_loss == pytest.approx(eval_losses["single"], rel=1e-10), layout
        assert eval_losses["without"] != pytest.approx(eval_losses["single"], rel=1e-4)


def ema_eval_losses(world: World) -> dict[str, float]:
    """Return the evaluation loss with averaged weights for each layout, without averaging, and computed by hand."""
    eval_losses: dict[str, float] = {}
    for name in ("single", "ddp", "zero1", "fsdp", "tensor", "pipeline", "without"):
        decay = 0.9 if name != "without" else None
        workload = zoo.workload("decoder", "adamw", ema_decay=decay)
        case = parity_case(workload, *open_data(workload, world), steps=4)
        layout = Layout(name if name != "without" else "ddp", precision="float64")
        total, count = trace(case, layout, world, case.planned("float64")).evaluation["loss"]
        eval_losses[name] = total / count
    return {**eval_losses, "by hand": averaged_by_hand(world)}


def averaged_by_hand(world: World) -> float:
    """Return the evaluation loss of a plain implementation of the average, in one process."""
    workload, layout, world = (
        zoo.workload("decoder", "adamw"),
        Layout("single", precision="float64"),
        single_process_world(world),
    )
    prepared = prepare(workload, layout, world)
    parameters = list(prepared.model.parameters())
    averages = [parameter.detach().clone() for parameter in parameters]
    for _ in run_updates(prepared, zoo.SentencesWithPositions(9), all_updates(4, 2)):
        averages = [0.9 * average + 0.1 * weight.detach() for average, weight in zip(averages, parameters, strict=True)]
    with torch.no_grad():
        for parameter, average in zip(parameters, averages, strict=True):
            parameter.copy_(average)
    total, count = evaluate(prepared, zoo.SentencesWithPositions(9))["loss"]
    return total / count


def recorded_eval_loss(folder: Path, run: str) -> float:
    return read_records(folder / run / "record.json")[0].metrics["eval_loss"]


def test_ema_is_saved_in_checkpoints(cli: Cli, tmp_path: Path) -> None:
    """A run with ddp is resumed with fsdp. Exported weights are the average, which is also what is evaluated."""
    extra_args = ["--set", "average=0.8"]
    trained(cli, tmp_path, "ddp", *extra_args)
    expected = recorded_eval_loss(tmp_path, "ddp")
    after_3 = str(tmp_path / "ddp" / "checkpoints" / "step-00000009")
    trained(cli, tmp_path, "fsdp", "--resume", after_3, *extra_args)
    assert recorded_eval_loss(tmp_path, "fsdp") == pytest.approx(expected, rel=1e-10)
    assert main(["checkpoint", "export", str(tmp_path / "fsdp"), str(tmp_path / "w.pt")]) == 0
    evaluate_args = ["--layout", "single:precision=float64", "--pretrained", "w.pt", "--evaluate"]
    process = cli.on_ranks(tmp_path, "train", "plateau.py", *evaluate_args, "--json", "exported.json")
    assert process.status == 0, process.err
    exported = read_records(tmp_path / "exported.json")[0].metrics["eval_loss"]
    assert exported == pytest.approx(expected, rel=1e-6)  # exported in float32
    for out_file, source in (("one.jsonl", ["--pretrained", "w.pt"]), ("two.jsonl", ["--resume", "fsdp", *extra_args])):
        assert cli.on_ranks(tmp_path, "predict", "plateau.py", *source, "--out", out_file).status == 0
    from_export, from_checkpoint = ((tmp_path / name).read_text().splitlines() for name in ("one.jsonl", "two.jsonl"))
    assert from_export == from_checkpoint
    extra_args = ["--set", "average=0.5", "--resume", after_3, "--out", "other"]
    process = cli.on_ranks(tmp_path, "train", "plateau.py", "--layout", "ddp", *extra_args, size=2)
    assert process.status == 2
    assert "trained with Workload.ema_decay=0.8" in process.err or "--set average=0.8" in process.err


WATCHED = """
import dataclasses, json
import zoo

def workload(fails=False):
    tokens, _ = zoo.SentencesWithPositions(3)[1]

    def on_epoch(epoch, metrics, predict):
        if fails:
            raise ValueError("my plot")
        batch = {name: value.repeat(2, 1) for name, value in tokens.items()}
        said = [float(predict(batch).double().abs().sum()) for _ in range(2)]
        with open("watched.jsonl", "a") as file:
            file.write(json.dumps([epoch, metrics["eval_loss"], *said]) + "\\n")

    return dataclasses.replace(zoo.workload("decoder", "adamw"), on_epoch=on_epoch)
"""


@pytest.mark.integration
def test_on_epoch_runs_once_and_can_predict(cli: Cli, tmp_path: Path) -> None:
    """on_epoch runs once an epoch, on rank 0. It can predict even if no rank has the whole model."""
    (tmp_path / "watched.py").write_text(WATCHED)
    layouts = ["single", "ddp", "fsdp", "tensor", "context", "pipeline"]
    for layout in layouts:
        size = 1 if layout == "single" else 2
        process = cli.on_ranks(tmp_path, "train", "watched.py", "--layout", f"{layout}:precision=float64", size=size)
        assert process.status == 0, (layout, process.err)
    rows = [json.loads(line) for line in (tmp_path / "watched.jsonl").read_text().splitlines()]
    assert [row[0] for row in rows] == [0, 1] * len(layouts)
    for row in rows[2:]:
        assert row == pytest.approx(rows[row[0]], rel=1e-9)
    assert rows[0][2] == rows[0][3] != rows[1][2]


def predictions_in_on_epoch(world: World) -> list[Tensor]:
    """Return what `predict` of on_epoch gives after one update, and the output of the trained model."""
    values, predictions = torch.ones(3, 5), list[Tensor]()

    def on_epoch(epoch: int, metrics: dict[str, float], predict: Any) -> None:
        del epoch, metrics
        predictions.append(predict(values))

    workload = zoo.workload("frozen", model=zoo.model_without_counter, on_epoch=on_epoch)
    prepared = prepare(workload, parse_layout("parameter_server:servers=2,precision=float64"), world)
    list(run_updates(prepared, zoo.Points(23), list(all_updates(1, 4))))
    after_epoch(prepared, 0, {})
    model = zoo.model_without_counter().double()
    state = prepared.full_state()
    if world.rank == 0:
        model.load_state_dict(state)
        predictions.append(model(values.double()).detach())
    return predictions


def test_on_epoch_predicts_with_the_newest_parameters_of_the_servers(ranks: Any) -> None:
    """The trainers have those of before the last update, and no evaluation has gathered them."""
    predicted, expected = ranks(4, predictions_in_on_epoch)[0]
    torch.testing.assert_close(predicted, expected, rtol=1e-12, atol=0)


def error_of_wrong_input(world: World) -> str:
    """Return the error of an on_epoch that predicts for an array of numpy."""
    workload = zoo.workload("frozen", on_epoch=lambda epoch, metrics, predict: predict(torch.ones(3, 5).numpy()))
    prepared = prepare(workload, parse_layout("ddp"), world)
    with pytest.raises((TypeError, RankFailedError)) as caught:
        after_epoch(prepared, 0, {})
    return str(caught.value)


def test_input_that_on_epoch_cannot_predict_is_named_on_all_ranks(ranks: Any) -> None:
    """The other rank must not wait for a prediction that rank 0 cannot make."""
    for text in ranks(2, error_of_wrong_input):
        assert "takes a batch of tensors" in text
        assert "not ndarray" in text


def test_exception_in_on_epoch_ends_the_training(cli: Cli, tmp_path: Path) -> None:
    """The exit code is 4, and the error has the line in the user's function."""
    (tmp_path / "watched.py").write_text(WATCHED)
    process = cli.on_ranks(tmp_path, "train", "watched.py", "--layout", "fsdp", "--set", "fails=True", size=2)
    assert process.status == 4
    assert "ValueError: my plot" in (tmp_path / "rank1.err").read_text()
    assert "watched.py:10 in on_epoch: ValueError: my plot" in process.err


# --- buffers that the model writes


class TrackingModel(nn.Module):
    """A model with running statistics, of the samples of one rank, and a count of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(1, track_running_stats=True)
        self.head = nn.Linear(5, 2)
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        self.cache = values[:1, 0].detach()
        return self.head(self.norm(values[:, None])[:, 0])


def buffers_that_differ(world: World, layout: str, batch_norm: bool) -> list[str]:
    """Return the names after one update."""
    workload = zoo.workload("norm") if batch_norm else zoo.workload("frozen", model=TrackingModel, blocks=None)
    prepared = prepare(workload, parse_layout(layout), world)
    list(run_updates(prepared, zoo.Points(23), list(all_updates(1, 4))))
    return different_buffers(prepared)


@pytest.mark.parametrize("layout", ["ddp", "zero1", "fsdp", "local_sgd"])
def test_buffers_that_a_model_writes_from_samples_of_one_rank_are_named(ranks: Any, layout: str) -> None:
    """Each rank would evaluate with its own. Replicas of local_sgd differ on purpose, and are averaged."""
    for names in ranks(2, buffers_that_differ, layout, False):
        assert names == ([] if layout == "local_sgd" else ["norm.running_mean", "norm.running_var"])


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "ddp:batch_norm=local"])
def test_running_statistics_of_batch_norm_do_not_differ(ranks: Any, layout: str) -> None:
    """They are computed over all ranks, or broadcast."""
    assert ranks(2, buffers_that_differ, layout, True) == [[], []]

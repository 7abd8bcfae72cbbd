"""What a workload can say about its batches, its samples and its schedule: alike under every layout, or refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from everyrank import Layout, Workload, parse_layout
from everyrank.checkpoint.saver import _check_same_training
from everyrank.cli import main
from everyrank.data import all_updates, planned_updates, samples_per_epoch
from everyrank.data.parts import order_of
from everyrank.errors import UsageError, WorkloadError
from everyrank.loop import evaluate, open_data, run_updates
from everyrank.parallel.mesh import open_mesh
from everyrank.parity import check_layout, parity_case, trace
from everyrank.parity.samples import check_samples
from everyrank.record import read_records
from everyrank.runs import Checkpoint, CheckpointMetadata
from everyrank.strategies import prepare
from everyrank.world import World, single_process_world
from processes import Cli


def test_drop_last_leaves_out_a_ragged_batch(ranks: Any) -> None:
    """Whoever counts updates or samples counts alike: 23 samples in batches of 7 are three updates, and 21 samples."""
    workload = zoo.workload("frozen", drop_last=True)
    assert samples_per_epoch(workload, 23) == 21
    assert samples_per_epoch(zoo.workload("frozen"), 23) == 23
    assert planned_updates(workload, zoo.Points(23)) == 6
    for read, problems, text in ranks(2, dropped):
        assert read == 21
        assert problems == []
        assert "except 2 of an incomplete last batch" in text


def dropped(world: World) -> tuple[int, list[str], str]:
    workload = zoo.workload("frozen", drop_last=True)
    mesh = open_mesh(Layout("ddp"), world)
    subject = parity_case(workload, *open_data(workload, world), steps=20)
    counts = trace(subject, Layout("ddp"), world, subject.planned("float64")).counts
    return int(sum(counts[:3])), *check_samples(workload, zoo.Points(23), None, Layout("ddp"), mesh)


def test_drop_last_of_less_than_a_batch_is_refused(ranks: Any) -> None:
    changes = {"drop_last": True, "train_data": lambda: zoo.Points(5)}
    for [text] in ranks(2, refusals, [changes]):
        assert text.startswith("drop_last=True: train_data has 5 samples")


def refusals(world: World, cases: list[dict[str, Any]]) -> list[str]:
    """Why the data of these workloads is refused."""
    found: list[str] = []
    for changes in cases:
        with pytest.raises(WorkloadError) as caught:
            open_data(zoo.workload("frozen", **changes), world)
        found.append(str(caught.value))
    return found


def test_eval_batch_is_that_of_evaluation_alone(ranks: Any) -> None:
    """13 samples one by one: the same exact sums, and training goes on in batches of 7."""
    [(sizes, found)] = ranks(1, evaluations)
    assert sizes == [7, 6, *[1] * 13]
    assert found[0] == pytest.approx(found[1], rel=1e-12)


def evaluations(world: World) -> tuple[list[int], list[Any]]:
    sizes: list[int] = []

    def counted(output: torch.Tensor, target: torch.Tensor) -> Any:
        sizes.append(len(target))
        return zoo.squared(output, target)

    found: list[Any] = []
    for eval_batch in (None, 1):
        workload = zoo.workload("frozen", eval_batch=eval_batch, steps=1, epochs=None, metrics={"own": counted})
        subject = parity_case(workload, *open_data(workload, world), steps=1)
        found.append(
            trace(subject, Layout("single", precision="float64"), world, subject.planned("float64")).evaluation["loss"]
        )
    return sizes, found


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "single"])
def test_a_lone_sample_under_batch_norm_is_refused_before_the_first_update(ranks: Any, layout: str) -> None:
    """641 samples in batches of 64 ended after an epoch; here 22 in batches of 7. Nothing is refused with drop_last."""
    for text, done in ranks(2, lone, layout):
        assert text.startswith("update 0: batch norm")
        assert "update 3 has 1 of 22 samples" in text
        assert "set Workload.drop_last=True" in text
        assert done == 3


def lone(world: World, layout: str) -> tuple[str, int]:
    workload = zoo.workload("norm", train_data=lambda: zoo.Points(22), epochs=1)
    with pytest.raises(WorkloadError) as caught:
        losses(workload, layout, world)
    return str(caught.value), len(losses(dataclasses.replace(workload, drop_last=True), layout, world))


def losses(workload: Workload, layout: str, world: World) -> list[torch.Tensor]:
    """What this rank's updates came to."""
    prepared = prepare(workload, Layout(layout), world)
    updates = all_updates(planned_updates(workload, zoo.Points(22)), 4 - workload.drop_last)
    return list(run_updates(prepared, zoo.Points(22), updates))


def by_weight() -> list[float]:
    """Sample 0 not at all, the others the more often the later they stand."""
    return [float(number) for number in range(23)]


def test_weights_are_drawn_once_for_all_ranks(ranks: Any) -> None:
    """What torch's WeightedRandomSampler draws, ragged batches and all; the check knows that samples repeat."""
    sampler = torch.utils.data.WeightedRandomSampler(by_weight(), 23, generator=torch.Generator().manual_seed(1))
    orders = ranks(2, drawn)
    assert orders[0] == orders[1]
    assert orders[0][0] == list(sampler)
    assert 0 not in orders[0][0]
    assert orders[0][1] == []
    assert "23 samples, drawn with weights" in orders[0][2]


def drawn(world: World) -> tuple[list[int], list[str], str]:
    """The order of epoch 1, and what the audit says."""
    workload = zoo.workload("frozen", weights=by_weight, drop_last=True)
    open_data(workload, world)
    mesh = open_mesh(Layout("ddp"), world)
    order = order_of(workload, zoo.Points(23), 1)
    return [int(sample) for sample in order], *check_samples(workload, zoo.Points(23), None, Layout("ddp"), mesh)


def test_weights_are_the_same_training_under_every_layout(ranks: Any) -> None:
    for statuses in ranks(3, weighted):
        assert statuses == ["equal"] * 3


def weighted(world: World) -> list[str]:
    workload = zoo.workload("tied", weights=by_weight, drop_last=True, eval_batch=5)
    subject = parity_case(workload, *open_data(workload, world), steps=6)
    layouts = [parse_layout(text) for text in ("ddp", "zero1:accumulate=2", "fsdp")]
    return [check_layout(subject, layout, world, f"weighted/{layout}")[0].status for layout in layouts]


def _not_the_same() -> list[float]:
    import os

    return [1.0 + os.getpid() % 1000] + [1.0] * 22


WRONG_WEIGHTS: list[tuple[dict[str, Any], str]] = [
    ({"weights": lambda: [1.0] * 22}, "weights: shape (22,) for 23 training samples; give one for each"),
    ({"weights": lambda: [0.0] * 23}, "weights: give finite numbers of at least 0, not all of them 0"),
    ({"weights": lambda: [1.0] * 22 + [float("nan")]}, "weights: give finite numbers of at least 0"),
    ({"weights": _not_the_same}, "weights: not the same on all ranks; compute them from the data only"),
    ({"weights": by_weight, "train_data": lambda: iter_points()}, "weights: train_data is a stream"),
]


def test_weights_that_cannot_be_drawn_are_refused(ranks: Any) -> None:
    for texts in ranks(2, refusals, [changes for changes, _ in WRONG_WEIGHTS]):
        assert len(texts) == len(WRONG_WEIGHTS)
        for text, (_, words) in zip(texts, WRONG_WEIGHTS, strict=True):
            assert text.startswith(words)


def iter_points() -> Any:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            points = zoo.Points(23)
            return (points[index] for index in range(23))

    return Stream()


def test_weights_in_shard_order_are_refused() -> None:
    with pytest.raises(WorkloadError, match="use order='global'"):
        zoo.workload("frozen", weights=by_weight, order="shard")


def test_a_resumed_run_shares_what_decides_its_batches() -> None:
    """drop_last and weights are in what a checkpoint says of itself, and the refusal says which field it is."""
    about = CheckpointMetadata(1, "w", {}, 0, 7, None, 23, None, "ddp", 2, 3, "eval_loss", {}, "")
    saved = Checkpoint(Path("c"), dataclasses.replace(about, settings={"Workload.drop_last": True}))
    with pytest.raises(UsageError, match=r"Workload\.drop_last=True.* no Workload\.drop_last"):
        _check_same_training(saved, about)


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


def trained(cli: Cli, folder: Path, layout: str, *words: str, size: int = 2) -> list[dict[str, Any]]:
    """What was logged of each update."""
    (folder / "plateau.py").write_text(PLATEAU)
    more = ["--out", layout, "--evaluate-every", "0", "--keep", "9", *words]
    done = cli.on_ranks(folder, "train", "plateau.py", "--layout", f"{layout}:precision=float64", *more, size=size)
    assert done.status == 0, done.err
    rows = [json.loads(line) for line in (folder / layout / "log.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def test_a_plateau_is_found_alike_under_every_layout(cli: Cli, tmp_path: Path) -> None:
    """On the exact loss of the evaluation, once an epoch, however often is evaluated; kept in checkpoints."""
    single = trained(cli, tmp_path, "single", size=1)
    rates = [row["lr"] for row in single]
    assert len(rates) == 18
    assert all(len(set(rates[first : first + 3])) == 1 for first in range(0, 18, 3))
    assert len(set(rates)) > 1
    for layout in ("ddp", "fsdp"):
        found = trained(cli, tmp_path, layout)
        assert [row["lr"] for row in found] == rates
        assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in single], rel=1e-10)
    after_3 = tmp_path / "ddp" / "checkpoints" / "step-00000009"
    found = trained(cli, tmp_path, "zero1", "--resume", str(after_3))
    assert [row["lr"] for row in found] == rates


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["evaluated=False"], "ReduceLROnPlateau"),
        (["optimizer=lbfgs"], "LBFGS computes the loss several times"),
        (["optimizer=two"], "returned list, not a torch.optim.Optimizer"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(cli: Cli, tmp_path: Path, words: str, said: str) -> None:
    (tmp_path / "plateau.py").write_text(PLATEAU)
    done = cli.on_ranks(tmp_path, "train", "plateau.py", "--layout", "ddp", "--set", *words, size=2)
    assert done.status == 2
    assert said in done.err
    assert "Traceback" not in done.err


def test_the_average_of_the_weights_is_the_same_under_every_layout(ranks: Any) -> None:
    """It is what is evaluated: on each rank's own shards, parts of matrices and stages; without it, other numbers."""
    for found in ranks(2, averages):
        for layout, value in found.items():
            if layout != "without":
                assert value == pytest.approx(found["single"], rel=1e-10), layout
        assert found["without"] != pytest.approx(found["single"], rel=1e-4)


def averages(world: World) -> dict[str, float]:
    """The loss of the evaluation."""
    found: dict[str, float] = {}
    for name in ("single", "ddp", "zero1", "fsdp", "tensor", "pipeline", "without"):
        decay = 0.9 if name != "without" else None
        workload = zoo.workload("decoder", "adamw", ema_decay=decay)
        subject = parity_case(workload, *open_data(workload, world), steps=8)
        layout = Layout(name if name != "without" else "ddp", precision="float64")
        total, count = trace(subject, layout, world, subject.planned("float64")).evaluation["loss"]
        found[name] = total / count
    return {**found, "by hand": averaged_by_hand(world)}


def averaged_by_hand(world: World) -> float:
    """The same, as a person would write it, in one process."""
    workload, layout, world = (
        zoo.workload("decoder", "adamw"),
        Layout("single", precision="float64"),
        single_process_world(world),
    )
    prepared = prepare(workload, layout, world)
    parameters = list(prepared.model.parameters())
    own = [parameter.detach().clone() for parameter in parameters]
    for _ in run_updates(prepared, zoo.Passages(23), all_updates(8, 4)):
        own = [0.9 * average + 0.1 * weight.detach() for average, weight in zip(own, parameters, strict=True)]
    with torch.no_grad():
        for parameter, average in zip(parameters, own, strict=True):
            parameter.copy_(average)
    total, count = evaluate(prepared, zoo.Passages(13))["loss"]
    return total / count


def evaluation_of(folder: Path, run: str) -> float:
    return read_records(folder / run / "record.json")[0].metrics["eval_loss"]


def test_the_average_travels_in_checkpoints(cli: Cli, tmp_path: Path) -> None:
    """Saved under ddp, gone on with under fsdp; exported weights are the average, which is what was evaluated."""
    words = ["--set", "average=0.8"]
    trained(cli, tmp_path, "ddp", *words)
    expected = evaluation_of(tmp_path, "ddp")
    after_3 = str(tmp_path / "ddp" / "checkpoints" / "step-00000009")
    trained(cli, tmp_path, "fsdp", "--resume", after_3, *words)
    assert evaluation_of(tmp_path, "fsdp") == pytest.approx(expected, rel=1e-10)
    assert main(["checkpoint", "export", str(tmp_path / "fsdp"), str(tmp_path / "w.pt")]) == 0
    line = ["train", "plateau.py", "--layout", "single:precision=float64", "--pretrained", "w.pt", "--evaluate"]
    done = cli.on_ranks(tmp_path, *line, "--json", "exported.json")
    assert done.status == 0, done.err
    exported = read_records(tmp_path / "exported.json")[0].metrics["eval_loss"]
    assert exported == pytest.approx(expected, rel=1e-6)  # exported in float32
    for out, source in (("one.jsonl", ["--pretrained", "w.pt"]), ("two.jsonl", ["--resume", "fsdp", *words])):
        assert cli.on_ranks(tmp_path, "predict", "plateau.py", *source, "--out", out).status == 0
    one, two = ((tmp_path / name).read_text().splitlines() for name in ("one.jsonl", "two.jsonl"))
    assert one == two
    words = ["--set", "average=0.5", "--resume", after_3, "--out", "other"]
    done = cli.on_ranks(tmp_path, "train", "plateau.py", "--layout", "ddp", *words, size=2)
    assert done.status == 2
    assert "trained with Workload.ema_decay=0.8" in done.err or "--set average=0.8" in done.err


WATCHED = """
import dataclasses, json
import zoo

def workload(fails=False):
    tokens, _ = zoo.Passages(3)[1]

    def on_epoch(epoch, metrics, predict):
        if fails:
            raise ValueError("my plot")
        batch = {name: value.repeat(2, 1) for name, value in tokens.items()}
        said = [float(predict(batch).double().abs().sum()) for _ in range(2)]
        with open("watched.jsonl", "a") as file:
            file.write(json.dumps([epoch, metrics["eval_loss"], *said]) + "\\n")

    return dataclasses.replace(zoo.workload("decoder", "adamw"), on_epoch=on_epoch)
"""


def test_a_function_after_each_epoch_runs_once_and_asks_the_model(cli: Cli, tmp_path: Path) -> None:
    """On rank 0, under layouts in which no rank has the whole model; the output is on the last stage in a pipeline."""
    (tmp_path / "watched.py").write_text(WATCHED)
    layouts = ["single", "ddp", "fsdp", "tensor", "context", "pipeline"]
    for layout in layouts:
        size = 1 if layout == "single" else 2
        done = cli.on_ranks(tmp_path, "train", "watched.py", "--layout", f"{layout}:precision=float64", size=size)
        assert done.status == 0, (layout, done.err)
    rows = [json.loads(line) for line in (tmp_path / "watched.jsonl").read_text().splitlines()]
    assert [row[0] for row in rows] == [0, 1] * len(layouts)
    for row in rows[2:]:
        assert row == pytest.approx(rows[row[0]], rel=1e-9)
    assert rows[0][2] == rows[0][3] != rows[1][2]


def test_what_a_function_after_an_epoch_raises_ends_the_training(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "watched.py").write_text(WATCHED)
    done = cli.on_ranks(tmp_path, "train", "watched.py", "--layout", "fsdp", "--set", "fails=True", size=2)
    assert done.status == 4
    assert "ValueError: my plot" in (tmp_path / "rank1.err").read_text()
    assert "watched.py:10 in on_epoch: ValueError: my plot" in done.err

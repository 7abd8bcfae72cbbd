"""Rules on a few events: what almost looks like a mistake, and mistakes that other tests do not show."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from everyrank.audit.events import (
    Backward,
    Clip,
    CollectiveCall,
    EvalForward,
    EvalShare,
    Event,
    Fetch,
    Forward,
    ForwardEnd,
    GroupOpened,
    LoaderBatch,
    LoaderEpoch,
    OptimizerStep,
    Save,
    SeedSet,
    Wrap,
)
from everyrank.audit.evidence import Evidence, read_evidence
from everyrank.audit.finding import Findings
from everyrank.audit.rules.batches import check_batches
from everyrank.audit.rules.clipping import check_clipping
from everyrank.audit.rules.data import check_data
from everyrank.audit.rules.evaluation import check_evaluation
from everyrank.audit.rules.randomness import check_randomness
from everyrank.audit.rules.replicas import check_replicas
from everyrank.audit.rules.saving import check_saving
from everyrank.audit.rules.speed import check_speed
from everyrank.audit.start import ScriptRun

_Kind = TypeVar("_Kind", bound=Event)
_EMPTY: dict[str, Any] = {"str": "", "int": 0, "float": 0.0, "bool": False}


def event(kind: type[_Kind], **values: Any) -> _Kind:
    """Return an event of this kind. Fields that are not given are 0, False, None or empty."""
    fields = {
        field.name: _EMPTY.get(str(field.type), [] if str(field.type).startswith("list") else {})
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    return kind(**{**fields, **values})


def found(
    rule: Callable[[Evidence, Findings], None],
    *events_by_rank: Sequence[Event],
    output: str = "",
    folder: Path = Path(),
    with_notes: bool = False,
) -> dict[str, str]:
    """Return the findings of a rule: their names and texts. Those of level NOTE only `with_notes`."""
    ranks = range(len(events_by_rank))
    run = ScriptRun(folder, len(ranks), "finished", (0,) * len(ranks), (output,) * len(ranks), 1.0)
    numbered = {
        rank: [dataclasses.replace(each, rank=rank, count=count) for count, each in enumerate(events)]
        for rank, events in enumerate(events_by_rank)
    }
    findings = Findings()
    rule(Evidence(run, list(ranks), numbered), findings)
    return {finding.rule: finding.text for finding in findings if with_notes or finding.level != "NOTE"}


def evaluation(*hits_and_sizes: tuple[int, int]) -> list[Event]:
    """Return the events of an evaluation that counts its hits in each batch."""
    return [
        each
        for hits, size in hits_and_sizes
        for each in (
            event(EvalForward),
            event(EvalShare, line="/train.py:20", value=hits / size, terms=float(size)),
        )
    ]


@pytest.mark.parametrize(
    "output", ["accuracy 0.5000", "accuracy 0.45 lr 0.5000", "accuracy 0.5000, in version 1.5e99999"]
)
def test_printed_mean_over_terms_is_not_taken_for_a_mean_of_means(output: str) -> None:
    """Few small batches have few means: that of rank 0's means is 0.5, and so is the accuracy of both ranks."""
    first, second = evaluation((4, 8), (2, 8), (3, 4)), evaluation((6, 8), (3, 8), (2, 4))
    assert found(check_evaluation, first, second, output=output) == {}


def test_learning_rate_is_not_taken_for_a_mean_of_means() -> None:
    """The accuracy has too few digits to be checked."""
    events = [event(OptimizerStep, rates=[0.1]), *evaluation((1, 10), (2, 10), (0, 5))]
    assert found(check_evaluation, events, output="accuracy high, lr 0.1000") == {}
    assert found(check_evaluation, events[1:], output="accuracy 0.1000").keys() == {"eval.mean-of-means"}
    assert found(check_evaluation, events[1:], output="accuracy 0.12 in 0.1000 s") == {}


def test_mean_recall_of_classes_is_not_a_mean_of_batches() -> None:
    """The numbers of ones of all classes follow the last forward."""
    shares = [each for each in evaluation((6, 10), (2, 5), (2, 5)) if isinstance(each, EvalShare)]
    output = "balanced accuracy 0.4667"
    assert found(check_evaluation, [event(EvalForward), *shares], output=output) == {}
    assert found(check_evaluation, evaluation((6, 10), (2, 5), (2, 5)), output=output) != {}
    batches = [
        each for share in shares for each in (event(LoaderBatch), share)
    ]  # forwards of frozen copies are unknown
    assert found(check_evaluation, batches, output=output) != {}


def training_step(*before_backward: Event, number: int = 1, line: str = "/train.py:9") -> list[Event]:
    """Return the events of a step in train mode, with these events between its batch and its backward."""
    batch = event(LoaderBatch, loader=1, number=number, row_checksums=["a"])
    forward = event(Forward, line=line, is_grad=True, is_training=True, num_batch_norms=1)
    return [batch, *before_backward, forward, event(Backward)]


def no_grad_forward(line: str, *, is_training: bool, buffers: int = 0, parameters: int = 0) -> list[Event]:
    """Return the events of a forward without gradients."""
    forward = event(Forward, line=line, is_training=is_training, num_batch_norms=1)
    end = event(EvalForward, line=line, is_training=is_training, buffers=buffers, parameters=parameters)
    return [forward, end]


@pytest.mark.parametrize(
    ("loader", "epoch", "after", "is_mistake"),
    [
        (1, 0, [event(Backward)], False),  # a generator, before the backward of the discriminator
        (1, 1, [], False),  # update_bn
        (1, 0, [], True),
        (2, 0, [], True),
    ],
)
def test_only_evaluations_in_train_mode_are_a_mistake(
    loader: int, epoch: int, after: list[Event], is_mistake: bool
) -> None:
    def events(rank: int) -> list[Event]:
        batch = event(LoaderBatch, loader=loader, epoch=epoch, number=2)
        return [*training_step(), batch, *no_grad_forward("/train.py:15", is_training=True, buffers=rank), *after]

    assert ("eval.mode" in found(check_evaluation, events(0), events(1))) is is_mistake
    assert ("replicas.buffers" in found(check_replicas, events(0), events(1))) is is_mistake


def test_averaged_model_of_one_rank_is_not_compared_with_the_model_of_the_others() -> None:
    """Rank 0 evaluates it before all ranks evaluate the model."""
    averaged, model = (no_grad_forward(f"/train.py:{line}", is_training=False, parameters=line) for line in (15, 16))
    assert found(check_replicas, [*averaged, *model], model) == {}
    assert found(check_replicas, averaged, no_grad_forward("/train.py:15", is_training=False)) != {}


@pytest.mark.parametrize(("averaged", "is_found"), [((2, 2), False), ((2, 3), True), ((2, None), False)])
def test_moving_average_of_one_rank_is_found_where_all_ranks_evaluate_it(
    averaged: tuple[int, int | None], is_found: bool
) -> None:
    """The model is evaluated first, at the same line. The moving average may also be evaluated only on rank 0."""
    line = "/train.py:15"
    model = no_grad_forward(line, is_training=False, parameters=1)
    ranks = [
        [*model, *model, *(no_grad_forward(line, is_training=False, parameters=each) if each else ())]
        for each in averaged
    ]
    assert list(found(check_replicas, *ranks)) == (["replicas.drift"] if is_found else [])


def test_other_model_in_eval_mode_is_no_forgotten_train() -> None:
    """The last forward before the generator's backward is that of a frozen network for a perceptual loss."""
    frozen = event(Forward, line="/train.py:12", is_grad=True, num_batch_norms=1)
    forgotten = event(Forward, line="/train.py:9", is_grad=True, num_batch_norms=1)
    step = training_step()
    assert "train.mode" not in found(check_evaluation, [*step, frozen, event(Backward)])
    assert "train.mode" in found(
        check_evaluation, [*step, *no_grad_forward("/e:1", is_training=False), forgotten, event(Backward)]
    )


def test_events_before_the_process_group_are_read_in_their_order(tmp_path: Path) -> None:
    """A process that the script has spawned has no rank until then."""
    seeds = [event(SeedSet, rank=-1, library="torch", seed=seed, count=seed, time=float(seed)) for seed in range(3)]
    events = [*seeds, event(GroupOpened, rank=0, backend="gloo", count=3, time=3.0)]
    lines = [json.dumps({"kind": type(each).__name__, **vars(each)}) for each in events]
    (tmp_path / "pid1.jsonl").write_text("\n".join(lines) + "\n")
    evidence = read_evidence(ScriptRun(tmp_path, 1, "finished", (0,), ("",), 1.0))
    assert [each.seed for each in evidence.of(0, SeedSet)] == [0, 1, 2]


def evaluated_epoch(indices: Sequence[int], *between: Event, **values: Any) -> list[Event]:
    """Return the events of an epoch of a loader whose samples are evaluated, and of the collectives after it."""
    fields = {"sampler": "DistributedSampler", "batch_sampler": "BatchSampler", "length": 40, "sizes": [5], **values}
    epoch = event(LoaderEpoch, loader=2, indices=list(indices), num_indices=len(indices), line="/train.py:5", **fields)
    batch = event(LoaderBatch, loader=2, number=1)
    return [epoch, batch, *no_grad_forward("/train.py:15", is_training=False), *between]


GATHER = event(CollectiveCall, op="allgather_", phase="script", lines=["/train.py:20"])


@pytest.mark.parametrize(
    ("num_indices", "sampler", "rules"),
    [
        (10, "RandomSampler", []),  # RandomSampler(data, num_samples=10): the ranks may draw the same sample
        (10, "SubsetRandomSampler", []),
        (36, "RandomSampler", ["eval.padded", "eval.dropped"]),  # drop_last
        (40, "DistributedSampler", ["eval.padded"]),
    ],
)
def test_evaluation_of_some_samples_may_be_intended(num_indices: int, sampler: str, rules: list[str]) -> None:
    ranks = [evaluated_epoch(range(start, start + num_indices), GATHER, sampler=sampler) for start in (0, 1)]
    assert list(found(check_evaluation, *ranks)) == rules


def test_samples_that_only_another_dataset_has_are_not_evaluated() -> None:
    """The training loader reads more samples, from a different dataset."""
    training = event(LoaderEpoch, loader=1, dataset="Train", length=99, indices=list(range(99)), num_indices=99)
    ranks = [[training, *evaluated_epoch(range(rank, 38, 2), GATHER)] for rank in (0, 1)]
    assert list(found(check_evaluation, *ranks)) == ["eval.dropped"]


def test_gathered_objects_may_be_kept_once_for_each_sample() -> None:
    gather = dataclasses.replace(GATHER, library_calls=["all_gather_object"])
    ranks = [evaluated_epoch([*range(rank, 39, 2), 0][:20], gather, length=39) for rank in (0, 1)]
    assert "ignore this if" in found(check_evaluation, *ranks)["eval.padded"]
    ranks = [evaluated_epoch([*range(rank, 39, 2), 0][:20], GATHER, length=39) for rank in (0, 1)]
    assert "ignore this if" not in found(check_evaluation, *ranks)["eval.padded"]


def test_skipped_batches_are_named_at_the_training_loader() -> None:
    """The script evaluates first. Its epochs are shortened, so that three batches of each are known."""

    def events(rank: int) -> list[Event]:
        epochs = [
            event(LoaderEpoch, loader=1, epoch=epoch, line="/train.py:7", used_at="/train.py:8") for epoch in (0, 1)
        ]
        steps: list[Event] = []
        for epoch, number in ((0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3)):
            steps += [
                event(LoaderBatch, loader=1, epoch=epoch, number=number, row_checksums=[f"{epoch}{number}{rank}"])
            ]
            if number % 2 == rank:
                steps += [event(Forward, is_grad=True, is_training=True), event(Backward)]
        return [*evaluated_epoch(range(40)), *epochs, *steps]

    run = ScriptRun(Path(), 2, "finished", (0, 0), ("", ""), 1.0)
    findings = Findings()
    check_batches(Evidence(run, [0, 1], {rank: events(rank) for rank in (0, 1)}), findings)
    assert [(finding.rule, finding.location) for finding in findings] == [("data.skipped", "/train.py:7")]


def test_batches_that_the_script_divides_are_compared_by_pass() -> None:
    """All ranks read the same batches. Before that, rank 0 evaluates the training loader."""

    def events(rank: int) -> list[Event]:
        all_events: list[Event] = []
        kinds = ["train", "train"] if rank else ["eval", "train", "train"]
        for epoch, kind in enumerate(kinds):
            all_events.append(event(LoaderEpoch, loader=1, epoch=epoch))
            order = "evaluation" if kind == "eval" else len(kinds) - epoch
            for number in (1, 2, 3):
                rows = [f"{order} {number}"]
                all_events.append(event(LoaderBatch, loader=1, epoch=epoch, number=number, row_checksums=rows))
                if kind == "eval":
                    all_events.append(event(Forward))
                elif number % 2 == rank:
                    all_events += [event(Forward, is_grad=True, is_training=True), event(Backward)]
        return all_events

    assert found(check_batches, events(0), events(1)) == {}


def step(**values: Any) -> OptimizerStep:
    """Return an optimizer step."""
    return event(OptimizerStep, **{"loss_scale": 1.0, **values})


def test_local_gradients_are_clipped_if_the_parameters_are_averaged_later() -> None:
    def events(rank: int, *, averages: bool) -> list[Event]:
        steps = [step(update=update, checksums={"w": rank * (update % 2) if averages else 0}) for update in range(4)]
        return [each for one in steps for each in (event(Clip, line="/train.py:9", norm=1.0 + rank, scale=1.0), one)]

    assert found(check_clipping, events(0, averages=True), events(1, averages=True)) == {}
    assert "clip.local" in found(check_clipping, events(0, averages=False), events(1, averages=False))


def test_two_optimizers_with_different_rates_are_no_schedule() -> None:
    """The checkpoint of a GAN needs no schedule."""
    save = event(Save, path="/gan.pt", line="/train.py:30", keys=["generator", "optim_d", "optim_g"])
    lines = {"/train.py:20": 4e-4, "/train.py:24": 1e-4}
    steps = [step(update=2 * n + k, line=line, rates=[lines[line]]) for n in range(4) for k, line in enumerate(lines)]
    assert found(check_saving, [*steps, save]) == {}
    assert found(check_saving, [*[dataclasses.replace(each, line="/train.py:20") for each in steps], save]) == {}
    steps[-2] = dataclasses.replace(steps[-2], rates=[1e-5])
    assert list(found(check_saving, [*steps, save])) == ["save.schedule"]


@pytest.mark.parametrize(("key", "rules"), [("optimal_threshold", []), ("optim_state", ["save.scaler"])])
def test_only_a_checkpoint_with_an_optimizer_needs_the_scaler(key: str, rules: list[str]) -> None:
    save = event(Save, path="/last.pt", line="/train.py:30", keys=["model", key])
    assert list(found(check_saving, [step(loss_scale=1024.0), save])) == rules


def test_rates_that_differ_are_those_of_one_parameter_group() -> None:
    ranks = [[step(rates=[0.5, 0.1 + rank])] for rank in (0, 1)]
    assert "0.1 on rank 0, 1.1 on rank 1" in found(check_replicas, *ranks)["replicas.rate"]


def test_parameters_that_only_another_rank_uses_are_unused(tmp_path: Path) -> None:
    """After the all-reduce they have a gradient on all ranks."""
    wrap = event(Wrap, finds_unused=True, bucket_mb=None)
    gradient = np.ones(2)
    for names_of_rank_1, rules in (["trunk", "head"], ["ddp.find-unused"]), (["trunk"], []):
        for rank, names in ((0, ["trunk", "head"]), (1, names_of_rank_1)):
            arrays = {f"backward 0 {name}": gradient for name in names}
            arrays |= {f"step {name}": gradient for name in ("trunk", "head")}
            np.savez(tmp_path / f"rank{rank}.update0.npz", **arrays)
        assert list(found(check_speed, [wrap, step()], [wrap, step()], folder=tmp_path)) == rules


@pytest.mark.parametrize(("count", "rules"), [(8, ["sync.item"]), (1, [])])
def test_waits_of_an_evaluation_are_not_those_of_each_update(count: int, rules: list[str]) -> None:
    """In the second row one update of eight follows an evaluation, which has waited many times."""
    waits = [("item", "/train.py:20", 9)]
    steps = [event(OptimizerStep, update=update, waits=waits if update < count + 1 else []) for update in range(9)]
    assert list(found(check_speed, [event(GroupOpened, backend="nccl"), *steps])) == rules


def test_line_that_waits_in_each_update_is_found_beside_an_evaluation() -> None:
    """The evaluation before update 3 waits more often, in more lines than are reported."""
    evaluation_waits = [("item", f"/train.py:{line}", 9) for line in range(20, 28)]
    steps = [
        event(OptimizerStep, update=update, waits=[("item", "/train.py:9", 1), *evaluation_waits * (update == 3)])
        for update in range(9)
    ]
    findings = found(check_speed, [event(GroupOpened, backend="nccl"), *steps])
    assert findings == {"sync.item": ".item() waits for the device 1 times an update"}


@pytest.mark.parametrize(("workers", "rules"), [(0, ["loader.starves"]), (2, [])])
def test_loader_of_the_training_is_judged(workers: int, rules: list[str]) -> None:
    """Another loader without workers is read once before the training, for example for the mean of the data."""
    other = [event(LoaderEpoch, loader=0, line="/train.py:3"), event(LoaderBatch, loader=0, number=1)]
    events: list[Event] = [*other, event(LoaderEpoch, loader=1, line="/train.py:9", workers=workers)]
    for update in range(9):
        events += [
            event(LoaderBatch, loader=1, number=update + 2, update=update, seconds=0.9),
            event(OptimizerStep, update=update, time=float(update)),
        ]
    assert list(found(check_speed, events, with_notes=True)) == rules


def test_norms_of_the_same_call_are_compared() -> None:
    """Rank 0 computes the norm once more, for its log. The norms of two updates differ."""

    def clips(*norms: float, line: int, update: int) -> list[Event]:
        values = {"line": f"/train.py:{line}", "update": update, "scale": 1.0}
        return [event(Clip, norm=norm, **values) for norm in norms]

    def norms_of_updates(scale: float, *, logs: bool) -> list[Event]:
        return [
            each
            for update in range(4)
            for line in ((8, 9) if logs else (9,))
            for each in clips(scale * (1.0 + update), line=line, update=update)
        ]

    assert found(check_clipping, norms_of_updates(1.0, logs=True), norms_of_updates(1.0, logs=False)) == {}
    assert found(check_clipping, norms_of_updates(1.0, logs=True), norms_of_updates(2.0, logs=False)) != {}


def test_parameters_without_names_on_one_rank_are_compared() -> None:
    """A rank without data steps before its first forward, which gives the parameters their names."""
    named, unnamed, other = step(checksums={"w": 1}), step(checksums={"optimizer[0]": 1}), step(checksums={"w": 2})
    assert found(check_replicas, [named], [unnamed]) == {}
    assert found(check_replicas, [named], [other]) != {}


@pytest.mark.parametrize(
    ("micros", "clipped"),
    [
        ([3], ["w"]),
        ([0], []),  # after the step before: the norm for a log
        ([1], []),  # in an earlier call of the closure of LBFGS, which begins with zero_grad
        ([1, 3], None),
    ],
)
def test_gradients_of_the_step_are_those_before_its_own_clipping(
    micros: list[int], clipped: list[str] | None, tmp_path: Path
) -> None:
    """The hooks keep only the gradients before the first clipping. The last backward is number 2."""
    arrays = {f"{kind} w": np.ones(2) for kind in ("backward 2", "step", "clip")}
    np.savez(tmp_path / "rank0.update1.npz", **arrays)
    events = [event(Backward, update=1), *(event(Clip, update=1, micro=micro, norm=1.0) for micro in micros)]
    samples = Evidence(ScriptRun(tmp_path, 1, "finished", (0,), ("",), 1.0), [0], {0: events}).gradient_samples(0, 1)
    assert (None if samples is None else list(samples.clipped)) == clipped


def test_keys_of_a_dataset_may_be_numbers_and_texts() -> None:
    indices = ["b", *range(9)]
    epochs = [
        [
            event(LoaderEpoch, loader=1, epoch=epoch, indices=indices, num_indices=10, sizes=[5], length=10),
            event(LoaderBatch, loader=1, epoch=epoch, number=1),
            event(Backward),
        ]
        for epoch in (0, 1)
    ]
    assert list(found(check_data, [*epochs[0], *epochs[1]])) == ["data.epoch"]


def test_repeated_augmentation_is_no_overlap() -> None:
    """Each sample is read three times, with other random numbers, by different ranks."""
    repeated = [number for number in range(60) for _ in range(3)]
    batch = [event(LoaderBatch, loader=1, number=1), event(Backward)]
    for sampler, rules in ("RASampler", []), ("MySampler", ["data.overlap"]):
        ranks = [
            [
                event(LoaderEpoch, loader=1, sampler=sampler, indices=own, num_indices=len(own), sizes=[5], length=60),
                *batch,
            ]
            for own in (repeated[rank::4] for rank in range(4))
        ]
        assert list(found(check_data, *ranks)) == rules


@pytest.mark.parametrize("is_split", [False, True])
def test_equal_augmentation_is_right_if_ranks_split_layers(is_split: bool) -> None:
    """Under tensor parallelism, all ranks need the same samples."""
    fetch = event(Fetch, dataset="Images", before=[1, 1, 1], after=[2, 1, 1])
    events = [fetch, event(OptimizerStep, is_split=is_split, is_sharded=is_split)]
    assert ("random.augment" in found(check_randomness, events, events)) is not is_split


def test_equal_dropout_is_found_before_a_second_forward_without_dropout() -> None:
    """Each step also calls a model in eval mode, for example a teacher or a perceptual loss."""
    events = [
        event(Forward, is_grad=True, is_training=True, generator=5),
        event(ForwardEnd, num_dropouts=1),
        event(Forward, is_grad=True, generator=6),
        event(ForwardEnd),
    ]
    assert "random.dropout" in found(check_randomness, events, events)


def test_evaluation_of_the_training_loader_by_rank_0_is_no_overlap() -> None:
    """Rank 0 reads the loader once more than rank 1, before the training, so its epochs have other numbers."""
    orders = [random.Random(epoch).sample(range(64), 64) for epoch in range(3)]

    def passes(rank: int, num_evaluations: int) -> list[Event]:
        events: list[Event] = []
        for epoch in range(num_evaluations + 2):
            is_evaluation = epoch < num_evaluations
            own = orders[2] if is_evaluation else orders[epoch - num_evaluations][rank::2]
            fields = {"indices": own, "num_indices": len(own), "sizes": [4], "length": 64, "samples": own}
            rows = {"row_checksums": [str(index) for index in own[:4]], "num_samples": 4}
            forward = event(Forward, is_grad=not is_evaluation, is_training=not is_evaluation, **rows)
            step = [forward] if is_evaluation else [forward, event(Backward)]
            events += [event(LoaderEpoch, loader=1, epoch=epoch, sampler="DistributedSampler", **fields)]
            events += [event(LoaderBatch, loader=1, epoch=epoch, number=1), *step]
        return events

    assert found(check_data, passes(0, 1), passes(1, 0)) == {}
    look = [event(LoaderEpoch, loader=1, epoch=0), event(LoaderBatch, loader=1, epoch=0, number=1)]
    after_look = [
        dataclasses.replace(each, epoch=each.epoch + 1) if isinstance(each, LoaderEpoch | LoaderBatch) else each
        for each in passes(0, 0)
    ]
    assert found(check_data, [*look, *after_look], passes(1, 0)) == {}  # rank 0 looks at one batch, for example
    assert "data.same" in found(check_data, passes(0, 1), passes(0, 0))


def test_evaluation_of_the_training_loader_by_rank_0_has_no_shards() -> None:
    """Rank 1 trains in the epoch of the same number. Then both ranks validate, and add up their results."""
    orders = [random.Random(epoch).sample(range(64), 64) for epoch in range(2)]

    def read(rank: int, epoch: int, order: list[int], *steps: Event) -> list[Event]:
        fields = {"sampler": "DistributedSampler", "batch_sampler": "BatchSampler", "length": 64, "sizes": [4]}
        indices = order[rank::2]
        first = event(LoaderEpoch, loader=1, epoch=epoch, indices=indices, num_indices=len(indices), **fields)
        return [first, event(LoaderBatch, loader=1, epoch=epoch, number=1), *steps]

    training = [event(Forward, is_grad=True, is_training=True), event(Backward)]
    ranks = [
        [*read(0, 0, orders[0], *training), *read(0, 1, orders[0], *no_grad_forward("/train.py:9", is_training=False))],
        [*read(1, 0, orders[0], *training), *read(1, 1, orders[1], *training)],
    ]
    ranks = [[*events, *evaluated_epoch(range(rank, 40, 2), GATHER)] for rank, events in enumerate(ranks)]
    assert found(check_evaluation, *ranks) == {}

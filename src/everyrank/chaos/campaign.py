"""run_campaign: train a baseline, then inject each fault into the same training, resume it and compare the results.

A run resumes as a user would: with --resume, or from the checkpoint that the error message suggests. Then the losses,
the metrics and all tensors of the last checkpoint (model, optimizer, random generators) are compared with the baseline,
bit by bit.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everyrank.chaos.faults import FAULTS, OWN_DISK, TWO_HOSTS, Fault, select_faults, why_unnoticed
from everyrank.chaos.trainer_run import TrainCall, TrainerRun, run_trainer, why_no_disk
from everyrank.chaos.two_hosts import NUM_HOSTS, RENDEZVOUS, why_no_link
from everyrank.errors import CannotRunError, EveryrankError, UsageError
from everyrank.launch import Launch, stop_before_ranks
from everyrank.layout import Layout
from everyrank.options import ChaosOptions
from everyrank.record import Parity, Record, read_records
from everyrank.runs import Checkpoint, checkpoints_of, damage, find_checkpoint
from everyrank.runs.folder import last_good
from everyrank.workload import Source

__all__ = [
    "Baseline",
    "compare_runs",
    "corrupt_checkpoint",
    "inject_fault",
    "logged_updates",
    "run_campaign",
    "train_baseline",
]

_START_SECONDS = 120.0  # time limit for the start of a run, enough for a busy machine
_UPDATE_SECONDS = 5.0
_NOTICE_SECONDS = 15.0  # time after --timeout in which the error has to be printed and all ranks have to end
_DISK_CHECKPOINTS = 12  # checkpoints that fit on the separate disk
_DISK_BYTES = 4 << 20  # space for the other files of a run


@dataclass(frozen=True)
class Baseline:
    """The training without a fault: its call, Record and folder, and the time limit of each of its runs."""

    call: TrainCall
    layout: Layout
    launch: Launch
    limit_seconds: float
    record: Record
    run: Path

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.launch.processes


def run_campaign(
    source: Source,
    layouts: list[Layout],
    launch: Launch,
    options: ChaosOptions,
    on_record: Callable[[Record], None] = lambda _: None,
) -> list[Record]:
    """Return a Record for each layout and fault, with the outcome under `chaos` in its provenance.

    `on_record` is called with each Record as soon as it is known. Raises `UsageError` for an unknown fault,
    `LayoutError` for a layout that does not fit the ranks, `CannotRunError` on other systems than Linux, and
    `EveryrankError` if the baseline fails.
    """
    names = select_faults(list(options.faults))
    if sys.platform != "linux":
        raise CannotRunError("chaos reads /proc to find the processes that a fault leaves; run it on Linux")
    for layout in layouts:
        layout.check_processes(launch.processes)
    stop_before_ranks()
    records: list[Record] = []
    folder = Path(tempfile.mkdtemp(prefix="everyrank-chaos-"))
    try:
        for index, layout in enumerate(layouts):
            local_baseline = train_baseline(source, layout, launch, options, folder / str(index))
            linked_baseline: Baseline | None = None
            for name in names:
                baseline = local_baseline
                if FAULTS[name].needs == TWO_HOSTS and not _why_skipped(local_baseline, name):
                    linked_folder = folder / f"{index}-on-hosts"
                    linked_baseline = linked_baseline or train_baseline(
                        source, layout, _launch_on_two_hosts(launch), options, linked_folder
                    )
                    baseline = linked_baseline
                record = inject_fault(baseline, name, options, folder / str(index) / name)
                records.append(record)
                on_record(record)
                shutil.rmtree(folder / str(index) / name, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return records


def _launch_on_two_hosts(launch: Launch) -> Launch:
    """Return a launch on two hosts over gloo, because shared memory would not use the link."""
    return Launch(
        processes=launch.processes,
        device="cpu",
        backend="gloo",
        timeout_seconds=launch.timeout_seconds,
        start_timeout_seconds=launch.start_timeout_seconds,
        nodes=NUM_HOSTS,
        node_rank=0,
        rendezvous=RENDEZVOUS,
    )


def train_baseline(source: Source, layout: Layout, launch: Launch, options: ChaosOptions, folder: Path) -> Baseline:
    """Train once in float64 without a fault. Raises `EveryrankError` if the training fails."""
    if layout.precision == "float32":  # float64 shows the smallest differences
        layout = dataclasses.replace(layout, precision="float64")
    if options.steps <= 3 * options.save_every + 1:
        raise UsageError(
            f"--steps {options.steps} --save-every {options.save_every}: a fault is injected between two checkpoints; "
            f"use --steps {3 * options.save_every + 2} or more"
        )
    call = TrainCall(
        source=dataclasses.asdict(source),
        layout=str(layout),
        launch=dataclasses.asdict(dataclasses.replace(launch, logs=None)),
        run=str(folder / "baseline"),
        steps=options.steps,
        save_every=options.save_every,
        guard_every=options.guard_every,
    )
    limit = _limit_seconds(launch, options)
    run_result = run_trainer(call, folder / "baseline", limit)
    if run_result.status is None:
        raise EveryrankError(
            f"layout {layout}: the baseline run did not end within {limit:.0f} s; use fewer --steps, or a longer "
            f"{launch.start_flag}, which increases this limit"
        )
    if run_result.status != 0:
        raise EveryrankError(f"layout {layout}: the baseline run failed without a fault: {run_result.message}")
    run = Path(call.run)
    [record] = read_records(run / "record.json")
    return Baseline(call, layout, launch, limit, record, run)


def inject_fault(baseline: Baseline, name: str, options: ChaosOptions, folder: Path) -> Record:
    """Inject one fault at a random update (from the seed), resume the training, and return the outcome."""
    generator = random.Random(f"{options.seed} {baseline.layout} {name}")  # noqa: S311
    fault = FAULTS[name]
    # after the first checkpoint; after the second if the fault corrupts the newest checkpoint
    first_update = (2 if fault.corrupts else 1) * options.save_every + 1
    update = generator.randrange(first_update, options.steps - options.save_every)
    rank = generator.randrange(baseline.size)
    outcome: dict[str, Any] = {"fault": name, "what": fault.description, "update": update, "rank": rank}
    reason = _why_skipped(baseline, name)
    if reason:
        return _record(baseline, options, outcome | {"status": "not run here", "reason": reason}, None)
    if name == "full-disk":
        rank = outcome["rank"] = 0  # rank 0 also frees the space again
    run = folder / "run"
    call = dataclasses.replace(baseline.call, run=str(run))
    end_update = (update // options.save_every + 1) * options.save_every
    injection = {"fault": name, "update": update, "rank": rank, "journal": "", "until": end_update}
    call_with_fault = dataclasses.replace(call, injections=[injection])
    limit = baseline.limit_seconds
    first = run_trainer(call_with_fault, folder / "first", limit, _disk_bytes(baseline, name))
    outcome |= _detection(fault, first, baseline, rank)
    outcome["left"] = first.num_left
    if first.status != 0:
        outcome |= _recover(fault, call, first, folder, limit, generator, update)
    elif not fault.ends:
        outcome |= {"recover_seconds": None, "resumed_at": None, "updates_lost": 0}
    if first.injected_at is None:
        outcome |= {"is_noticed": False, "said": f"the fault was never injected: {first.message}"}
    parity = compare_runs(baseline.run, run, options.steps)
    if parity.status != "equal" or not outcome["is_noticed"]:
        outcome["reason"] = why_unnoticed(name, baseline.layout, baseline.size)
    return _record(baseline, options, outcome | {"status": _status(fault, outcome, parity, options)}, parity)


def _why_skipped(baseline: Baseline, name: str) -> str:
    """Return the reason why this fault cannot be injected here; "" if it can."""
    if FAULTS[name].needs == TWO_HOSTS:
        return f"{baseline.size} ranks do not divide over two hosts" if baseline.size % NUM_HOSTS else why_no_link()
    if baseline.size == 1 and name in _NEED_TWO_RANKS:
        return "this fault needs at least two ranks"
    return why_no_disk(baseline.run.parent) if FAULTS[name].needs else ""


_NEED_TWO_RANKS = ("stop-rank", "mismatched-collective", "flipped-bit")


def _limit_seconds(launch: Launch, options: ChaosOptions) -> float:
    """Return the time limit of a run, enough for a busy machine."""
    longest_wait = max(launch.timeout_seconds, launch.start_seconds)
    return _START_SECONDS + 2 * longest_wait + options.steps * _UPDATE_SECONDS


def _disk_bytes(baseline: Baseline, name: str) -> int:
    """Return the size of the separate disk, 0 if the fault needs none."""
    if FAULTS[name].needs != OWN_DISK:
        return 0
    files = find_checkpoint(baseline.run).metadata.files.values()
    return _DISK_CHECKPOINTS * sum(size for size, _ in files) + _DISK_BYTES


def _detection(fault: Fault, first: TrainerRun, baseline: Baseline, rank: int) -> dict[str, Any]:
    """Return the fields that describe the detection: is_noticed, seen_by, said (the message) and notice_seconds."""
    bound_seconds = baseline.launch.timeout_seconds + _NOTICE_SECONDS
    outcome: dict[str, Any] = {
        "seen_by": fault.noticed_by,
        "bound_seconds": bound_seconds,
        "said": "",
        "notice_seconds": None,
    }
    injected_at = first.injected_at or first.started_at
    if not fault.ends:
        lines = [(at, line) for at, line in first.lines if at > injected_at and fault.is_reported_in(line, rank)]
        if lines:
            outcome |= {"said": lines[0][1], "notice_seconds": lines[0][0] - injected_at}
        return outcome | {"is_noticed": bool(lines) or (not fault.message_pattern and first.status == 0)}
    if not fault.message_pattern:  # the fault killed the process that reports errors; the others have to end
        return outcome | {"is_noticed": first.num_left == 0, "notice_seconds": first.all_ended_at - injected_at}
    is_noticed = first.status not in (None, 0) and fault.is_reported_in(first.message, rank)
    seconds = first.ended_at - injected_at if is_noticed else None
    return outcome | {"is_noticed": is_noticed, "said": first.message, "notice_seconds": seconds}


def _recover(
    fault: Fault, call: TrainCall, first: TrainerRun, folder: Path, limit: float, generator: random.Random, update: int
) -> dict[str, Any]:
    """Resume as a user would and train to the end. Returns the fields that describe the recovery."""
    run, outcome = Path(call.run), dict[str, Any]()
    last_update = max(update, len(logged_updates(run)))  # the log is written some updates late
    resume, ended_at = str(run), first.all_ended_at
    if fault.corrupts and (checkpoints := checkpoints_of(run)):
        newest = checkpoints[-1]
        corrupt_checkpoint(newest, fault.corrupts, generator)
        refused = run_trainer(dataclasses.replace(call, resume=resume), folder / "refused", limit)
        is_noticed = refused.status == 2 and fault.is_reported_in(refused.message, 0)
        outcome |= {
            "is_noticed": is_noticed,
            "said": refused.message,
            "notice_seconds": refused.ended_at - refused.started_at,
        }
        undamaged = last_good(newest.path)
        resume, ended_at = str(undamaged.path) if undamaged is not None else resume, refused.all_ended_at
        outcome["left"] = first.num_left + refused.num_left
    undamaged_steps = [checkpoint.metadata.step for checkpoint in checkpoints_of(run) if damage(checkpoint) is None]
    resumed = run_trainer(dataclasses.replace(call, resume=resume), folder / "resumed", limit)
    outcome["left"] = outcome.get("left", first.num_left) + resumed.num_left
    outcome |= {
        "resumed_at": None,
        "updates_lost": None,
        "recover_seconds": None,
        "newest_whole": max(undamaged_steps, default=0),
    }
    if resumed.status == 0:
        resumed_at = read_records(run / "record.json")[0].provenance["resumed_at_update"]
        caught_up_at = next(
            (row["time"] for row in logged_updates(run) if row["step"] == max(resumed_at, last_update - 1)), None
        )
        seconds = caught_up_at - ended_at if caught_up_at is not None else None
        outcome |= {
            "resumed_at": resumed_at,
            "updates_lost": max(0, last_update - resumed_at),
            "recover_seconds": seconds,
        }
    else:
        outcome["recovery_failed"] = resumed.message
    return outcome


def corrupt_checkpoint(newest: Checkpoint, corruption: str, generator: random.Random) -> None:
    """Truncate the largest file of a checkpoint to two thirds, or flip one of its bits."""
    path = max((newest.path / name for name in newest.metadata.files), key=lambda file: file.stat().st_size)
    content = bytearray(path.read_bytes())
    if corruption == "cut":
        content = content[: len(content) * 2 // 3]
    else:
        content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    path.write_bytes(content)


def _status(fault: Fault, outcome: dict[str, Any], parity: Parity, options: ChaosOptions) -> str:
    """Return `held`, `unseen` (the fault cannot be noticed, for a known reason), or a description of the failure."""
    if outcome["left"]:
        return "processes left"
    if outcome.get("reason"):
        return "unseen"
    if not outcome["is_noticed"]:
        return "not noticed"
    if (outcome["notice_seconds"] or 0.0) > outcome["bound_seconds"]:
        return "noticed late"
    if "recovery_failed" in outcome:
        return "not recovered"
    if parity.status != "equal":
        return "another training"
    # After the launcher is killed, ranks may make a few more updates, which are lost if they are not saved.
    allowed = options.save_every * (2 if fault.corrupts else 1)
    return "held" if outcome["updates_lost"] <= allowed else "too much lost"


def _record(baseline: Baseline, options: ChaosOptions, outcome: dict[str, Any], parity: Parity | None) -> Record:
    provenance = dict(baseline.record.provenance)
    provenance["command"] = shlex.join(options.command)
    provenance["chaos"] = outcome | {"steps": options.steps, "save_every": options.save_every, "seed": options.seed}
    return Record(
        workload=baseline.record.workload,
        layout=baseline.record.layout,
        launcher=baseline.record.launcher,
        backend=baseline.record.backend,
        device=baseline.record.device,
        world_size=baseline.record.world_size,
        parity=parity or Parity("not_verified", reason=outcome["reason"]),
        provenance=provenance,
    )


# --- comparison of a run with the baseline


def logged_updates(run: Path) -> list[dict[str, Any]]:
    """Return the rows of the updates in the log of a run; skip incomplete lines."""
    path, rows = run / "log.jsonl", list[dict[str, Any]]()
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if "step" in row:
            rows.append(row)
    return rows


def compare_runs(baseline: Path, run: Path, steps: int) -> Parity:
    """Compare a run with the baseline: losses, metrics, and all tensors of the last checkpoint."""
    losses, baseline_losses = (
        {row["step"]: row["loss"] for row in logged_updates(run_folder)} for run_folder in (run, baseline)
    )
    if (
        losses.keys() != baseline_losses.keys()
        or len(logged_updates(run)) != steps
        or not (run / "record.json").exists()
    ):
        return Parity("different", first_divergence=f"{len(losses)} of {steps} updates are logged")
    from everyrank.parity.reference import relative

    differences = {f"update {step}": relative(loss, losses[step]) for step, loss in baseline_losses.items()}
    differences["the metrics at the end"] = _metrics_difference(run, baseline)
    largest = max(differences.values())
    first = next((name for name, difference in differences.items() if difference != 0.0), None)
    exact = first is None
    scope = f"{steps} updates, and all tensors of the last checkpoint"
    if largest <= _TOLERANCE:
        tensor_name = _first_different_tensor(find_checkpoint(run), find_checkpoint(baseline), exact)
        if tensor_name is None:
            return Parity("equal", exact, largest, _TOLERANCE, scope, first_divergence=first)
        first = first or tensor_name
    return Parity("different", False, largest, _TOLERANCE, scope, first_divergence=first)


_TOLERANCE = 1e-12  # for losses, if a restart changes the order of additions
_TENSOR_TOLERANCE = 1e-9  # for weights and optimizer state, whose rounding errors are larger relative to their values


def _metrics_difference(run: Path, baseline: Path) -> float:
    """Return the largest relative difference of the metrics; infinite if their names or NaN values differ."""
    from everyrank.parity.reference import relative

    metrics, baseline_metrics = (read_records(folder / "record.json")[0].metrics for folder in (run, baseline))
    if metrics.keys() != baseline_metrics.keys():
        return math.inf
    pairs = [(baseline_metrics[name], value) for name, value in metrics.items()]
    return max((relative(*pair) for pair in pairs if not all(map(math.isnan, pair))), default=0.0)


def _first_different_tensor(first: Checkpoint, other_checkpoint: Checkpoint, exact: bool) -> str | None:
    """Return the name of the first tensor that differs: in any bit if `exact`, else by more than the tolerance."""
    import torch

    from everyrank.checkpoint.storage import contents_of, read

    tensors_of_each: list[dict[str, Any]] = []
    for checkpoint in (first, other_checkpoint):
        entries = contents_of(checkpoint)
        tensors = {
            name: torch.zeros(metadata.size, dtype=metadata.properties.dtype) for name, metadata in entries.items()
        }
        read(tensors, checkpoint)
        tensors_of_each.append(tensors)
    names = sorted(tensors_of_each[0].keys() | tensors_of_each[1].keys())
    return next(
        (name for name in names if not _is_same(tensors_of_each[0].get(name), tensors_of_each[1].get(name), exact)),
        None,
    )


def _is_same(tensor: Any, other_tensor: Any, exact: bool) -> bool:
    import torch

    if (
        tensor is None
        or other_tensor is None
        or tensor.dtype != other_tensor.dtype
        or tensor.shape != other_tensor.shape
    ):
        return False
    if exact or not tensor.is_floating_point():  # compare bits, because a generator state may hold NaN
        return torch.equal(tensor.reshape(-1).view(torch.uint8), other_tensor.reshape(-1).view(torch.uint8))
    return torch.allclose(tensor, other_tensor, rtol=_TENSOR_TOLERANCE, atol=_TENSOR_TOLERANCE, equal_nan=True)

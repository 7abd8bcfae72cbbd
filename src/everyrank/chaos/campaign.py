"""run_campaign: a baseline training, then the same with each fault: inject, detect, resume, compare.

A run resumes as a user would resume it: with --resume, or with the checkpoint that the error message offers. It is then
compared with the baseline bit by bit: every loss, the metrics, and every tensor of the last checkpoint (model,
optimizer, random generators).
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import shlex
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everyrank.chaos.faults import FAULTS, OWN_DISK, TWO_HOSTS, Fault, faults_named, why_unseen
from everyrank.chaos.trainer_run import TrainCall, TrainerRun, run_trainer, why_no_disk
from everyrank.chaos.two_hosts import NUM_HOSTS, RENDEZVOUS, why_no_link
from everyrank.errors import EveryrankError, UsageError
from everyrank.launch import Launch
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

_START_SECONDS = 120.0  # longest start of a run, on a busy machine
_UPDATE_SECONDS = 5.0
_NOTICE_SECONDS = 15.0  # time after --timeout in which the error has to be printed and all ranks have to end
_DISK_CHECKPOINTS = 12  # checkpoints that fit on the separate disk
_DISK_BYTES = 4 << 20  # for the other files of a run


@dataclass(frozen=True)
class Baseline:
    """The training without a fault: its call, Record and folder."""

    call: TrainCall
    layout: Layout
    size: int
    timeout_seconds: float
    record: Record
    run: Path


def run_campaign(
    source: Source,
    layouts: list[Layout],
    launch: Launch,
    options: ChaosOptions,
    note: Callable[[Record], None] = lambda _: None,
) -> list[Record]:
    """Return a Record for each layout and fault, with the outcome under `chaos` in its provenance.

    `note` is called with each Record at once. Raises `UsageError` for an unknown fault, and `EveryrankError` if the
    baseline fails.
    """
    names = faults_named(list(options.faults))
    records: list[Record] = []
    folder = Path(tempfile.mkdtemp(prefix="everyrank-chaos-"))
    try:
        for number, layout in enumerate(layouts):
            local_baseline = train_baseline(source, layout, launch, options, folder / str(number))
            linked_baseline: Baseline | None = None
            for name in names:
                baseline = local_baseline
                if FAULTS[name].needs == TWO_HOSTS and not _why_not(local_baseline, name):
                    on_hosts = folder / f"{number}-on-hosts"
                    linked_baseline = linked_baseline or train_baseline(
                        source, layout, _over_link(launch), options, on_hosts
                    )
                    baseline = linked_baseline
                record = inject_fault(baseline, name, options, folder / str(number) / name)
                records.append(record)
                note(record)
                shutil.rmtree(folder / str(number) / name, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return records


def _over_link(launch: Launch) -> Launch:
    """Return the launch on two hosts, over gloo, because shared memory would not use the link."""
    return Launch(
        processes=launch.processes,
        device="cpu",
        backend="gloo",
        timeout_seconds=launch.timeout_seconds,
        nodes=NUM_HOSTS,
        node_rank=0,
        rendezvous=RENDEZVOUS,
    )


def train_baseline(source: Source, layout: Layout, launch: Launch, options: ChaosOptions, folder: Path) -> Baseline:
    """Train once in float64 without a fault. Raises `EveryrankError` if that fails."""
    if layout.precision == "float32":  # float64 shows the smallest differences
        layout = dataclasses.replace(layout, precision="float64")
    layout.mesh(launch.processes)
    if options.steps <= 3 * options.save_every + 1:
        raise UsageError(
            f"--steps {options.steps} --save-every {options.save_every}: a fault strikes between two checkpoints; "
            f"give more than {3 * options.save_every + 1} steps"
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
    done = run_trainer(call, folder / "baseline", _limit_seconds(launch.timeout_seconds, options))
    if done.status != 0:
        raise EveryrankError(f"layout {layout}: the baseline run failed without a fault: {done.message}")
    run = Path(call.run)
    [record] = read_records(run / "record.json")
    return Baseline(call, layout, launch.processes, launch.timeout_seconds, record, run)


def inject_fault(baseline: Baseline, name: str, options: ChaosOptions, folder: Path) -> Record:
    """Inject one fault at an update that the seed selects, resume, and return the outcome."""
    draw = random.Random(f"{options.seed} {baseline.layout} {name}")  # noqa: S311
    fault = FAULTS[name]
    # after the first checkpoint, and after the second if the fault corrupts the newest
    first_possible = (2 if fault.corrupts else 1) * options.save_every + 1
    update = draw.randrange(first_possible, options.steps - options.save_every)
    rank = draw.randrange(baseline.size)
    outcome: dict[str, Any] = {"fault": name, "what": fault.what, "update": update, "rank": rank}
    why_not = _why_not(baseline, name)
    if why_not:
        return _record(baseline, options, outcome | {"status": "not run here", "reason": why_not}, None)
    if name == "full-disk":
        rank = outcome["rank"] = 0  # any rank could fill it, but rank 0 frees the space again
    run = folder / "run"
    call = dataclasses.replace(baseline.call, run=str(run))
    until = (update // options.save_every + 1) * options.save_every
    injection = {"fault": name, "update": update, "rank": rank, "journal": "", "until": until}
    call_with_fault = dataclasses.replace(call, injections=[injection])
    limit = _limit_seconds(baseline.timeout_seconds, options)
    first = run_trainer(call_with_fault, folder / "first", limit, _disk_bytes(baseline, name))
    outcome |= _noticed(fault, first, baseline, rank)
    outcome["left"] = first.left
    if first.status != 0:
        outcome |= _recover(fault, call, first, folder, limit, draw, update)
    elif not fault.ends:
        outcome |= {"recover_seconds": None, "resumed_at": None, "updates_lost": 0}
    if first.injected_at is None:
        outcome |= {"is_noticed": False, "said": f"the fault was never injected: {first.message}"}
    parity = compare_runs(baseline.run, run, options.steps)
    if parity.status != "equal" or not outcome["is_noticed"]:
        outcome["reason"] = why_unseen(name, baseline.layout, baseline.size)
    return _record(baseline, options, outcome | {"status": _status(fault, outcome, parity, options)}, parity)


def _why_not(baseline: Baseline, name: str) -> str:
    """Return why this fault cannot be tried here, "" if it can."""
    if FAULTS[name].needs == TWO_HOSTS:
        return f"{baseline.size} ranks do not divide over two hosts" if baseline.size % NUM_HOSTS else why_no_link()
    if baseline.size == 1 and name in _OF_SEVERAL:
        return "this fault needs at least two ranks"
    return why_no_disk(baseline.run.parent) if FAULTS[name].needs else ""


_OF_SEVERAL = ("stop-rank", "mismatched-collective", "flipped-bit")


def _limit_seconds(timeout_seconds: float, options: ChaosOptions) -> float:
    """Return the time limit of a run, long enough for a busy machine."""
    return _START_SECONDS + 2 * timeout_seconds + options.steps * _UPDATE_SECONDS


def _disk_bytes(baseline: Baseline, name: str) -> int:
    """Return the size of the separate disk, 0 if the fault needs none."""
    if FAULTS[name].needs != OWN_DISK:
        return 0
    files = find_checkpoint(baseline.run).metadata.files.values()
    return _DISK_CHECKPOINTS * sum(size for size, _ in files) + _DISK_BYTES


def _noticed(fault: Fault, first: TrainerRun, baseline: Baseline, rank: int) -> dict[str, Any]:
    """Return whether the fault was noticed, by whom, the message, and after how many seconds."""
    bound = baseline.timeout_seconds + _NOTICE_SECONDS
    outcome: dict[str, Any] = {"seen_by": fault.seen_by, "bound_seconds": bound, "said": "", "notice_seconds": None}
    begun = first.injected_at or first.begun
    if not fault.ends:
        lines = [(at, line) for at, line in first.lines if at > begun and fault.is_said_in(line, rank)]
        if lines:
            outcome |= {"said": lines[0][1], "notice_seconds": lines[0][0] - begun}
        return outcome | {"is_noticed": bool(lines) or (not fault.says and first.status == 0)}
    if not fault.says:  # the process that would report it is gone: the others have to end
        return outcome | {"is_noticed": first.left == 0, "notice_seconds": first.cleared - begun}
    is_noticed = first.status not in (None, 0) and fault.is_said_in(first.message, rank)
    seconds = first.ended - begun if is_noticed else None
    return outcome | {"is_noticed": is_noticed, "said": first.message, "notice_seconds": seconds}


def _recover(
    fault: Fault, call: TrainCall, first: TrainerRun, folder: Path, limit: float, draw: random.Random, update: int
) -> dict[str, Any]:
    """Resume as a user would and train to the end. Returns the updates and seconds that it cost."""
    run, outcome = Path(call.run), dict[str, Any]()
    reached = max(update, len(logged_updates(run)))  # the log lags by some updates
    resume, ended = str(run), first.cleared
    if fault.corrupts and (checkpoints := checkpoints_of(run)):
        newest = checkpoints[-1]
        corrupt_checkpoint(newest, fault.corrupts, draw)
        refused = run_trainer(dataclasses.replace(call, resume=resume), folder / "refused", limit)
        is_noticed = refused.status == 2 and fault.is_said_in(refused.message, 0)
        outcome |= {"is_noticed": is_noticed, "said": refused.message, "notice_seconds": refused.ended - refused.begun}
        good = last_good(newest.path)
        resume, ended = str(good.path) if good is not None else resume, refused.cleared
        outcome["left"] = first.left + refused.left
    whole = [checkpoint.metadata.step for checkpoint in checkpoints_of(run) if damage(checkpoint) is None]
    again = run_trainer(dataclasses.replace(call, resume=resume), folder / "again", limit)
    outcome["left"] = outcome.get("left", first.left) + again.left
    outcome |= {
        "resumed_at": None,
        "updates_lost": None,
        "recover_seconds": None,
        "newest_whole": max(whole, default=0),
    }
    if again.status == 0:
        resumed_at = read_records(run / "record.json")[0].provenance["resumed_at_update"]
        back = next((row["time"] for row in logged_updates(run) if row["step"] == max(resumed_at, reached - 1)), None)
        seconds = back - ended if back is not None else None
        outcome |= {"resumed_at": resumed_at, "updates_lost": max(0, reached - resumed_at), "recover_seconds": seconds}
    else:
        outcome["recovery_failed"] = again.message
    return outcome


def corrupt_checkpoint(newest: Checkpoint, how: str, draw: random.Random) -> None:
    """Truncate the largest file of a checkpoint to two thirds, or flip one of its bits."""
    path = max((newest.path / name for name in newest.metadata.files), key=lambda file: file.stat().st_size)
    content = bytearray(path.read_bytes())
    if how == "cut":
        content = content[: len(content) * 2 // 3]
    else:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def _status(fault: Fault, outcome: dict[str, Any], parity: Parity, options: ChaosOptions) -> str:
    """Return `held`, `unseen` if the fault cannot be noticed for a known reason, or else what failed."""
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
    lost, allowed = outcome["updates_lost"], options.save_every * (2 if fault.corrupts else 1)
    # ranks of a killed launcher run on for a moment and may lose the updates since their last save
    return "held" if lost <= allowed else "too much lost"


def _record(baseline: Baseline, options: ChaosOptions, outcome: dict[str, Any], parity: Parity | None) -> Record:
    source = dict(baseline.record.provenance)
    source["command"] = shlex.join(options.command)
    source["chaos"] = outcome | {"steps": options.steps, "save_every": options.save_every, "seed": options.seed}
    return Record(
        workload=baseline.record.workload,
        layout=baseline.record.layout,
        launcher=baseline.record.launcher,
        backend=baseline.record.backend,
        device=baseline.record.device,
        world_size=baseline.record.world_size,
        parity=parity or Parity("not_verified", reason=outcome["reason"]),
        provenance=source,
    )


# --- comparison of a run with the baseline


def logged_updates(run: Path) -> list[dict[str, Any]]:
    """Return the updates in the log of a run, without truncated lines."""
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
    ours, theirs = ({row["step"]: row["loss"] for row in logged_updates(run_folder)} for run_folder in (run, baseline))
    if ours.keys() != theirs.keys() or len(logged_updates(run)) != steps or not (run / "record.json").exists():
        return Parity("different", first_divergence=f"{len(ours)} of {steps} updates are logged")
    apart = {step: abs(ours[step] - loss) / max(abs(loss), 1e-300) for step, loss in theirs.items()}
    far = max(apart.values(), key=lambda distance: (math.isnan(distance), distance))
    first = next((f"update {step}" for step, distance in apart.items() if distance != 0.0), None)
    metrics = read_records(run / "record.json")[0].metrics
    exact = first is None
    if exact and metrics != read_records(baseline / "record.json")[0].metrics:
        first = "the metrics at the end"
    scope = f"{steps} updates, and all tensors of the last checkpoint"
    if first is None or far <= _TOLERANCE:
        other = _other_tensor(find_checkpoint(run), find_checkpoint(baseline), exact)
        if other is None:
            return Parity("equal", exact, far, _TOLERANCE, scope, first_divergence=first)
        first = first or other
    return Parity("different", False, far, _TOLERANCE, scope, first_divergence=first)


_TOLERANCE = 1e-12  # of the losses, where a restart changes the order of additions
_TENSOR_TOLERANCE = 1e-9  # of weights and optimizer state then: small ones are differences of large ones


def _other_tensor(first: Checkpoint, second: Checkpoint, exact: bool) -> str | None:
    """Return the first tensor that differs: bit by bit if `exact`, else beyond the tolerance."""
    import torch

    from everyrank.checkpoint.storage import contents_of, read

    tensors_of_each: list[dict[str, Any]] = []
    for checkpoint in (first, second):
        entries = contents_of(checkpoint)
        tensors = {
            name: torch.zeros(metadata.size, dtype=metadata.properties.dtype) for name, metadata in entries.items()
        }
        read(tensors, checkpoint)
        tensors_of_each.append(tensors)
    names = sorted(tensors_of_each[0].keys() | tensors_of_each[1].keys())
    return next(
        (name for name in names if not _same(tensors_of_each[0].get(name), tensors_of_each[1].get(name), exact)), None
    )


def _same(first: Any, second: Any, exact: bool) -> bool:
    import torch

    if first is None or second is None or first.dtype != second.dtype or first.shape != second.shape:
        return False
    if exact or not first.is_floating_point():  # bits: a state of a generator may hold NaN
        return torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))
    return torch.allclose(first, second, rtol=_TENSOR_TOLERANCE, atol=_TENSOR_TOLERANCE, equal_nan=True)

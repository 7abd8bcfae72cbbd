"""A training that nothing happens to, and the same with each fault: strike, notice, recover, compare.

Recovered from is what a person would do: the same call with --resume, or with the checkpoint that it offers. What comes
of it is held against the training that nothing happened to: every loss, the metrics, and every tensor of the last
checkpoint (model, optimizer, random generators), to the last bit.
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

from everyrank.chaos.attempt import Attempt, TrainCall, attempt, why_no_disk
from everyrank.chaos.faults import FAULTS, OWN_DISK, TWO_HOSTS, Fault, faults_named, why_unseen
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
    "Undisturbed",
    "compare_runs",
    "disturb",
    "logged_updates",
    "spoil_checkpoint",
    "strike",
    "train_undisturbed",
]

_START_SECONDS = 120.0  # for one attempt beyond what its waits take, on a machine however busy
_UPDATE_SECONDS = 5.0
_NOTICE_SECONDS = 15.0  # beyond --timeout: for the ranks to say what they saw, and for the others to end
_DISK_CHECKPOINTS = 12  # that fit on a disk of its own
_DISK_BYTES = 4 << 20  # and for what else a run writes


@dataclass(frozen=True)
class Undisturbed:
    """The training that nothing happened to: the call, its Record, and its folder."""

    call: TrainCall
    layout: Layout
    size: int
    timeout_seconds: float
    record: Record
    run: Path


def disturb(
    source: Source,
    layouts: list[Layout],
    launch: Launch,
    options: ChaosOptions,
    note: Callable[[Record], None] = lambda _: None,
) -> list[Record]:
    """A Record for each layout and fault, what came of it under `chaos` in its provenance; `note` gets each at once.

    Raises `UsageError` for a fault that is none, and `EveryrankError` where the training fails that nothing happens to.
    """
    names = faults_named(list(options.faults))
    records: list[Record] = []
    place = Path(tempfile.mkdtemp(prefix="everyrank-chaos-"))
    try:
        for number, layout in enumerate(layouts):
            quiet = train_undisturbed(source, layout, launch, options, place / str(number))
            linked: Undisturbed | None = None
            for name in names:
                one = quiet
                if FAULTS[name].needs == TWO_HOSTS and not _why_not(quiet, name):
                    on_hosts = place / f"{number}-on-hosts"
                    linked = linked or train_undisturbed(source, layout, _over_link(launch), options, on_hosts)
                    one = linked
                found = strike(one, name, options, place / str(number) / name)
                records.append(found)
                note(found)
                shutil.rmtree(place / str(number) / name, ignore_errors=True)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return records


def _over_link(launch: Launch) -> Launch:
    """The same ranks on two hosts. Through gloo: memory that is shared would not notice the link."""
    return Launch(
        processes=launch.processes,
        device="cpu",
        backend="gloo",
        timeout_seconds=launch.timeout_seconds,
        nodes=NUM_HOSTS,
        node_rank=0,
        rendezvous=RENDEZVOUS,
    )


def train_undisturbed(
    source: Source, layout: Layout, launch: Launch, options: ChaosOptions, place: Path
) -> Undisturbed:
    """Train once in float64 with nothing in the way. Raises `EveryrankError` where that fails already."""
    if layout.precision == "float32":  # where the last bit says most
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
        run=str(place / "undisturbed"),
        steps=options.steps,
        save_every=options.save_every,
        guard_every=options.guard_every,
    )
    done = attempt(call, place / "quiet", _limit_seconds(launch.timeout_seconds, options))
    if done.status != 0:
        raise EveryrankError(f"layout {layout}: it fails without a fault already: {done.message}")
    run = Path(call.run)
    [record] = read_records(run / "record.json")
    return Undisturbed(call, layout, launch.processes, launch.timeout_seconds, record, run)


def strike(quiet: Undisturbed, name: str, options: ChaosOptions, place: Path) -> Record:
    """One fault at an update that the seed gives, the recovery from it, and what came of both."""
    draw = random.Random(f"{options.seed} {quiet.layout} {name}")  # noqa: S311
    fault = FAULTS[name]
    # behind the first checkpoint, and where the newest is spoilt behind the second
    first_possible = (2 if fault.spoils else 1) * options.save_every + 1
    update = draw.randrange(first_possible, options.steps - options.save_every)
    rank = draw.randrange(quiet.size)
    told: dict[str, Any] = {"fault": name, "what": fault.what, "update": update, "rank": rank}
    why_not = _why_not(quiet, name)
    if why_not:
        return _record(quiet, options, told | {"status": "not run here", "reason": why_not}, None)
    if name == "full-disk":
        rank = told["rank"] = 0  # any rank fills it; rank 0 makes room again
    run = place / "run"
    call = dataclasses.replace(quiet.call, run=str(run))
    until = (update // options.save_every + 1) * options.save_every
    injection = {"fault": name, "update": update, "rank": rank, "journal": "", "until": until}
    struck = dataclasses.replace(call, injections=[injection])
    limit = _limit_seconds(quiet.timeout_seconds, options)
    first = attempt(struck, place / "first", limit, _disk_bytes(quiet, name))
    told |= _noticed(fault, first, quiet, rank)
    told["left"] = first.left
    if first.status != 0:
        told |= _recover(fault, call, first, place, limit, draw, update)
    elif not fault.ends:
        told |= {"recover_seconds": None, "resumed_at": None, "updates_lost": 0}
    if first.struck is None:
        told |= {"is_noticed": False, "said": f"it never struck: {first.message}"}
    parity = compare_runs(quiet.run, run, options.steps)
    if parity.status != "equal" or not told["is_noticed"]:
        told["reason"] = why_unseen(name, quiet.layout, quiet.size)
    return _record(quiet, options, told | {"status": _status(fault, told, parity, options)}, parity)


def _why_not(quiet: Undisturbed, name: str) -> str:
    """Why this fault cannot be tried here; "" where it can."""
    if FAULTS[name].needs == TWO_HOSTS:
        return f"{quiet.size} ranks do not divide over two hosts" if quiet.size % NUM_HOSTS else why_no_link()
    if quiet.size == 1 and name in _OF_SEVERAL:
        return "one rank waits for nobody, and nobody has what it has"
    return why_no_disk(quiet.run.parent) if FAULTS[name].needs else ""


_OF_SEVERAL = ("stop-rank", "mismatched-collective", "flipped-bit")


def _limit_seconds(timeout_seconds: float, options: ChaosOptions) -> float:
    """After which an attempt is ended from here, on a machine however busy."""
    return _START_SECONDS + 2 * timeout_seconds + options.steps * _UPDATE_SECONDS


def _disk_bytes(quiet: Undisturbed, name: str) -> int:
    """The size of a disk of its own; 0 where the fault needs none."""
    if FAULTS[name].needs != OWN_DISK:
        return 0
    files = find_checkpoint(quiet.run).about.files.values()
    return _DISK_CHECKPOINTS * sum(size for size, _ in files) + _DISK_BYTES


def _noticed(fault: Fault, first: Attempt, quiet: Undisturbed, rank: int) -> dict[str, Any]:
    """Whether the fault was noticed, by whom, what was said, and after how many seconds."""
    bound = quiet.timeout_seconds + _NOTICE_SECONDS
    told: dict[str, Any] = {"seen_by": fault.seen_by, "bound_seconds": bound, "said": "", "notice_seconds": None}
    begun = first.struck or first.begun
    if not fault.ends:
        lines = [(at, line) for at, line in first.lines if at > begun and fault.is_said_in(line, rank)]
        if lines:
            told |= {"said": lines[0][1], "notice_seconds": lines[0][0] - begun}
        return told | {"is_noticed": bool(lines) or (not fault.says and first.status == 0)}
    if not fault.says:  # whoever was to say it is gone: the others have to see it by themselves
        return told | {"is_noticed": first.left == 0, "notice_seconds": first.cleared - begun}
    is_noticed = first.status not in (None, 0) and fault.is_said_in(first.message, rank)
    seconds = first.ended - begun if is_noticed else None
    return told | {"is_noticed": is_noticed, "said": first.message, "notice_seconds": seconds}


def _recover(
    fault: Fault, call: TrainCall, first: Attempt, place: Path, limit: float, draw: random.Random, update: int
) -> dict[str, Any]:
    """Go on as a person would, to the end; what that took."""
    run, told = Path(call.run), dict[str, Any]()
    reached = max(update, len(logged_updates(run)))  # the log is some updates behind
    resume, ended = str(run), first.cleared
    if fault.spoils and (there := checkpoints_of(run)):
        newest = there[-1]
        spoil_checkpoint(newest, fault.spoils, draw)
        refused = attempt(dataclasses.replace(call, resume=resume), place / "refused", limit)
        is_noticed = refused.status == 2 and fault.is_said_in(refused.message, 0)
        told |= {"is_noticed": is_noticed, "said": refused.message, "notice_seconds": refused.ended - refused.begun}
        good = last_good(newest.path)
        resume, ended = str(good.path) if good is not None else resume, refused.cleared
        told["left"] = first.left + refused.left
    whole = [one.about.step for one in checkpoints_of(run) if damage(one) is None]
    again = attempt(dataclasses.replace(call, resume=resume), place / "again", limit)
    told["left"] = told.get("left", first.left) + again.left
    told |= {"resumed_at": None, "updates_lost": None, "recover_seconds": None, "newest_whole": max(whole, default=0)}
    if again.status == 0:
        resumed_at = read_records(run / "record.json")[0].provenance["resumed_at_update"]
        back = next((row["time"] for row in logged_updates(run) if row["step"] == max(resumed_at, reached - 1)), None)
        seconds = back - ended if back is not None else None
        told |= {"resumed_at": resumed_at, "updates_lost": max(0, reached - resumed_at), "recover_seconds": seconds}
    else:
        told["recovery_failed"] = again.message
    return told


def spoil_checkpoint(newest: Checkpoint, how: str, draw: random.Random) -> None:
    """Cut the largest file of a checkpoint to two thirds, or turn one of its bits round."""
    path = max((newest.path / name for name in newest.about.files), key=lambda file: file.stat().st_size)
    content = bytearray(path.read_bytes())
    if how == "cut":
        content = content[: len(content) * 2 // 3]
    else:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def _status(fault: Fault, told: dict[str, Any], parity: Parity, options: ChaosOptions) -> str:
    """`held`, `unseen` where a reason is known why nobody can notice it, else what did not hold."""
    if told["left"]:
        return "processes left"
    if told.get("reason"):
        return "unseen"
    if not told["is_noticed"]:
        return "not noticed"
    if (told["notice_seconds"] or 0.0) > told["bound_seconds"]:
        return "noticed late"
    if "recovery_failed" in told:
        return "not recovered"
    if parity.status != "equal":
        return "another training"
    lost, allowed = told["updates_lost"], options.save_every * (2 if fault.spoils else 1)
    # a launcher that is killed leaves ranks that go on for a moment: they may lose what they did since their last save
    return "held" if lost <= allowed else "too much lost"


def _record(quiet: Undisturbed, options: ChaosOptions, told: dict[str, Any], parity: Parity | None) -> Record:
    source = dict(quiet.record.provenance)
    source["command"] = shlex.join(options.command)
    source["chaos"] = told | {"steps": options.steps, "save_every": options.save_every, "seed": options.seed}
    return Record(
        workload=quiet.record.workload,
        layout=quiet.record.layout,
        launcher=quiet.record.launcher,
        backend=quiet.record.backend,
        device=quiet.record.device,
        world_size=quiet.record.world_size,
        parity=parity or Parity("not_verified", reason=told["reason"]),
        provenance=source,
    )


# --- a disturbed run beside one that nothing happened to


def logged_updates(run: Path) -> list[dict[str, Any]]:
    """The updates in the log of a run, in its order; a line that is cut off is none."""
    path, rows = run / "log.jsonl", list[dict[str, Any]]()
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if "step" in row:
            rows.append(row)
    return rows


def compare_runs(undisturbed: Path, run: Path, steps: int) -> Parity:
    """A run beside the one that nothing happened to: losses, metrics, and all tensors of the last checkpoint."""
    ours, theirs = ({row["step"]: row["loss"] for row in logged_updates(place)} for place in (run, undisturbed))
    if ours.keys() != theirs.keys() or len(logged_updates(run)) != steps or not (run / "record.json").exists():
        return Parity("different", first_divergence=f"{len(ours)} of {steps} updates are logged")
    apart = {step: abs(ours[step] - loss) / max(abs(loss), 1e-300) for step, loss in theirs.items()}
    far = max(apart.values(), key=lambda distance: (math.isnan(distance), distance))
    first = next((f"update {step}" for step, distance in apart.items() if distance != 0.0), None)
    metrics = read_records(run / "record.json")[0].metrics
    exact = first is None
    if exact and metrics != read_records(undisturbed / "record.json")[0].metrics:
        first = "the metrics at the end"
    scope = f"{steps} updates, and all tensors of the last checkpoint"
    if first is None or far <= _TOLERANCE:
        other = _other_tensor(find_checkpoint(run), find_checkpoint(undisturbed), exact)
        if other is None:
            return Parity("equal", exact, far, _TOLERANCE, scope, first_divergence=first)
        first = first or other
    return Parity("different", False, far, _TOLERANCE, scope, first_divergence=first)


_TOLERANCE = 1e-12  # of the losses, where a restart changes the order of additions
_TENSOR_TOLERANCE = 1e-9  # of weights and optimizer state then: small ones are differences of large ones


def _other_tensor(one: Checkpoint, other: Checkpoint, exact: bool) -> str | None:
    """The first tensor that is not the same in both checkpoints: the same bits, or as near as that."""
    import torch

    from everyrank.checkpoint.storage import contents_of, read

    both: list[dict[str, Any]] = []
    for checkpoint in (one, other):
        kept = contents_of(checkpoint)
        tensors = {name: torch.zeros(about.size, dtype=about.properties.dtype) for name, about in kept.items()}
        read(tensors, checkpoint)
        both.append(tensors)
    names = sorted(both[0].keys() | both[1].keys())
    return next((name for name in names if not _same(both[0].get(name), both[1].get(name), exact)), None)


def _same(one: Any, other: Any, exact: bool) -> bool:
    import torch

    if one is None or other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    if exact or not one.is_floating_point():  # bits: a state of a generator may hold NaN
        return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    return torch.allclose(one, other, rtol=_TENSOR_TOLERANCE, atol=_TENSOR_TOLERANCE, equal_nan=True)

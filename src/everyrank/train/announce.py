"""What a training says of itself on the screen: before its first update, and when it has ended."""

from __future__ import annotations

from everyrank.launch.rank_info import has_driver
from everyrank.options import TrainOptions
from everyrank.record import Record
from everyrank.runs import checkpoint_named
from everyrank.strategies import Prepared
from everyrank.train.display import Display, format_metrics

__all__ = ["announce", "how_it_ended"]


def announce(
    prepared: Prepared, options: TrainOptions, begin: int, end: int | None, display: Display, changes_size: bool
) -> None:
    """Say what a reader has to know before the first update, and show the bar.

    `changes_size`: whether ranks may be lost, and others come, while it trains.
    """
    workload, world = prepared.workload, prepared.world
    ranks = f"{world.size} rank{'s' * (world.size > 1)}"
    if world.rank == 0 and workload.batch_rule is not None:
        display.line(workload.batch_rule)
    hosts = list(dict.fromkeys(world.hosts))
    if len(hosts) > 1:
        display.line(f"{ranks} on {', '.join(hosts)} · {' · '.join(world.choices.values())}")
    elif has_driver() and not world.choices["device"].endswith("asked for"):
        display.line(world.choices["device"])  # a job that was to have a GPU, and has none, says so before its hours
    if begin:
        of_all = f" of {end}" if end is not None else ""
        display.line(f"going on after update {begin}{of_all}, from {options.resume}")
        if options.resume is not None and checkpoint_named(options.resume).about.schema == 1:
            display.line("an older everyrank saved it: whether a bit of its about.json has changed is not known")
    parts = prepared.mesh.data_slice.count
    if changes_size and parts and workload.global_batch % parts:
        display.line(
            f"{workload.global_batch} samples of an update over {parts} ranks: some read one more than others; each "
            "sample counts the same"
        )
    display.begin(f"{workload.name} · {prepared.layout} · {ranks}", end, begin)


def how_it_ended(record: Record, begin: int) -> str:
    """The last line: how many updates, the loss, the speed, the metrics, and on what."""
    speed = record.throughput_samples_per_second
    parts: list[str] = []
    if record.loss:
        done = f"{len(record.loss)} updates" if not begin else f"updates from {begin}"
        parts = [done, f"loss {record.loss[-1]:.6f}"]
    parts += [f"{speed.median:,.0f} samples/s"] if speed else []
    parts += [format_metrics(record.metrics)] if record.metrics else []
    where = f"{record.world_size} on {record.device} ({record.backend})"
    return f"{record.workload} · {record.layout} · {where}: " + ", ".join(parts)

"""Group Records into tables, and make the titles and labels of the tables."""

from __future__ import annotations

from collections.abc import Sequence

from everyrank.record import Record

__all__ = ["groups", "is_checked", "label", "title"]


def groups(records: Sequence[Record]) -> list[list[Record]]:
    """Group Records by command and machine, because ratios across machines are meaningless."""
    by_key: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        source = record.provenance
        batch = None if record.scaling is not None else source.get("global_batch")
        machine = str(source.get("command")), str(source.get("processor")), str(source.get("torch"))
        key = (record.workload, record.device, *machine, str(batch))
        if record.scaling is not None:  # weak scaling changes the batch; group it with its reference
            key = next((other for other in by_key if other[:-1] == key[:-1]), key)
        by_key.setdefault(key, []).append(record)
    return list(by_key.values())


def is_checked(record: Record) -> bool:
    """Whether the layout was verified as equal, so that its measurements may be shown."""
    return record.parity.status == "equal"


def title(record: Record) -> str:
    """Return the heading of a table of Records of one workload."""
    cores = record.provenance.get("cores")
    parts = [record.workload, f"global batch {record.provenance.get('global_batch', '?')}", record.device]
    parts += [f"{cores} cores"] if cores and record.device == "cpu" else []
    parts += [f"torch {record.provenance.get('torch', '?')}"]
    return " · ".join(parts)


def label(record: Record) -> str:
    """Return the layout, with the number of ranks if it was measured on several."""
    if record.scaling is None:
        return record.layout
    return f"{record.layout} · {record.world_size} ranks, {record.scaling.kind}"

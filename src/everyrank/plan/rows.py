"""Measured rows, as tables of other projects are transcribed: read into configurations, or counted with a reason.

A row is a JSON object with id, source, model, hardware, parallel, batch, precision, activation_checkpointing,
attention, compile and measured; docs/plan.md describes the fields. `Row.assumed` names what a row leaves out.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everyrank.errors import UsageError
from everyrank.plan.configuration import STACKS, Stack
from everyrank.plan.decoder import DecoderSizes
from everyrank.plan.hardware import Gpu, find_gpu

__all__ = ["Row", "read_rows"]

_LARGEST_FILE = 200_000_000  # bytes


@dataclass(frozen=True)
class Row:
    """A measured configuration.

    source       where it is from: repository or owner
    case         what a model of time is fitted to: GPU kind and stack
    degrees      names of `Configurations` -> numbers
    step_seconds, memory_bytes  measured; None where the table has none
    memory_kind  allocated, reserved or device: which number the table prints
    ran_out      it ran out of memory
    assumed      what the table leaves out, as text
    """

    id: str
    source: str
    gpu: Gpu
    stack: Stack
    sizes: DecoderSizes
    degrees: Mapping[str, float]
    gpus: int
    step_seconds: float | None
    memory_bytes: float | None
    memory_kind: str
    ran_out: bool
    assumed: tuple[str, ...]
    model: str
    across: str | None

    @property
    def case(self) -> tuple[str, str]:
        """GPU kind and stack."""
        return self.gpu.name, self.stack.name


class _UnreadableError(Exception):
    """A row that cannot be used, with the reason."""


def read_rows(path: Path) -> tuple[list[Row], list[tuple[str, str]]]:
    """Return the rows of a file, and (id, reason) of each that cannot be read.

    The file is a JSON list, or JSON lines. Raises `UsageError` for a file that is neither.
    """
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise UsageError(f"{path}: larger than 200 MB; give a table of measured rows")
        text = path.read_text(encoding="utf-8")
        try:
            read: object = json.loads(text)
        except ValueError:
            read = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: neither a JSON list nor JSON lines; see docs/plan.md for the fields") from error
    if isinstance(read, dict) and isinstance(read.get("rows"), list):
        read = read["rows"]
    if not isinstance(read, list):
        raise UsageError(f"{path}: no list of rows; see docs/plan.md for the fields")
    rows: list[Row] = []
    unreadable: list[tuple[str, str]] = []
    for index, entry in enumerate(read):
        name = str(entry.get("id") or f"row {index}") if isinstance(entry, dict) else f"row {index}"
        try:
            if not isinstance(entry, dict):
                raise _UnreadableError("not a JSON object")
            rows.append(_read_row(name, entry))
        except (_UnreadableError, UsageError) as error:
            unreadable.append((name, str(error)))
        except (TypeError, ValueError, AttributeError, OverflowError, ZeroDivisionError) as error:
            unreadable.append((name, f"a field of another type ({type(error).__name__}: {error})"))
    return rows, unreadable


def _read_row(name: str, row: dict[str, Any]) -> Row:
    if row.get("kind") not in (None, "llm"):
        raise _UnreadableError(f"kind {row['kind']}: the closed form knows decoders")
    model, hardware, parallel, batch = (row.get(part) or {} for part in ("model", "hardware", "parallel", "batch"))
    measured, extra = row.get("measured") or {}, row.get("extra") or {}
    if parallel.get("ep") not in (None, 1) or model.get("experts"):
        raise _UnreadableError("a mixture of experts: not in the closed form")
    assumed: list[str] = []

    def needed(group: Mapping[str, Any], key: str, where: str) -> int:
        value = group.get(key)
        if value is None:
            raise _UnreadableError(f"{where}.{key} is missing")
        return int(value)

    hidden = needed(model, "hidden", "model")
    heads = model.get("heads")
    if heads is None:
        heads = max(1, hidden // 128)
        while hidden % heads:
            heads -= 1
        assumed.append(f"heads={heads}")
    vocab = model.get("vocab")
    if vocab is None:
        vocab = 51200
        assumed.append("vocab=51200")
    gated = bool(model.get("gated_ffn"))
    ffn = model.get("ffn")
    if ffn is None:
        ffn = 4 * hidden
        assumed.append(f"ffn={ffn}")
    sizes = DecoderSizes(
        layers=needed(model, "layers", "model"),
        hidden=hidden,
        heads=int(heads),
        kv=int(model.get("kv_heads") or heads),
        ffn=int(ffn),
        vocab=int(vocab),
        seq=needed(model, "seq_len", "model"),
        gated=gated,
        head_dim=int(model.get("head_dim") or 0),
        tied=not gated if model.get("tied") is None else bool(model["tied"]),
    )
    gpu = find_gpu(str(hardware.get("gpu")))
    gpus = needed(hardware, "gpus", "hardware")
    per_node = int(hardware.get("gpus_per_node") or min(gpus, 8))
    degrees = _degrees(gpus, parallel, batch, assumed)
    degrees["per_node"] = per_node
    recompute = _recompute(row, assumed)
    degrees["recompute"] = recompute
    stack = _stack_of(row, parallel, assumed)
    if (row.get("parallel") or {}).get("sp") is None and stack.name in ("megatron", "megatron-te"):
        degrees["sequence"] = 1  # Megatron's advice since 2022
    degrees["fp8"] = int("fp8" in str(row.get("precision")).lower())
    kind = _memory_kind(row, measured)
    step = _step_seconds(measured, degrees, sizes, gpus, recompute, row)
    memory = measured.get("memory_gib")
    for value, field in ((step, "the time"), (memory, "measured.memory_gib")):
        if value is not None and not 0 < float(value) < 1e9:
            raise _UnreadableError(f"{field} is not a number above 0")
    return Row(
        id=name,
        source=_source(row),
        gpu=gpu,
        stack=stack,
        sizes=sizes,
        degrees=degrees,
        gpus=gpus,
        step_seconds=step,
        memory_bytes=float(memory) * 2**30 if memory else None,
        memory_kind=kind,
        ran_out=bool(extra.get("oom") or measured.get("oom")),
        assumed=tuple(assumed),
        model=str(model.get("name") or f"{sizes.layers}x{sizes.hidden}"),
        across=hardware.get("inter_node"),
    )


def _source(row: Mapping[str, Any]) -> str:
    source = row.get("source")
    if isinstance(source, dict):
        return str(source.get("repo") or source.get("name") or source.get("url") or source.get("path") or "unknown")
    return str(source or "unknown")


def _degrees(gpus: int, parallel: Mapping[str, Any], batch: Mapping[str, Any], assumed: list[str]) -> dict[str, float]:
    tensor, pipeline = int(parallel.get("tp") or 1), int(parallel.get("pp") or 1)
    context, chunks = int(parallel.get("cp") or 1), int(parallel.get("vpp") or 1)
    if min(tensor, pipeline, context, chunks) < 1:
        raise _UnreadableError("parallel has a degree below 1")
    rest = gpus // (tensor * pipeline * context)
    if rest < 1 or rest * tensor * pipeline * context != gpus:
        raise _UnreadableError(f"tp {tensor} x pp {pipeline} x cp {context} does not divide {gpus} GPUs")
    zero = parallel.get("zero_stage")
    if zero is None:
        zero = 3 if parallel.get("fsdp") else 0
        assumed.append(f"zero_stage={zero}")
    shard = int(parallel.get("fsdp") or rest) if int(zero) == 3 else 1
    if rest % shard:
        shard = rest
    micro, accumulate, total = batch.get("micro"), batch.get("grad_accum"), batch.get("global")
    if micro is None:
        if total is None:
            raise _UnreadableError("batch.micro and batch.global are missing")
        micro = float(total) / rest / float(accumulate or 1)
        assumed.append(f"micro={micro:g}")
    if accumulate is None:
        if total is None:
            accumulate = 1
            assumed.append("grad_accum=1")
        else:
            accumulate = max(1.0, round(float(total) / (float(micro) * rest), 3))
    if float(micro) <= 0 or float(accumulate) <= 0:
        raise _UnreadableError("batch has a size below 1")
    sequence = parallel.get("sp")
    return {
        "tensor": tensor,
        "pipeline": pipeline,
        "context": context,
        "chunks": chunks,
        "replicate": rest // shard,
        "shard": shard,
        "zero": int(zero),
        "micro": float(micro),
        "accumulate": float(accumulate),
        "sequence": int(bool(sequence)),
    }


def _recompute(row: Mapping[str, Any], assumed: list[str]) -> int:
    text = row.get("activation_checkpointing")
    if text is None:
        assumed.append("recomputation=none")
        return 0
    text = str(text).lower()
    if text in ("none", "false", "no", "off", "0"):
        return 0
    return 2 if "selective" in text else 1


def _stack_of(row: Mapping[str, Any], parallel: Mapping[str, Any], assumed: list[str]) -> Stack:
    """The stack of a row, by its source, precision and attention."""
    precision, source = str(row.get("precision") or "").lower(), _source(row).lower()
    if not precision:
        assumed.append("precision=16 bit")
    named = str((row.get("extra") or {}).get("stack") or row.get("stack") or "")
    attention = str(row.get("attention") or "").lower()
    if named in STACKS:
        stack = STACKS[named]
    elif precision.startswith(("fp32", "float32", "tf32")):
        stack = STACKS["float32"]
    elif "torchtitan" in source:
        stack = STACKS["torchtitan"]
    elif "llm-foundry" in source or "mosaic" in source or parallel.get("zero_stage") == 3:
        stack = STACKS["llm-foundry"]
    elif "simumax" in source:
        stack = STACKS["megatron-te"]
    elif "bigscience" in source or "deepspeed" in source or "deepspeed" in str(row.get("notes")).lower():
        stack = STACKS["megatron-deepspeed"]
    elif "vtrain" in source or "unfused" in attention:
        stack = STACKS["megatron-2022"]
    else:
        stack = STACKS["megatron"]
    if "flash" in attention or "sdpa" in attention:
        stack = dataclasses.replace(stack, flash=True)
    elif "unfused" in attention or attention in ("torch", "eager"):
        stack = dataclasses.replace(stack, flash=False, scores=stack.scores or 2 * stack.size + 1)
    return dataclasses.replace(stack, compiled=True) if row.get("compile") is True else stack


def _memory_kind(row: Mapping[str, Any], measured: Mapping[str, Any]) -> str:
    kind = str(measured.get("memory_kind") or row.get("memory_kind") or "").lower()
    text = f"{kind} {row.get('notes') or ''} {_source(row)}".lower()
    for word in ("device", "allocated", "reserved"):
        if word in text:
            return word
    if "simumax" in text:
        return "allocated"
    return "device" if "bigscience" in text else "reserved"


def _step_seconds(
    measured: Mapping[str, Any],
    degrees: Mapping[str, float],
    sizes: DecoderSizes,
    gpus: int,
    recompute: int,
    row: Mapping[str, Any],
) -> float | None:
    """Seconds of an update: printed, or out of tokens a second."""
    if measured.get("step_ms"):
        return float(measured["step_ms"]) / 1e3
    samples = degrees["replicate"] * degrees["shard"] * degrees["micro"] * degrees["accumulate"]
    if measured.get("tokens_s_gpu"):
        return samples * sizes.seq / (float(measured["tokens_s_gpu"]) * gpus)
    rate = measured.get("tflops_gpu")
    if not rate:
        return None
    # a row without a time: out of its operations. Tables of Megatron-DeepSpeed count the recomputed forward (4 of 3)
    counts_again = recompute == 1 and (
        "hardware" in str(row.get("notes")).lower() or "bigscience" in _source(row).lower()
    )
    flops = samples * sizes.seq * sizes.flops_per_token * (4 / 3 if counts_again else 1)
    seconds = flops / (float(rate) * 1e12 * gpus)
    return seconds if math.isfinite(seconds) else None

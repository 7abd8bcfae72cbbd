"""Reads measured rows, transcribed from tables of other projects, into configurations.

A row is a JSON object with id, source, model, hardware, parallel, batch, precision, activation_checkpointing,
attention, compile and measured; docs/plan.md describes the fields. `Row.assumed` has the values that a row does not
give.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everyrank.errors import UsageError
from everyrank.plan.configuration import STACKS, Stack
from everyrank.plan.decoder import DecoderSizes
from everyrank.plan.hardware import PCIE3, PCIE4, Gpu, Link, find_gpu, parse_published_link

__all__ = ["Row", "read_rows"]

_MAX_FILE_BYTES = 200_000_000  # bytes


@dataclass(frozen=True)
class Row:
    """A measured configuration.

    source       repository or owner of the table
    inside, across  links in a node and between nodes
    case         GPU kind and stack, for which numbers are fitted
    degrees      names of `Configurations` -> numbers
    step_seconds, memory_bytes  measured values; None if the table does not have them
    memory_kind  the kind of memory in the table: allocated, reserved or device
    ran_out      whether it ran out of memory
    assumed      values that the table does not give, as text
    """

    id: str
    source: str
    gpu: Gpu
    inside: Link
    across: Link
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

    @property
    def case(self) -> tuple[str, str]:
        """GPU kind and stack."""
        return self.gpu.name, self.stack.name

    @property
    def fingerprint(self) -> str:
        """A hash of the configuration and the time: equal for the same row in two files, even with different ids."""
        seconds = f"{self.step_seconds:.6g}" if self.step_seconds else ""
        setting = (self.case, dataclasses.astuple(self.sizes), sorted(self.degrees.items()), self.gpus, seconds)
        return hashlib.sha256(repr(setting).encode()).hexdigest()[:8]


class _UnreadableError(Exception):
    """A row that cannot be used, with the reason."""


def read_rows(path: Path) -> tuple[list[Row], list[tuple[str, str]]]:
    """Return the rows of a file, and (id, reason) of each that cannot be read.

    The file is a JSON list, or JSON lines. Raises `UsageError` for a file that is neither.
    """
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
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
        raise UsageError(f"{path}: not a list of rows; see docs/plan.md for the fields")
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
            unreadable.append((name, f"a field has the wrong type ({type(error).__name__}: {error})"))
    return rows, unreadable


_MIXTURES = re.compile(r"mixtral|\bmoe\b|_moe|moe_|deepseek[-_ ]?v[23]|-a\d+b\b|dbrx|grok", re.IGNORECASE)
_EXPERTS = ("experts", "num_experts", "n_experts", "num_local_experts", "n_routed_experts", "moe")
_BYTES = {"gib": 2.0**30, "mib": 2.0**20, "gb": 1e9, "mb": 1e6, "bytes": 1.0, "b": 1.0}


def _read_row(name: str, row: dict[str, Any]) -> Row:
    model, hardware, parallel, batch, measured, extra = (
        _group(row, group) for group in ("model", "hardware", "parallel", "batch", "measured", "extra")
    )
    _refuse_unknown(row, model, parallel, extra)
    ran_out = bool(extra.get("oom") or measured.get("oom")) or any("oom" in str(v).lower() for v in measured.values())
    measured = {key: value for key, value in measured.items() if "oom" not in str(value).lower()}
    assumed: list[str] = []
    gpu = _gpu_of(hardware)
    sizes = _sizes_of(model, assumed)
    gpus, per_node = _gpus_of(hardware, parallel)
    degrees = _degrees(gpus, sizes, parallel, batch, extra, assumed)
    degrees["per_node"] = per_node
    recompute = _recompute(row, assumed)
    degrees["recompute"] = recompute
    stack = _stack_of(row, parallel, extra, assumed)
    if parallel.get("sp") is None and stack.name in ("megatron", "megatron-te"):
        degrees["sequence"] = 1  # recommended by Megatron since 2022
    degrees["fp8"] = int(_is_fp8(row))
    if degrees["fp8"] and not gpu.flops_fp8:
        raise _UnreadableError(f"precision {row['precision']}: {gpu.name} does not support 8-bit matrix products")
    step = _step_seconds(measured, degrees, sizes, gpus, recompute, row)
    memory = _memory_bytes(measured)
    for value, field in ((step, "the time"), (memory, "the memory")):
        if value is not None and not 0 < value < 1e18:
            raise _UnreadableError(f"{field} is not a number above 0")
    if step is None and memory is None and not ran_out:
        raise _UnreadableError("measured has neither a time nor a memory, and it did not run out of memory")
    is_pcie = "pcie" in (text := str(hardware.get("intra_node") or "").lower()) and "nvlink" not in text
    return Row(
        id=name,
        source=_source(row),
        gpu=gpu,
        inside=(PCIE3 if gpu.hbm < 1e12 and not gpu.flops_fp8 else PCIE4) if is_pcie else gpu.links_of_node(per_node),
        across=parse_published_link(hardware.get("inter_node"), per_node) or gpu.across,
        stack=stack,
        sizes=sizes,
        degrees=degrees,
        gpus=gpus,
        step_seconds=step,
        memory_bytes=memory,
        memory_kind=_memory_kind(row, measured),
        ran_out=ran_out,
        assumed=tuple(assumed),
        model=str(model.get("name") or f"{sizes.layers}x{sizes.hidden}"),
    )


def _group(row: Mapping[str, Any], group: str) -> dict[str, Any]:
    """Return a group of fields of a row; {} if it is missing."""
    value = row.get(group)
    if value is not None and not isinstance(value, dict):
        raise _UnreadableError(f"{group} is not a JSON object")
    return value or {}


def _number(value: Any, where: str) -> float:
    """Return a number, which may be text such as `2,048`."""
    if isinstance(value, str):
        value = value.replace(",", "").replace("_", "").strip()
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _UnreadableError(f"{where} is not a number: {value!r}")
    try:
        return float(value)
    except ValueError:
        raise _UnreadableError(f"{where} is not a number: {value!r}") from None


def _whole(value: Any, where: str) -> int:
    number = _number(value, where)
    if not math.isfinite(number) or number != int(number):
        raise _UnreadableError(f"{where} is not a whole number: {value!r}")
    return int(number)


def _is_true(value: Any) -> bool:
    """Whether a flag is set, as true, 1 or text."""
    return str(value).strip().lower() not in ("none", "false", "no", "off", "0", "")


def _refuse_unknown(
    row: Mapping[str, Any], model: Mapping[str, Any], parallel: Mapping[str, Any], extra: Mapping[str, Any]
) -> None:
    """Raise for a row that the closed form does not support."""
    experts = parallel.get("ep") not in (None, 1, "1") or any(_is_true(model.get(name)) for name in _EXPERTS)
    if experts or str(row.get("kind")).lower() == "moe" or _MIXTURES.search(str(model.get("name"))):
        raise _UnreadableError("mixtures of experts are not supported")
    if row.get("kind") not in (None, "llm"):
        raise _UnreadableError(f"kind {row['kind']}: only decoders are supported")
    if _is_true(extra.get("cpu_offload")):
        raise _UnreadableError("CPU offload is not supported")
    precision = str(row.get("precision") or "").lower()
    if re.search(r"fp4|int4|int8|fp64|float64", precision):
        raise _UnreadableError(f"precision {row['precision']}: only 32, 16 and 8-bit floats are supported")


def _is_fp8(row: Mapping[str, Any]) -> bool:
    return re.search(r"fp8|float8|e4m3|e5m2", str(row.get("precision")).lower()) is not None


def _gpu_of(hardware: Mapping[str, Any]) -> Gpu:
    if not isinstance(name := hardware.get("gpu"), str):
        raise _UnreadableError("hardware.gpu is missing")
    try:
        return find_gpu(name)
    except UsageError:
        raise _UnreadableError(f"hardware.gpu: {name} is unknown") from None


def _gpus_of(hardware: Mapping[str, Any], parallel: Mapping[str, Any]) -> tuple[int, int]:
    """Return (GPUs, GPUs of a node); if the first is missing, it is computed from the nodes or the degrees."""
    nodes, per_node = hardware.get("nodes"), hardware.get("gpus_per_node")
    if hardware.get("gpus") is not None:
        gpus = _whole(hardware["gpus"], "hardware.gpus")
    elif nodes is not None and per_node is not None:
        gpus = _whole(nodes, "hardware.nodes") * _whole(per_node, "hardware.gpus_per_node")
    elif parallel.get("dp") is not None:
        gpus = math.prod(_whole(parallel.get(name) or 1, f"parallel.{name}") for name in ("dp", "tp", "pp", "cp"))
    else:
        raise _UnreadableError("hardware.gpus is missing")
    if not 1 <= gpus <= 10**7:
        raise _UnreadableError(f"hardware.gpus: {gpus} GPUs")
    if per_node is None:
        per_node = gpus / _whole(nodes, "hardware.nodes") if nodes else min(gpus, 8)
    return gpus, max(1, int(_number(per_node, "hardware.gpus_per_node")))


def _sizes_of(model: Mapping[str, Any], assumed: list[str]) -> DecoderSizes:
    """Return the decoder; missing values that can be derived are added to `assumed`."""

    def optional_value(key: str) -> int | None:
        value = model.get(key)
        return None if value is None else _whole(value, f"model.{key}")

    def required_value(key: str) -> int:
        if (value := optional_value(key)) is None:
            raise _UnreadableError(f"model.{key} is missing")
        return value

    hidden, seq = required_value("hidden"), required_value("seq_len")
    if not 1 <= hidden <= 10**6:
        raise _UnreadableError(f"model.hidden: {hidden}")
    if (heads := optional_value("heads")) is None:
        heads = max(1, hidden // 128)
        while hidden % heads:
            heads -= 1
        assumed.append(f"heads={heads}")
    if (vocab := optional_value("vocab")) is None:
        vocab = 51200
        assumed.append("vocab=51200")
    gated = _is_true(model.get("gated_ffn"))
    if (ffn := optional_value("ffn")) is None:
        ffn = 4 * hidden
        assumed.append(f"ffn={ffn}")
    sizes = DecoderSizes(
        layers=1,
        hidden=hidden,
        heads=heads,
        kv=optional_value("kv_heads") or heads,
        ffn=ffn,
        vocab=vocab,
        seq=seq,
        gated=gated,
        head_dim=optional_value("head_dim") or 0,
        tied=not gated if model.get("tied") is None else _is_true(model["tied"]),
    )
    layers = optional_value("layers")
    if layers is None and model.get("params") is not None:
        block_parameters = _number(model["params"], "model.params") - (sizes.parameters - sizes.block_parameters)
        layers = max(1, round(block_parameters / sizes.block_parameters))
        assumed.append(f"layers={layers}")
    return dataclasses.replace(sizes, layers=required_value("layers") if layers is None else layers)


def _source(row: Mapping[str, Any]) -> str:
    source = row.get("source")
    if isinstance(source, dict):
        return str(source.get("repo") or source.get("name") or source.get("url") or source.get("path") or "unknown")
    return str(source or "unknown")


def _zero_stage(parallel: Mapping[str, Any], extra: Mapping[str, Any], assumed: list[str]) -> int:
    strategy = str(extra.get("sharding_strategy") or parallel.get("fsdp") or "").upper()
    stages = {"SHARD_GRAD_OP": 2, "NO_SHARD": 0, "FULL_SHARD": 3, "HYBRID_SHARD": 3}
    if (zero := parallel.get("zero_stage")) is None:
        stage = stages.get(strategy, 3 if _is_true(parallel.get("fsdp")) else 0)
        assumed.append(f"zero_stage={stage}")
        return stage
    match = re.search(r"[0-3]", str(zero))
    if match is None or (not isinstance(zero, str) and zero not in (0, 1, 2, 3)):
        raise _UnreadableError(f"parallel.zero_stage: {zero!r}; only 0 to 3 are supported")
    return int(match[0])


def _batch_of(readers: int, batch: Mapping[str, Any], assumed: list[str]) -> tuple[float, float]:
    """Return samples of a micro-batch, and micro-batches of an update."""
    micro, accumulate, total = (
        None if batch.get(name) is None else _number(batch[name], f"batch.{name}")
        for name in ("micro", "grad_accum", "global")
    )
    if micro is None:
        if total is None:
            raise _UnreadableError("batch.micro and batch.global are missing")
        micro = total / readers / (accumulate or 1)
        assumed.append(f"micro={micro:g}")
    if micro <= 0 or (accumulate is not None and accumulate <= 0):
        raise _UnreadableError("batch has a size below 1")
    if accumulate is None:
        if total is None:
            accumulate = 1.0
            assumed.append("grad_accum=1")
        else:
            accumulate = max(1.0, round(total / (micro * readers), 3))
    if not 0 < micro * accumulate * readers < 1e12:
        raise _UnreadableError("batch has a size below 1")
    return micro, accumulate


def _degrees(
    gpus: int,
    sizes: DecoderSizes,
    parallel: Mapping[str, Any],
    batch: Mapping[str, Any],
    extra: Mapping[str, Any],
    assumed: list[str],
) -> dict[str, float]:
    tensor, pipeline, context, chunks = (
        _whole(parallel.get(name) if parallel.get(name) is not None else 1, f"parallel.{name}")
        for name in ("tp", "pp", "cp", "vpp")
    )
    if min(tensor, pipeline, context, chunks) < 1:
        raise _UnreadableError("parallel has a degree below 1")
    if pipeline * (chunks if pipeline > 1 else 1) > sizes.layers:
        raise _UnreadableError(f"pp {pipeline} x vpp {chunks}: more stages than {sizes.layers} layers")
    if tensor > sizes.heads:
        raise _UnreadableError(f"tp {tensor}: more ranks than {sizes.heads} heads")
    data_ranks = gpus // (tensor * pipeline * context)
    if data_ranks < 1 or data_ranks * tensor * pipeline * context != gpus:
        raise _UnreadableError(f"tp {tensor} x pp {pipeline} x cp {context} does not divide {gpus} GPUs")
    zero = _zero_stage(parallel, extra, assumed)
    fsdp = parallel.get("fsdp")
    has_number = not isinstance(fsdp, bool) and re.fullmatch(r"\d+", str(fsdp)) is not None
    shard = max(1, int(str(fsdp))) if has_number and zero == 3 else data_ranks if zero == 3 else 1
    if data_ranks % shard:
        shard = data_ranks
    if (dp := parallel.get("dp")) is not None:
        stated = _whole(dp, "parallel.dp")
        if stated not in (data_ranks, data_ranks * context, data_ranks // shard):
            assumed.append(f"dp={data_ranks}")
    micro, accumulate = _batch_of(data_ranks, batch, assumed)
    return {
        "tensor": tensor,
        "pipeline": pipeline,
        "context": context,
        "chunks": chunks,
        "replicate": data_ranks // shard,
        "shard": shard,
        "zero": zero,
        "micro": micro,
        "accumulate": accumulate,
        "sequence": int(_is_true(parallel.get("sp"))),
    }


def _recompute(row: Mapping[str, Any], assumed: list[str]) -> int:
    text = row.get("activation_checkpointing")
    if text is None:
        assumed.append("recomputation=none")
        return 0
    if not _is_true(text):
        return 0
    return 2 if re.search("selective|attn|attention|core", str(text).lower()) else 1


def _stack_by_name(
    row: Mapping[str, Any], parallel: Mapping[str, Any], extra: Mapping[str, Any], assumed: list[str]
) -> Stack:
    """Return the stack that a row names, or that follows from its source, precision and attention."""
    precision, source = str(row.get("precision") or "").lower(), _source(row).lower()
    named = str(extra.get("stack") or row.get("stack") or "")
    attention = str(row.get("attention") or "").lower()
    if named in STACKS:
        return STACKS[named]
    if precision.startswith(("fp32", "float32", "tf32")):
        if "tf32" not in precision:
            assumed.append("precision of matrix products=TF32")
        return STACKS["float32"]
    if "torchtitan" in source:
        return STACKS["torchtitan"]
    if "llm-foundry" in source or "mosaic" in source:
        return STACKS["llm-foundry"]
    if _zero_stage(parallel, extra, []) == 3:  # kernels of 2024 or of 2023
        is_later = _is_true(row.get("compile")) or re.search(r"sdpa|2|3|cudnn", attention) is not None
        return STACKS["torchtitan" if is_later else "llm-foundry"]
    if "simumax" in source:
        return STACKS["megatron-te"]
    if "bigscience" in source or "deepspeed" in source or "deepspeed" in str(row.get("notes")).lower():
        return STACKS["megatron-deepspeed"]
    return STACKS["megatron-2022" if "vtrain" in source or "unfused" in attention else "megatron"]


def _stack_of(
    row: Mapping[str, Any], parallel: Mapping[str, Any], extra: Mapping[str, Any], assumed: list[str]
) -> Stack:
    """Return the stack of a row, with its attention and compiler."""
    if not row.get("precision"):
        assumed.append("precision=16 bit")
    stack = _stack_by_name(row, parallel, extra, assumed)
    attention = str(row.get("attention") or "").lower()
    is_flash = re.search(r"flash|sdpa|fa[234]|cudnn|efficient|xformers|\bte\b|triton|ring", attention) is not None
    if "unfused" in attention or attention in ("torch", "eager", "math", "naive"):
        stack = dataclasses.replace(stack, flash=False, scores=stack.scores or 2 * stack.size + 1)
    elif is_flash:
        stack = dataclasses.replace(stack, flash=True)
    return dataclasses.replace(stack, compiled=True) if _is_true(row.get("compile")) else stack


def _memory_kind(row: Mapping[str, Any], measured: Mapping[str, Any]) -> str:
    kind = str(measured.get("memory_kind") or row.get("memory_kind") or "").lower()
    text = f"{kind} {row.get('notes') or ''} {_source(row)}".lower()
    for field in (kind, text):
        for word in ("allocated", "reserved", "device"):
            if word in field:
                return word
        if re.search(r"nvidia-smi|rocm-smi|total", field):
            return "device"
    if "simumax" in text:
        return "allocated"
    return "device" if "bigscience" in text else "reserved"


def _memory_bytes(measured: Mapping[str, Any]) -> float | None:
    """Return the bytes of memory_gib, memory_gb, ...; a unit in the value overrides that of the name."""
    for unit, size in _BYTES.items():
        value = measured.get(f"memory_{unit}")
        if value is None or value == "":
            continue
        match = re.fullmatch(r"\s*([\d.,]+)\s*(gib|mib|gb|mb|b)\s*", str(value).lower())
        if match:
            return _number(match[1], f"measured.memory_{unit}") * _BYTES[match[2]]
        return _number(value, f"measured.memory_{unit}") * size
    return None


def _rate(measured: Mapping[str, Any], *names: str) -> float | None:
    """Return the first number that is given under one of the names."""
    for name in names:
        value = measured.get(name)
        if value is None or value == "":
            continue
        text = re.sub(r"\s*(ms|s|%)\s*$", "", value) if isinstance(value, str) else value
        if (number := _number(text, f"measured.{name}")) and not number > 0:
            raise _UnreadableError("the time is not a number above 0")
        if number:
            return number
    return None


def _step_seconds(
    measured: Mapping[str, Any],
    degrees: Mapping[str, float],
    sizes: DecoderSizes,
    gpus: int,
    recompute: int,
    row: Mapping[str, Any],
) -> float | None:
    """Return the seconds of an update, from a time, tokens or samples a second, or a share of peak."""
    if (rate := _rate(measured, "step_ms")) is not None:
        return rate / 1e3
    if (rate := _rate(measured, "step_s", "step_seconds")) is not None:
        return rate
    samples = degrees["replicate"] * degrees["shard"] * degrees["micro"] * degrees["accumulate"]
    if (rate := _rate(measured, "tokens_s_gpu")) is not None:
        return samples * sizes.seq / (rate * gpus)
    if (rate := _rate(measured, "tokens_s")) is not None:
        return samples * sizes.seq / rate
    if (rate := _rate(measured, "samples_s")) is not None:
        return samples / rate
    return _seconds_of_operations(measured, samples * sizes.seq * sizes.flops_per_token, gpus, recompute, row)


def _seconds_of_operations(
    measured: Mapping[str, Any], flops: float, gpus: int, recompute: int, row: Mapping[str, Any]
) -> float | None:
    """Return the seconds of a row without a time, from its operations a second or its share of peak."""
    recompute_factor = 4 / 3 if recompute == 1 else 1
    # tables of Megatron-DeepSpeed include the recomputed forward (4/3)
    includes_recompute = "hardware" in str(row.get("notes")).lower() or "bigscience" in _source(row).lower()
    peak = find_gpu(str(_group(row, "hardware").get("gpu"))).flops
    if (rate := _rate(measured, "tflops_gpu")) is not None:
        seconds = flops * (recompute_factor if includes_recompute else 1) / (rate * 1e12 * gpus)
    elif (rate := _rate(measured, "mfu")) is not None:
        seconds = flops / (rate * (0.01 if rate > 1.5 else 1) * peak * gpus)
    elif (rate := _rate(measured, "hfu")) is not None:
        seconds = flops * recompute_factor / (rate * (0.01 if rate > 1.5 else 1) * peak * gpus)
    else:
        return None
    return seconds if math.isfinite(seconds) else None

"""predict_rank: all ranks compute the predictions of a trained model, in the order of the data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from everyrank.checkpoint import load_model, with_pretrained
from everyrank.data import Batch, batches_for_evaluation
from everyrank.errors import WorkloadError
from everyrank.launch import Launch, RankInfo
from everyrank.layout import Layout
from everyrank.loop import open_data, wrap_user_errors
from everyrank.options import PredictOptions
from everyrank.prediction.files import different_rows, open_predictions
from everyrank.progress import progress
from everyrank.runs import checkpoint_named
from everyrank.strategies import Prepared, prepare
from everyrank.workload import Source, Workload, load
from everyrank.world import World, open_world
from everyrank.world.collectives import all_gather

__all__ = ["predict_rank"]


def predict_rank(
    info: RankInfo, workload_or_source: Source | Workload, layout: Layout, launch: Launch, options: PredictOptions
) -> int | None:
    """Predict on this rank. Returns the number of samples on rank 0, which writes them, None on the others."""
    with open_world(info, launch) as world:
        workload = load(workload_or_source)
        if options.pretrained is not None:
            workload = with_pretrained(workload, options.pretrained)
        train_data, eval_data = open_data(workload, world)
        data = train_data if options.training_data else eval_data
        if data is None:
            raise WorkloadError(f"workload {workload.name} has no eval_data; predict its training data: --train-data")
        with wrap_user_errors():
            prepared = prepare(workload, layout, world)
        if options.resume is not None:
            load_model(prepared, world, checkpoint_named(options.resume))
        with contextlib.ExitStack() as stack:
            write = stack.enter_context(open_predictions(options.out, len(data))) if world.rank == 0 else _write_nothing
            advance = stack.enter_context(
                progress(
                    -(-len(data) // (workload.eval_batch or workload.global_batch)), options.show and world.rank == 0
                )
            )
            name = f"predict {workload.name} · {layout}"
            data_name = "train_data" if options.training_data else "eval_data"
            _predict(prepared, data, data_name, write, lambda: advance(name))
        del prepared
        return len(data) if world.rank == 0 else None


def _predict(
    prepared: Prepared, data: Any, data_name: str, write: Callable[[int, Any], None], tick: Callable[[], None]
) -> None:
    """Predict batch by batch; each rank computes its part, and rank 0 writes all in order."""
    workload, world = prepared.workload, prepared.world
    prepared.model.eval()
    first = 0
    with torch.no_grad(), prepared.averaged_weights():
        for batch in batches_for_evaluation(workload, data, prepared.data_slice, world, prepared.dtype, data_name):
            tick()
            with wrap_user_errors():
                output = prepared.predict(batch)
                local_rows = _rows_of_real_samples(workload, output, batch) if prepared.has_output else None
            local_rows = _rows_or_empty(local_rows, world)
            gathered = all_gather(local_rows, world)
            # parts of a batch are contiguous and in the order of the ranks
            rows = torch.cat([rows_of_rank.reshape(-1, *local_rows.shape[1:]) for rows_of_rank in gathered])
            if world.rank == 0:
                write(first, rows.cpu().numpy())
            first += batch.total


_DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def _rows_or_empty(local_rows: Tensor | None, world: World) -> Tensor:
    """Return this rank's rows, or an empty tensor of the other ranks' shape and dtype. A collective.

    Raises `WorkloadError` if the shape or dtype of the rows differs between ranks.
    """
    header = [] if local_rows is None else [_DTYPES.index(local_rows.dtype), *local_rows.shape[1:]]
    rows = [tuple(row.tolist()) for row in all_gather(torch.tensor(header, dtype=torch.int64), world)]
    kinds = sorted({row for row in rows if row})
    if len(kinds) > 1:
        first, second = (f"shape {tuple(shape)}, {_dtype_name(_DTYPES[dtype])}," for dtype, *shape in kinds[:2])
        raise different_rows(f"{first} on one rank", f"{second} on another")
    return local_rows if local_rows is not None else torch.zeros(0, *kinds[0][1:], dtype=_DTYPES[kinds[0][0]])


def _rows_of_real_samples(workload: Workload, output: Any, batch: Batch) -> Tensor:
    """Return the predictions of the real samples of a batch, without dummy samples."""
    prediction: object = workload.predict(output) if workload.predict is not None else output
    if not isinstance(prediction, Tensor) or prediction.dim() == 0:
        kind = (
            f"a tensor of shape {tuple(prediction.shape)}"
            if isinstance(prediction, Tensor)
            else type(prediction).__name__
        )
        raise WorkloadError(
            f"predict: the result is {kind}; give Workload.predict = (output) -> Tensor with a row for each sample"
        )
    if batch.size and len(prediction) != batch.size:
        raise WorkloadError(f"predict: {len(prediction)} rows for {batch.size} samples; there must be one for each")
    prediction = prediction[: batch.size]
    if prediction.dtype in (torch.bfloat16, torch.float16):
        return prediction.float()
    if prediction.dtype not in _DTYPES:
        raise WorkloadError(
            f"predict: rows of {_dtype_name(prediction.dtype)} cannot be written; give Workload.predict = (output) -> "
            f"rows of {', '.join(map(_dtype_name, _DTYPES))}"
        )
    return prediction


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _write_nothing(_: int, __: Any) -> None:
    """Ignore the predictions on a rank other than 0."""

"""Reads the gradients of DeepSpeed, which stores the gradient of the step in its own flat partitions.

A hook on each parameter gets the gradient of one backward, with and without ZeRO 1 to 3. Just before the step,
DeepSpeed returns the gradient of the step, averaged over the ranks and not clipped yet.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from everyrank.audit.watch.gradients import Gradients, sample
from everyrank.audit.watch.imports import after_import
from everyrank.audit.watch.recorder import Recorder, harmless

__all__ = ["install_deepspeed"]


def install_deepspeed(recorder: Recorder, gradients: Gradients) -> None:
    """Patch DeepSpeed's engine when the script imports it."""
    after_import("deepspeed.runtime.engine", functools.partial(_watch_engine, _EngineReader(recorder, gradients)))


class _EngineReader:
    """Reads gradients from a DeepSpeed engine."""

    def __init__(self, recorder: Recorder, gradients: Gradients) -> None:
        self.recorder, self.gradients = recorder, gradients

    @harmless("gradients under DeepSpeed")
    def read(self, engine: Any) -> None:
        """Record samples of the gradients of the step. A collective, because all ranks step together."""
        from deepspeed.utils import safe_get_full_grad  # pyright: ignore[reportMissingImports]

        gradients, samples = self.gradients, dict[str, np.ndarray]()
        with self.recorder.muted():
            for parameter in engine.module.parameters():
                grad = safe_get_full_grad(parameter) if parameter.requires_grad else None
                if grad is not None and id(parameter) in gradients.names:
                    samples[gradients.names[id(parameter)]] = sample(grad)
        gradients.engine_grads = samples


def _watch_engine(reader: _EngineReader, module: Any) -> None:
    engine = module.DeepSpeedEngine
    step = engine.step
    reader.gradients.reads_deepspeed = True

    @functools.wraps(step)
    def stepping(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.is_gradient_accumulation_boundary():
            return step(self, *args, **kwargs)
        if reader.gradients.is_wanted:
            reader.read(self)
        reader.gradients.is_in_engine = True
        try:
            return step(self, *args, **kwargs)
        finally:
            reader.gradients.is_in_engine = False
            reader.gradients.engine_grads = {}

    engine.step = stepping

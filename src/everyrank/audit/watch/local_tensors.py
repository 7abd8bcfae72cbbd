"""Records lines that call `to_local()` of a replicated DTensor without the placements of its gradient."""

from __future__ import annotations

import functools
from typing import Any

from everyrank.audit.events import LocalTensor
from everyrank.audit.watch.imports import after_import
from everyrank.audit.watch.recorder import Recorder
from everyrank.audit.watch.source_location import caller_is_user_code, user_line

__all__ = ["install_local_tensors"]


def install_local_tensors(recorder: Recorder) -> None:
    """Hook `DTensor.to_local`."""
    after_import("torch.distributed.tensor._api", functools.partial(_watch, recorder))


def _watch(recorder: Recorder, module: Any) -> None:
    to_local = module.DTensor.to_local
    lines = set[str]()

    @functools.wraps(to_local)
    def local(self: Any, *args: Any, **kwargs: Any) -> Any:
        has_placements = bool(args) or kwargs.get("grad_placements") is not None
        if self.requires_grad and not has_placements and not recorder.is_muted and caller_is_user_code():
            line = user_line()
            if line not in lines and all(placement.is_replicate() for placement in self.placements):
                lines.add(line)
                recorder.write(LocalTensor(line=line))
        return to_local(self, *args, **kwargs)

    module.DTensor.to_local = local

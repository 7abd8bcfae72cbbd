"""State of the micro-batch in the current forward pass: dummy sample, recomputation, contexts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

__all__ = ["ContextFactory", "MicroBatchState"]

ContextFactory = Callable[[], contextlib.AbstractContextManager[Any]]


class MicroBatchState:
    """The micro-batch in the current forward or backward pass; one per model.

    is_padding        it is a dummy sample of weight zero, on a rank without samples
    is_recomputing    a block recomputes its forward in backward
    contexts          entered around each micro-batch: forward, loss and backward
    recompute_contexts   those of them that a recomputed block needs
    """

    def __init__(self, contexts: Sequence[ContextFactory] = (), recompute_contexts: Sequence[ContextFactory] = ()):
        self.is_padding = self.is_recomputing = False
        self.contexts, self.recompute_contexts = tuple(contexts), tuple(recompute_contexts)

    @contextlib.contextmanager
    def recomputing(self) -> Generator[None]:
        """Mark that a block runs its forward again, so that running statistics are not updated twice."""
        self.is_recomputing = True
        try:
            with contextlib.ExitStack() as stack:
                for context in self.recompute_contexts:  # torch runs backward outside the modes of the caller
                    stack.enter_context(context())
                yield
        finally:
            self.is_recomputing = False

"""What the forward pass in progress must know of its micro-batch: padding, recomputation, the modes it runs under."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

__all__ = ["ContextFactory", "MicroBatchState"]

ContextFactory = Callable[[], contextlib.AbstractContextManager[Any]]


class MicroBatchState:
    """The micro-batch that goes through the model, forward or backward. One for each model.

    is_padding        it is a padding sample: one of weight zero, on a rank that has no sample of its own
    is_recomputing    a block runs its forward once more, in backward
    contexts          entered around each micro-batch: forward, loss and backward
    recompute_contexts   of these, those that a block needs when it runs again
    """

    def __init__(self, contexts: Sequence[ContextFactory] = (), recompute_contexts: Sequence[ContextFactory] = ()):
        self.is_padding = self.is_recomputing = False
        self.contexts, self.recompute_contexts = tuple(contexts), tuple(recompute_contexts)

    @contextlib.contextmanager
    def enter(self, is_padding: bool) -> Generator[None]:
        """While a micro-batch goes through the model."""
        self.is_padding = is_padding
        with contextlib.ExitStack() as stack:
            for context in self.contexts:
                stack.enter_context(context())
            yield

    @contextlib.contextmanager
    def recomputing(self) -> Generator[None]:
        """While a block runs its forward again: running statistics have already seen this micro-batch."""
        self.is_recomputing = True
        try:
            with contextlib.ExitStack() as stack:
                for context in self.recompute_contexts:  # torch runs backward outside of the modes of its caller
                    stack.enter_context(context())
                yield
        finally:
            self.is_recomputing = False

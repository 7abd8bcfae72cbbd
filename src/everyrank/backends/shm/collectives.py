"""Collectives over shared memory: a rank writes into its own buffer, and reads the buffers that it needs.

Tensors longer than a buffer are sent in chunks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from everyrank.backends.operation_queue import Steps, no_steps
from everyrank.backends.shm.calls import encode_call
from everyrank.backends.shm.chunks import as_bytes, chunk_slices, chunks_of, even_slices
from everyrank.backends.shm.phases import LINE_WORDS, Phases
from everyrank.errors import RankFailedError

__all__ = ["SharedMemoryCollectives"]

_REDUCE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
# An all-reduce has one phase if the bytes of the tensor times the number of ranks are fewer than this. Each rank then
# reduces the whole tensor, which is cheaper for a short tensor than a second phase.
_MIN_TWO_PHASE_BYTES = 2**18


class SharedMemoryCollectives(Phases):
    """Implements `GroupCollectives` over the shared buffers of a group."""

    def barrier(self) -> Steps:
        """Wait until all ranks have reached the barrier."""
        call = encode_call("barrier", torch.uint8, 0)
        yield from self._begin(call)
        yield from self._signal_and_wait(self.other_ranks)

    def all_reduce(self, tensor: Tensor, reduction: str) -> Steps:
        """Reduce `tensor` over all ranks, in place: short tensors in one phase, long ones in two."""
        call = encode_call("all_reduce", tensor.dtype, tensor.numel(), reduction)
        if self.size == 1:
            return no_steps()
        is_short = tensor.nbytes * self.size < _MIN_TWO_PHASE_BYTES
        if is_short:
            return self._all_reduce_short(tensor, call, reduction)
        return self._all_reduce_long(tensor, call, reduction)

    def _all_reduce_short(self, tensor: Tensor, call: int, reduction: str) -> Steps:
        """All-reduce in one phase: each rank reduces the whole tensor."""
        yield from self._begin(call)
        buffers = self._prefixes(tensor.dtype, tensor.numel())
        buffers[self.rank].copy_(tensor)
        yield from self._signal_and_wait(self.other_ranks)
        self._reduce_locally(buffers, tensor, reduction)

    def _all_reduce_long(self, tensor: Tensor, call: int, reduction: str) -> Steps:
        """All-reduce in two phases, reduce-scatter and all-gather: each rank reduces one shard of each chunk."""
        for chunk in chunks_of(tensor, self.num_bytes // tensor.itemsize):
            yield from self._begin(call)
            slices = even_slices(len(chunk), self.size)
            first, last = slices[self.rank].start, slices[self.rank].stop
            local_buffer = self._phase_buffers(chunk.dtype, self.phase)[self.rank]
            local_buffer[:first].copy_(chunk[:first])
            local_buffer[last : len(chunk)].copy_(chunk[last:])
            yield from self._signal_and_wait(self.other_ranks)
            buffers = self._phase_buffers(chunk.dtype, self.phase)
            local_shard = chunk[first:last]
            shards = [local_shard, *(buffers[rank][first:last] for rank in self.other_ranks)]
            self._reduce_locally(shards, local_shard, reduction)
            yield from self._begin(call)
            buffers = self._phase_buffers(chunk.dtype, self.phase)
            buffers[self.rank][first:last].copy_(local_shard)
            yield from self._signal_and_wait(self.other_ranks)
            for rank in self.other_ranks:
                chunk[slices[rank]].copy_(buffers[rank][slices[rank]])

    def _reduce_locally(self, inputs: list[Tensor], output: Tensor, reduction: str) -> None:
        """Reduce the inputs, in their order, into `output`, which may be the first of them."""
        function, result = _REDUCE[reduction], inputs[0]
        for tensor in inputs[1:]:
            result = function(result, tensor, out=output)
        if reduction == "avg":
            output.div_(self.size)

    def reduce(self, tensor: Tensor, reduction: str, root: int) -> Steps:
        """Reduce `tensor` over all ranks, in place on the root."""
        call = encode_call("reduce", tensor.dtype, len(tensor), reduction, root)
        return self._reduce_to_root(tensor, call, reduction, root)

    def _reduce_to_root(self, tensor: Tensor, call: int, reduction: str, root: int) -> Steps:
        if self.size == 1:
            return
        for chunk in chunks_of(tensor, self.num_bytes // tensor.itemsize):
            yield from self._begin(call)
            buffers = self._phase_buffers(tensor.dtype, self.phase)
            if self.rank != root:
                buffers[self.rank][: len(chunk)].copy_(chunk)
                yield from self._signal_and_wait([])
            else:
                yield from self._signal_and_wait(self.other_ranks)
                self._reduce_locally(
                    [chunk, *(buffers[rank][: len(chunk)] for rank in self.other_ranks)], chunk, reduction
                )

    def broadcast(self, tensor: Tensor, root: int) -> Steps:
        """Copy `tensor` of the root to all ranks."""
        call = encode_call("broadcast", tensor.dtype, len(tensor), root=root)
        for chunk in chunks_of(as_bytes(tensor), self.num_bytes):
            yield from self._begin(call)
            buffer = self._phase_buffers(torch.uint8, self.phase)[root][: len(chunk)]
            if self.rank == root:
                buffer.copy_(chunk)
                yield from self._signal_and_wait([])
            else:
                yield from self._signal_and_wait([root])
                chunk.copy_(buffer)

    def all_gather(self, outputs: list[Tensor], input_tensor: Tensor) -> Steps:
        """Copy `input_tensor` of each rank to `outputs` of all ranks."""
        return self._gather(encode_call("all_gather", input_tensor.dtype, len(input_tensor)), outputs, input_tensor)

    def gather(self, outputs: list[Tensor], input_tensor: Tensor, root: int) -> Steps:
        """Copy `input_tensor` of each rank to `outputs` of the root."""
        call = encode_call("gather", input_tensor.dtype, len(input_tensor), root=root)
        return self._gather(call, outputs, input_tensor)

    def _gather(self, call: int, outputs: list[Tensor], input_tensor: Tensor) -> Steps:
        """Copy `input_tensor` of each rank to `outputs` of every rank whose `outputs` is not empty."""
        for span in chunk_slices(input_tensor.nbytes, self.num_bytes):
            chunk = as_bytes(input_tensor)[span]
            yield from self._begin(call)
            buffers = self._phase_buffers(torch.uint8, self.phase)
            buffers[self.rank][: len(chunk)].copy_(chunk)
            yield from self._signal_and_wait(self.other_ranks if outputs else [])
            for output, buffer in zip(outputs, buffers, strict=False):
                as_bytes(output)[span].copy_(buffer[: len(chunk)])

    def scatter(self, output: Tensor, inputs: list[Tensor], root: int) -> Steps:
        """Copy `inputs[r]` of the root to `output` of rank r."""
        call = encode_call("scatter", output.dtype, len(output), root=root)
        bytes_per_rank = self._bytes_per_rank()
        for span in chunk_slices(output.nbytes, bytes_per_rank):
            length = span.stop - span.start
            yield from self._begin(call)
            buffer = self._phase_buffers(torch.uint8, self.phase)[root]
            if self.rank == root:
                for rank in range(self.size):
                    first = rank * bytes_per_rank
                    buffer[first : first + length].copy_(as_bytes(inputs[rank])[span])
                yield from self._signal_and_wait([])
            else:
                yield from self._signal_and_wait([root])
            first = self.rank * bytes_per_rank
            as_bytes(output)[span].copy_(buffer[first : first + length])

    def reduce_scatter(self, output: Tensor, inputs: list[Tensor], reduction: str) -> Steps:
        """Reduce `inputs[r]` over all ranks into `output` of rank r."""
        call = encode_call("reduce_scatter", output.dtype, len(output), reduction)
        return self._reduce_scatter(output, inputs, call, reduction)

    def _reduce_scatter(self, output: Tensor, inputs: list[Tensor], call: int, reduction: str) -> Steps:
        if self.size == 1:
            output.copy_(inputs[0])
            return
        elements_per_rank = self._bytes_per_rank() // output.itemsize
        for span in chunk_slices(len(output), elements_per_rank):
            length = span.stop - span.start
            yield from self._begin(call)
            buffers = self._phase_buffers(output.dtype, self.phase)
            for rank in self.other_ranks:
                first = rank * elements_per_rank
                buffers[self.rank][first : first + length].copy_(inputs[rank][span])
            yield from self._signal_and_wait(self.other_ranks)
            first = self.rank * elements_per_rank
            chunks = [
                inputs[self.rank][span],
                *(buffers[rank][first : first + length] for rank in self.other_ranks),
            ]
            self._reduce_locally(chunks, output[span], reduction)

    def all_to_all(self, outputs: list[Tensor], inputs: list[Tensor]) -> Steps:
        """Copy `inputs[s]` of rank r to `outputs[r]` of rank s.

        A rank knows only the lengths of its own tensors, so in the first phase each rank also writes the lengths of its
        inputs.
        """
        call = encode_call("all_to_all", (inputs + outputs)[0].dtype, 0)
        header_bytes = -(-self.size // LINE_WORDS) * LINE_WORDS * 8  # for the lengths
        bytes_per_rank = self._bytes_per_rank(header_bytes)
        input_bytes, output_bytes = [as_bytes(chunk) for chunk in inputs], [as_bytes(chunk) for chunk in outputs]
        start, max_length = 0, 1
        while start < max_length:
            yield from self._begin(call)
            buffers = self._phase_buffers(torch.uint8, self.phase)
            for rank in self.other_ranks:
                chunk, offset = input_bytes[rank][start : start + bytes_per_rank], header_bytes + rank * bytes_per_rank
                buffers[self.rank][offset : offset + len(chunk)].copy_(chunk)
            if not start:
                self._prefixes(torch.int64, self.size)[self.rank].copy_(torch.tensor(list(map(len, input_bytes))))
            yield from self._signal_and_wait(self.other_ranks)
            if not start:
                max_length = self._max_length(output_bytes)
                output_bytes[self.rank].copy_(input_bytes[self.rank])
            for rank in self.other_ranks:
                chunk = output_bytes[rank][start : start + bytes_per_rank]
                offset = header_bytes + self.rank * bytes_per_rank
                chunk.copy_(buffers[rank][offset : offset + len(chunk)])
            start += bytes_per_rank

    def _max_length(self, output_bytes: list[Tensor]) -> int:
        """Return the bytes of the longest input of any rank.

        Raises `RankFailedError` if the input that a rank sends here is not as long as the output for that rank's data.
        """
        lengths = [buffer.tolist() for buffer in self._prefixes(torch.int64, self.size)]
        for rank, output in enumerate(output_bytes):
            if lengths[rank][self.rank] != len(output):
                raise RankFailedError(
                    f"all_to_all: rank {self.ranks[rank]} sends {lengths[rank][self.rank]} bytes to rank "
                    f"{self.ranks[self.rank]}, which expects {len(output)}"
                )
        return max(map(max, lengths))

    def _bytes_per_rank(self, header_bytes: int = 0) -> int:
        """Return the bytes of one rank's part of a buffer, without the header: a multiple of 64, to align any dtype."""
        return (self.num_bytes - header_bytes) // self.size // 64 * 64

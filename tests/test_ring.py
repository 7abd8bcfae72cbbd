"""Ring attention over a split sequence: its output, its gradients, and the order of its communication."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import everyrank.parallel.context.attention as attention_module
from everyrank.errors import UnsupportedLayoutError
from everyrank.parallel.context import chunk
from everyrank.parallel.context.apply import ContextParallel
from everyrank.parallel.context.attention import SequenceGroup, chunk_order, ring_attention
from everyrank.world import World

ATEN = torch.ops.aten


def attention(query: Tensor, key: Tensor, value: Tensor, ring: bool) -> list[Tensor]:
    """Return output and gradients under bf16 autocast, of torch's attention or of a ring of one rank."""
    inputs = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    split = ContextParallel(nn.Identity(), SequenceGroup(0, 1, (0,), None), 1, "ring")
    split.length = query.shape[-2]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if ring:
            with split.context():
                output = F.scaled_dot_product_attention(*inputs, is_causal=True)
        else:
            output = F.scaled_dot_product_attention(*inputs, is_causal=True)
        output.sum().backward()  # users may call backward under autocast too
    return [output.detach(), *(tensor.grad for tensor in inputs if tensor.grad is not None)]


def test_only_current_parameters_are_recognised_as_parameters() -> None:
    """FSDP replaces parameters. A computed tensor with the id of an old parameter must not be mistaken for it.

    Otherwise, one rank raises an error, and the other ranks wait.
    """
    model = nn.ParameterList(nn.Parameter(torch.zeros(8)) for _ in range(64))
    split = ContextParallel(model, SequenceGroup(0, 1, (0,), None), 1, "ring")
    split.length = 4
    for index in range(len(model)):
        model[index] = nn.Parameter(torch.zeros(8))
    with split.context():
        computed = [torch.arange(8) for _ in range(256)]
        for tensor in computed:
            tensor[:4]
        with pytest.raises(UnsupportedLayoutError, match="counts 4 positions"):
            model[5][:4]


@pytest.mark.parametrize("is_flash", [True, False])
def test_ring_attention_under_autocast_is_as_accurate_as_torch(monkeypatch: pytest.MonkeyPatch, is_flash: bool) -> None:
    """Scores must be float32. With bf16 scores, the error relative to float64 is three times as large."""
    monkeypatch.setattr(chunk, "_flash_is_right", lambda: is_flash)
    generator = torch.Generator().manual_seed(0)
    values = [3 * torch.randn(2, 3, 64, 16, generator=generator) for _ in range(3)]
    float64_inputs = [value.double().requires_grad_() for value in values]
    output = F.scaled_dot_product_attention(*float64_inputs, is_causal=True)
    output.sum().backward()
    exact = [output.detach(), *(tensor.grad for tensor in float64_inputs if tensor.grad is not None)]
    for ring_result, torch_result, exact_result in zip(
        attention(*values, True), attention(*values, False), exact, strict=True
    ):
        assert ring_result.dtype is torch_result.dtype
        assert (ring_result - exact_result).norm() <= 1.05 * (torch_result - exact_result).norm()


def ring_error(world: World, is_flash: bool | None, width: int, kv_heads: int, causal: bool, factor: float) -> Any:
    """Return the largest difference of output and gradients from one process in float64, and the flash attention calls.

    is_flash   whether to use flash attention; None: whether it is found to be correct
    width      head size of the values; queries and keys have 8
    factor     multiplies the queries, for larger scores
    """
    length, flash_calls = 6 * 2 * world.size, []
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, length, 8), (2, kv_heads, length, 8), (2, kv_heads, length, width), (2, 4, length, width)]
    q, k, v, dout = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
    full_inputs = [value.requires_grad_() for value in (q * factor, k.clone(), v.clone())]
    exact_output = F.scaled_dot_product_attention(*full_inputs, is_causal=causal, scale=0.3, enable_gqa=True)
    exact = [exact_output, *torch.autograd.grad(exact_output, full_inputs, dout)]

    def part(tensor: Tensor) -> Tensor:
        chunks = tensor.detach().chunk(2 * world.size, dim=2)
        local_chunks = chunk_order(world.size)[2 * world.rank : 2 * world.rank + 2]
        return torch.cat([chunks[index] for index in local_chunks], dim=2)

    def count(*arguments: Any, **named: Any) -> Any:
        flash_calls.append(arguments)
        return flash(*arguments, **named)

    flash, name = ATEN._scaled_dot_product_flash_attention_for_cpu, "_scaled_dot_product_flash_attention_for_cpu"
    ring = SequenceGroup(world.rank, world.size, tuple(range(world.size)), world.group)
    local_inputs = [part(tensor).requires_grad_() for tensor in full_inputs]
    is_right = chunk._flash_is_right() if is_flash is None else is_flash
    forced = mock.patch.object(chunk, "_flash_is_right", return_value=is_right)
    with forced, mock.patch.object(ATEN, name, count):
        output = ring_attention(*local_inputs, causal, 0.3, ring)
        results = [output, *torch.autograd.grad(output, local_inputs, part(dout))]
    scale = max(1.0, *(tensor.abs().max().item() for tensor in exact))
    pairs = zip(results, exact, strict=True)
    return max(float((result - part(expected)).abs().max()) for result, expected in pairs) / scale, len(flash_calls)


@pytest.mark.parametrize("count", [2, 4])
def test_ring_attention_matches_one_process(ranks: Any, count: int) -> None:
    """It matches with flash attention and with plain operators. Values with another head size need plain operators."""
    for causal in (False, True):
        for kv_heads in (1, 2, 4):
            for is_flash in (True, False):
                for error, uses in ranks(count, ring_error, is_flash, 8, kv_heads, causal, 1.0):
                    assert error < 1e-12
                    assert bool(uses) == is_flash
        for error, uses in ranks(count, ring_error, None, 5, 2, causal, 1.0):
            assert error < 1e-12
            assert uses == 0


@pytest.mark.parametrize("is_flash", [True, False])
def test_large_scores_do_not_overflow(ranks: Any, is_flash: bool) -> None:
    """Log-sum-exps are merged without overflow. The test fails if their exponentials are added directly."""
    for error, _ in ranks(2, ring_error, is_flash, 8, 2, True, 1e3):
        assert error < 1e-12
    for error, _ in ranks(2, merged_without_maximum, is_flash):
        assert not error < 1e-12


def merged_without_maximum(world: World, is_flash: bool) -> Any:
    """Return the error if log-sum-exps are merged without subtracting the maximum."""
    with mock.patch.object(torch, "logaddexp", lambda one, other: (one.exp() + other.exp()).log()):
        return ring_error(world, is_flash, 8, 2, True, 1e3)


def order_in_backward(world: World) -> list[str]:
    """Return the operations of this rank in the backward pass, in order."""
    operations = list[str]()
    send, compute = attention_module.ring_send_recv, attention_module.attend_backward

    def recorded_send(tensor: Tensor, ring: SequenceGroup) -> Callable[[], Tensor]:
        content = "gradients" if tensor.dtype is torch.float32 else "keys and values"
        operations.append(f"send {content}")
        receive = send(tensor, ring)

        def wait() -> Tensor:
            operations.append(f"wait for {content}")
            return receive()

        return wait

    def recorded_compute(*arguments: Any) -> Any:
        operations.append("compute")
        return compute(*arguments)

    ring = SequenceGroup(world.rank, world.size, tuple(range(world.size)), world.group)
    q, k, v = (torch.randn(2, 4, 8, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    output = ring_attention(q, k, v, False, 0.3, ring)
    with (
        mock.patch.object(attention_module, "ring_send_recv", recorded_send),
        mock.patch.object(attention_module, "attend_backward", recorded_compute),
    ):
        output.backward(torch.ones_like(output))
    return operations


def test_gradient_transfers_overlap_with_computation(ranks: Any) -> None:
    """Gradients of keys and values are sent around the ring. Only the last transfer overlaps with no computation."""
    step = ["send keys and values", "compute", "wait for keys and values"]
    between = [*step, "wait for gradients", "send gradients"]
    last = ["compute", "wait for gradients", "send gradients", "wait for gradients"]
    for operations in ranks(4, order_in_backward):
        assert operations == [*step, "send gradients", *between, *between, *last]


def test_flash_attention_is_available() -> None:
    """The installed torch has the flash operators. Without them, results are the same, but slower."""
    assert chunk._flash_is_right()


WRONG: dict[str, Callable[..., Any]] = {
    "it is not there": lambda *_, **__: ATEN.no_such_operator,
    "other arguments": lambda original, q, k, v: original(q, k, v),
    "another answer": lambda original, *rest, **named: tuple(part * (1 + 1e-10) for part in original(*rest, **named)),
    "another layout": lambda original, *rest, **named: original(*rest, **named)[:1],
}


@pytest.mark.parametrize("direction", ["", "_backward"])
@pytest.mark.parametrize("difference", WRONG)
def test_changed_flash_operator_is_not_used(monkeypatch: pytest.MonkeyPatch, difference: str, direction: str) -> None:
    """If a flash operator is missing, or its arguments or results have changed, plain operators are used."""
    name = f"_scaled_dot_product_flash_attention_for_cpu{direction}"
    monkeypatch.setattr(ATEN, name, functools.partial(WRONG[difference], getattr(ATEN, name)))
    assert not chunk._flash_is_right.__wrapped__()


def test_queries_with_strided_last_dimension() -> None:
    """If heads are packed as (w h), torch's flash operator would read wrong elements."""
    packed = torch.randn(1, 6, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    q, k, v = packed.permute(0, 3, 1, 2), torch.randn(1, 2, 6, 8, dtype=torch.float64), torch.randn(1, 2, 6, 8).double()
    assert q.stride(-1) != 1
    for diagonal in (False, True):
        results = chunk.attend(q, k, v, 0.3, diagonal)
        expected = chunk.attend(q.contiguous(), k, v, 0.3, diagonal)
        assert all(
            torch.allclose(result, expected_result, atol=1e-12)
            for result, expected_result in zip(results, expected, strict=True)
        )

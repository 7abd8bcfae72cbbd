"""Attention over a split sequence: its numbers."""

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
    """Output and gradients under autocast to bf16, of torch's own function or of a ring of one."""
    own = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    split = ContextParallel(nn.Identity(), SequenceGroup(0, 1, (0,), None), 1, "ring")
    split.length = query.shape[-2]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if ring:
            with split.context():
                output = F.scaled_dot_product_attention(*own, is_causal=True)
        else:
            output = F.scaled_dot_product_attention(*own, is_causal=True)
        output.sum().backward()  # a person may do that inside, too
    return [output.detach(), *(tensor.grad for tensor in own if tensor.grad is not None)]


def test_only_what_the_model_has_now_is_its_own() -> None:
    """FSDP replaces the parameters; known by the ids of those, what a model computes was at times taken for one.

    On one rank of several, which then refused alone, and the others waited.
    """
    model = nn.ParameterList(nn.Parameter(torch.zeros(8)) for _ in range(64))
    split = ContextParallel(model, SequenceGroup(0, 1, (0,), None), 1, "ring")
    split.length = 4
    for place in range(len(model)):
        model[place] = nn.Parameter(torch.zeros(8))
    with split.context():
        computed = [torch.arange(8) for _ in range(256)]
        for tensor in computed:
            tensor[:4]
        with pytest.raises(UnsupportedLayoutError, match="counts 4 positions"):
            model[5][:4]


@pytest.mark.parametrize("is_flash", [True, False])
def test_ring_attention_under_autocast_is_as_good_as_torchs_own(
    monkeypatch: pytest.MonkeyPatch, is_flash: bool
) -> None:
    """Scores in bf16, where float32 is meant, were three times as far from float64."""
    monkeypatch.setattr(chunk, "_flash_is_right", lambda: is_flash)
    generator = torch.Generator().manual_seed(0)
    values = [3 * torch.randn(2, 3, 64, 16, generator=generator) for _ in range(3)]
    right = [value.double().requires_grad_() for value in values]
    output = F.scaled_dot_product_attention(*right, is_causal=True)
    output.sum().backward()
    exact = [output.detach(), *(tensor.grad for tensor in right if tensor.grad is not None)]
    for found, torchs, true in zip(attention(*values, True), attention(*values, False), exact, strict=True):
        assert found.dtype is torchs.dtype
        assert (found - true).norm() <= 1.05 * (torchs - true).norm()


def by_ring(world: World, is_flash: bool | None, width: int, kv_heads: int, causal: bool, factor: float) -> Any:
    """(largest difference from one process, uses of flash attention) of the ring's output and gradients in float64.

    is_flash   whether flash attention is taken for right; None: as it is found to be
    width      of the values; that of queries and keys is 8
    factor     of the queries: how large scores become
    """
    length, kept = 6 * 2 * world.size, []
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, length, 8), (2, kv_heads, length, 8), (2, kv_heads, length, width), (2, 4, length, width)]
    q, k, v, dout = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
    whole = [value.requires_grad_() for value in (q * factor, k.clone(), v.clone())]
    right = F.scaled_dot_product_attention(*whole, is_causal=causal, scale=0.3, enable_gqa=True)
    exact = [right, *torch.autograd.grad(right, whole, dout)]

    def part(tensor: Tensor) -> Tensor:
        chunks = tensor.detach().chunk(2 * world.size, dim=2)
        own = chunk_order(world.size)[2 * world.rank : 2 * world.rank + 2]
        return torch.cat([chunks[place] for place in own], dim=2)

    def count(*arguments: Any, **named: Any) -> Any:
        kept.append(arguments)
        return flash(*arguments, **named)

    flash, name = ATEN._scaled_dot_product_flash_attention_for_cpu, "_scaled_dot_product_flash_attention_for_cpu"
    ring = SequenceGroup(world.rank, world.size, tuple(range(world.size)), world.group)
    here = [part(tensor).requires_grad_() for tensor in whole]
    is_right = chunk._flash_is_right() if is_flash is None else is_flash
    forced = mock.patch.object(chunk, "_flash_is_right", return_value=is_right)
    with forced, mock.patch.object(ATEN, name, count):
        output = ring_attention(*here, causal, 0.3, ring)
        found = [output, *torch.autograd.grad(output, here, part(dout))]
    scale = max(1.0, *(tensor.abs().max().item() for tensor in exact))
    pairs = zip(found, exact, strict=True)
    return max(float((one - part(other)).abs().max()) for one, other in pairs) / scale, len(kept)


@pytest.mark.parametrize("count", [2, 4])
def test_the_ring_is_attention(ranks: Any, count: int) -> None:
    """By flash attention, and by plain operators, which values of another width need: that of one process."""
    for causal in (False, True):
        for kv_heads in (1, 2, 4):
            for is_flash in (True, False):
                for error, uses in ranks(count, by_ring, is_flash, 8, kv_heads, causal, 1.0):
                    assert error < 1e-12
                    assert bool(uses) == is_flash
        for error, uses in ranks(count, by_ring, None, 5, 2, causal, 1.0):
            assert error < 1e-12
            assert uses == 0


@pytest.mark.parametrize("is_flash", [True, False])
def test_scores_whose_exponentials_no_number_holds(ranks: Any, is_flash: bool) -> None:
    """Log-sum-exps are merged by their differences; added up as they are, they are no numbers any more."""
    for error, _ in ranks(2, by_ring, is_flash, 8, 2, True, 1e3):
        assert error < 1e-12
    for error, _ in ranks(2, merged_without_maximum, is_flash):
        assert not error < 1e-12


def merged_without_maximum(world: World, is_flash: bool) -> Any:
    """The same, where the maximum is not taken out."""
    with mock.patch.object(torch, "logaddexp", lambda one, other: (one.exp() + other.exp()).log()):
        return by_ring(world, is_flash, 8, 2, True, 1e3)


def order_in_backward(world: World) -> list[str]:
    """What a rank does, in order, from the output's gradient to those of queries, keys and values."""
    done = list[str]()
    send, compute = attention_module.ring_send_recv, attention_module.attend_backward

    def sent(tensor: Tensor, ring: SequenceGroup) -> Callable[[], Tensor]:
        what = "gradients" if tensor.dtype is torch.float32 else "keys and values"
        done.append(f"send {what}")
        receive = send(tensor, ring)

        def wait() -> Tensor:
            done.append(f"wait for {what}")
            return receive()

        return wait

    def computed(*arguments: Any) -> Any:
        done.append("compute")
        return compute(*arguments)

    ring = SequenceGroup(world.rank, world.size, tuple(range(world.size)), world.group)
    q, k, v = (torch.randn(2, 4, 8, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    output = ring_attention(q, k, v, False, 0.3, ring)
    with (
        mock.patch.object(attention_module, "ring_send_recv", sent),
        mock.patch.object(attention_module, "attend_backward", computed),
    ):
        output.backward(torch.ones_like(output))
    return done


def test_gradients_travel_while_the_next_ones_are_computed(ranks: Any) -> None:
    """Those of keys and values go home from rank to rank: only the last way is one that nothing else happens on."""
    step = ["send keys and values", "compute", "wait for keys and values"]
    between = [*step, "wait for gradients", "send gradients"]
    last = ["compute", "wait for gradients", "send gradients", "wait for gradients"]
    for found in ranks(4, order_in_backward):
        assert found == [*step, "send gradients", *between, *between, *last]


def test_flash_attention_is_there() -> None:
    """In the torch that is installed; one without it is as right, and slower."""
    assert chunk._flash_is_right()


WRONG: dict[str, Callable[..., Any]] = {
    "it is not there": lambda *_, **__: ATEN.no_such_operator,
    "other arguments": lambda original, q, k, v: original(q, k, v),
    "another answer": lambda original, *rest, **named: tuple(part * (1 + 1e-10) for part in original(*rest, **named)),
    "another layout": lambda original, *rest, **named: original(*rest, **named)[:1],
}


@pytest.mark.parametrize("direction", ["", "_backward"])
@pytest.mark.parametrize("what", WRONG)
def test_flash_attention_that_is_not_what_it_was(monkeypatch: pytest.MonkeyPatch, what: str, direction: str) -> None:
    """Then the plain operators stay."""
    name = f"_scaled_dot_product_flash_attention_for_cpu{direction}"
    monkeypatch.setattr(ATEN, name, functools.partial(WRONG[what], getattr(ATEN, name)))
    assert not chunk._flash_is_right.__wrapped__()


def test_queries_whose_widths_do_not_lie_side_by_side() -> None:
    """Heads packed as (w h): torch's operator would read others' numbers."""
    packed = torch.randn(1, 6, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    q, k, v = packed.permute(0, 3, 1, 2), torch.randn(1, 2, 6, 8, dtype=torch.float64), torch.randn(1, 2, 6, 8).double()
    assert q.stride(-1) != 1
    for diagonal in (False, True):
        found = chunk.attend(q, k, v, 0.3, diagonal)
        right = chunk.attend(q.contiguous(), k, v, 0.3, diagonal)
        assert all(torch.allclose(one, other, atol=1e-12) for one, other in zip(found, right, strict=True))

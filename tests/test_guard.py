"""The guard: a flipped bit is found with rank and tensor, under every layout that has replicas, and nothing else is."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import zoo
from checkpointing import Going, training
from everyrank.errors import DivergedError
from everyrank.runs import optimal_interval_seconds
from everyrank.train.guard import Guard, bits_checksum
from everyrank.world import World
from processes import Cli, refused
from resuming import WORKLOAD

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}

# --- the bits_checksum


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_every_single_bit_counts(dtype: torch.dtype) -> None:
    """In the first rows, in the last one that is not full, and in the sign."""
    values = torch.randn(2 * 1024 + 5, generator=torch.Generator().manual_seed(1)).gt(0).to(dtype)
    other = torch.ones(3, dtype=torch.float16)
    before = int(bits_checksum([values, other]))
    bits = values.view(INTEGERS[values.element_size()])
    width = 8 * values.element_size()
    for place in (0, 1, 1023, 1024, 2047, 2048, 2052):
        for bit in range(width):
            mask = torch.tensor(1 << bit if bit < width - 1 or dtype in (torch.uint8, torch.bool) else -(1 << bit))
            bits[place] ^= mask.to(bits.dtype)
            assert int(bits_checksum([values, other])) != before, (place, bit)
            bits[place] ^= mask.to(bits.dtype)
    assert int(bits_checksum([values, other])) == before


def test_elements_and_tensors_that_change_places_count() -> None:
    values = torch.arange(3000.0)
    before = int(bits_checksum([values, values[:10] + 1]))
    for one, two in ((0, 1), (0, 1024), (1, 1024), (2047, 2048), (3, 2999)):
        swapped = values.clone()
        swapped[[one, two]] = values[[two, one]]
        assert int(bits_checksum([swapped, values[:10] + 1])) != before, (one, two)
    assert int(bits_checksum([values[:10] + 1, values])) != before


def test_large_and_small_tensors_are_both_read() -> None:
    """A large one is read where it lies, small ones are laid side by side; an empty one and one without dimensions."""
    tensors = [torch.zeros(1 << 17), torch.zeros(3), torch.zeros(()), torch.zeros(0), torch.zeros((4, 6)).t()]
    before = int(bits_checksum(tensors))
    assert int(bits_checksum([tensor.clone() for tensor in tensors])) == before
    for tensor in tensors:
        if tensor.numel():
            tensor.view(-1)[-1:].fill_(1e-30) if tensor.is_contiguous() else tensor[-1, -1].fill_(1e-30)
            assert int(bits_checksum(tensors)) != before
            before = int(bits_checksum(tensors))


# --- which ranks hold the same


def flip(tensor: Tensor) -> None:
    """One bit of its first element."""
    own = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    bits = own.reshape(-1).view(INTEGERS[own.element_size()])
    assert bits.data_ptr() == own.data_ptr()
    bits[0] ^= 1


def guarded(world: World, name: str, layout: str, names: list[str], rank: int) -> list[str]:
    """What the guard says after two updates, then with a bit flipped in each of these tensors of a rank, in turn."""
    going = Going(world, training("adamw") if name == "mixed" else zoo.workload(name, "adamw"), layout)
    guard = Guard(going.prepared, "warn", 1, 0)
    going.updates(0, 2)
    lines = [guard.check(2) if guard.compares else "nothing to compare"]
    trainable = going.prepared.trainable
    found = dict(trainable.model.named_parameters()) | dict(trainable.model.named_buffers())
    for number, name in enumerate(names, 3):
        place, _, key = name.partition("/")
        tensor = found.get(place)
        if tensor is not None and key:
            tensor = trainable.optimizer.state[tensor][key]
        for _ in range(2):
            if tensor is not None and world.rank == rank:
                flip(tensor)
            lines.append(guard.check(number if _ == 0 else number + 1000))
    return lines


@pytest.mark.parametrize(
    ("name", "layout", "names", "who"),
    [
        (
            "mixed",
            "ddp",
            ["head.weight", "offset", "blocks.0.1.running_var", "head.bias/exp_avg"],
            "of rank 2 differs from",
        ),
        ("mixed", "zero1", ["head.weight", "temperature"], "of rank 2 differs from"),
        ("mixed", "fsdp", ["temperature", "blocks.1.1.running_mean"], "of rank 2 differs from"),
        ("mixed", "fsdp:replicate=2,shard=2", ["head.weight", "head.weight/exp_avg_sq"], "between rank 0 and rank 2"),
        ("decoder", "tensor", ["blocks.0.attention_norm.weight"], "of rank 2 differs from"),
        ("decoder", "ddp:tensor=2", ["blocks.0.attention.query.weight"], "between rank 0 and rank 2"),
        ("decoder", "pipeline:pipeline=2,replicate=2", ["blocks.3.feed_norm.weight"], "between rank 2 and rank 3"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_a_flipped_bit_is_found(ranks: Any, name: str, layout: str, names: list[str], who: str) -> None:
    """Nothing is said before; then the rank and the tensor, since when; flipped back, nothing again."""
    first, *found = ranks(4, guarded, name, layout, names, 2)
    lines = first
    assert found == [lines] * 3, "all ranks say the same"
    assert lines[0] == ""
    for number, tensor in enumerate(names):
        line, back = lines[1 + 2 * number], lines[2 + 2 * number]
        assert who in line, line
        assert tensor.partition("/")[0] in line
        assert back == ""
        assert ("optimizer state" in line) == ("/" in tensor)
    assert "updates 3 to 3" in lines[1]


@pytest.mark.parametrize(
    ("name", "layout", "said"),
    [
        ("experts", "expert", ""),
        ("decoder", "context", ""),
        ("decoder", "fsdp:shard=2,tensor=2", ""),
        ("decoder", "local_sgd:every=2", ""),
        ("decoder", "parameter_server", "nothing to compare"),
        ("decoder", "fsdp", "nothing to compare"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_what_may_differ_is_no_finding(ranks: Any, name: str, layout: str, said: str) -> None:
    """Each rank's own experts, momentum between two means, a server's part."""
    assert ranks(4, guarded, name, layout, [], 2) == [[said]] * 4


def stops(world: World) -> str:
    going = Going(world, training("sgd"), "ddp")
    guard = Guard(going.prepared, "stop", 1, 0)
    if world.rank == 1:
        flip(going.prepared.trainable.parameters[0])
    with pytest.raises(DivergedError) as caught:
        guard.check(1)
    assert guard.check(1) == "", "what was compared is not compared again before it is saved"
    return str(caught.value)


def test_stop_is_an_error_of_every_rank(ranks: Any) -> None:
    """Of two ranks nobody knows which is right."""
    one, other = ranks(2, stops)
    assert one == other
    assert "differs between rank 0 and rank 1" in one
    assert "--resume" in one


# --- in a training

# each forward of rank 1 in training is one update; the model is found by its frame, as memory finds it by chance
FLIP = """\
calls = 0


def squared(output, target):
    global calls
    calls += output.requires_grad
    if output.requires_grad and calls == int(os.environ.get("FLIP", "0")) and torch.distributed.get_rank() == 1:
        import gc

        (weight,) = [p for p in gc.get_objects() if isinstance(p, nn.Parameter) and p.shape == (6, 5)]
        weight.data.view(-1).view(torch.int64)[3] ^= 1 << 40
"""


def test_a_training_that_diverges_is_stopped_before_it_is_saved(cli: Cli, tmp_path: Path) -> None:
    """Between two comparisons, and a checkpoint is due first: it is not saved, status 4, and --resume goes on."""
    (tmp_path / "mine.py").write_text(WORKLOAD.replace("def squared(output, target):\n", FLIP))
    words = ("train", "mine.py", "--layout", "ddp:precision=float64", "--save-every", "5", "--out", "run")
    guard = ("--guard", "stop", "--guard-every", "50")
    done = cli.on_ranks(tmp_path, *words, *guard, size=2, FLIP="7")
    assert done.status == 4, done
    line = done.err.splitlines()[-1]
    assert line.startswith("everyrank: ")
    assert "after update 10: " in line
    assert "0.weight differs between rank 0 and rank 1" in line
    assert "updates 7 to 10" in line
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert saved == ["step-00000005", "step-00000006"]
    done = cli.on_ranks(tmp_path, *words, *guard, "--resume", size=2)
    assert done.status == 0, done
    assert "resumed after update 6" in done.out
    done = cli.on_ranks(tmp_path, *words[:-1], "warned", "--guard", "warn", "--guard-every", "4", size=2, FLIP="7")
    assert done.status == 0, done
    assert done.out.count("the training continues (--guard warn)") == 1
    assert "after update 8: " in done.out


# --- --save-every auto


def test_the_interval_loses_least() -> None:
    """Held against the expected time of Daly's model, minimised by trying: within a thousandth of the best."""
    for save, mtbf in ((1.0, 86400.0), (60.0, 3600.0), (300.0, 1800.0), (0.01, 10.0)):

        def expected(interval: float, save: float = save, mtbf: float = mtbf) -> float:
            return mtbf * math.expm1((interval + save) / mtbf) / interval

        best = min(expected(mtbf * 1.001**-k) for k in range(20000))
        assert expected(optimal_interval_seconds(save, mtbf)) < 1.001 * best
    assert optimal_interval_seconds(100.0, 10.0) == 10.0
    assert optimal_interval_seconds(1.0, 86400.0) == pytest.approx((2 * 86400.0) ** 0.5, rel=0.01)


def test_auto_saves_as_often_as_failures_ask_for(cli: Cli, tmp_path: Path) -> None:
    """Failures are milliseconds apart: the first checkpoint tells how long one takes, and so when the next come."""
    (tmp_path / "mine.py").write_text(WORKLOAD)
    words = ("train", "mine.py", "--layout", "ddp", "--save-every", "auto", "--steps", "60", "--best", "eval_loss")
    done = cli.on_ranks(tmp_path, *words, "--evaluate-every", "0", "--mtbf", "1e-6", "--out", "run", size=2)
    assert done.status == 0, done
    said = [line for line in done.out.splitlines() if line.startswith("a checkpoint every ")]
    assert len(said) == 1, done.out
    rows = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if row.get("checkpoint")]
    assert steps[0] == 10
    assert steps[-1] == 60
    done = cli.on_ranks(tmp_path, *words, "--evaluate-every", "0", "--mtbf", "1e9", "--out", "rare", size=2)
    assert done.status == 0, done
    rows = [json.loads(line) for line in (tmp_path / "rare" / "events.jsonl").read_text().splitlines()]
    rare = [row["step"] for row in rows if row.get("checkpoint")]
    assert rare == [10, 60]
    assert len(steps) > len(rare)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--save-every", "often"), "'often': "),
        (("--save-every", "-1"), "--save-every -1: "),
        (("--save-every", "auto", "--mtbf", "0"), "--mtbf 0: "),
        (("--guard", "maybe"), "invalid choice: 'maybe'"),
        (("--guard", "stop", "--guard-every", "0"), "--guard-every 0: give at least 1"),
    ],
)
def test_words_that_cannot_be(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], line: str) -> None:
    assert line in refused(capsys, "train", "digits", *words)

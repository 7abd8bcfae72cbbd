"""The guard: it locates a flipped bit by rank and tensor under each layout with replicas, without false alarms."""

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
from checkpointing import TrainingSession, mixed_workload
from everyrank.errors import DivergedError
from everyrank.runs import optimal_interval_seconds
from everyrank.train.guard import Guard, bits_checksum
from everyrank.world import World
from processes import Cli, refusal_message
from resuming import WORKLOAD

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}

# --- bits_checksum


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_checksum_changes_with_every_single_bit(dtype: torch.dtype) -> None:
    """The flipped bits include sign bits, and elements of the first rows and of the incomplete last row."""
    values = torch.randn(2 * 1024 + 5, generator=torch.Generator().manual_seed(1)).gt(0).to(dtype)
    other = torch.ones(3, dtype=torch.float16)
    before = int(bits_checksum([values, other]))
    bits = values.view(INTEGERS[values.element_size()])
    width = 8 * values.element_size()
    for index in (0, 1, 1023, 1024, 2047, 2048, 2052):
        for bit in range(width):
            mask = torch.tensor(1 << bit if bit < width - 1 or dtype in (torch.uint8, torch.bool) else -(1 << bit))
            bits[index] ^= mask.to(bits.dtype)
            assert int(bits_checksum([values, other])) != before, (index, bit)
            bits[index] ^= mask.to(bits.dtype)
    assert int(bits_checksum([values, other])) == before


def test_checksum_changes_when_elements_or_tensors_are_swapped() -> None:
    values = torch.arange(3000.0)
    before = int(bits_checksum([values, values[:10] + 1]))
    for first, second in ((0, 1), (0, 1024), (1, 1024), (2047, 2048), (3, 2999)):
        swapped = values.clone()
        swapped[[first, second]] = values[[second, first]]
        assert int(bits_checksum([swapped, values[:10] + 1])) != before, (first, second)
    assert int(bits_checksum([values[:10] + 1, values])) != before


def test_checksum_reads_large_small_and_noncontiguous_tensors() -> None:
    """A large tensor is read in place, and small ones are concatenated. One tensor is empty, and one is a scalar."""
    tensors = [torch.zeros(1 << 17), torch.zeros(3), torch.zeros(()), torch.zeros(0), torch.zeros((4, 6)).t()]
    before = int(bits_checksum(tensors))
    assert int(bits_checksum([tensor.clone() for tensor in tensors])) == before
    for tensor in tensors:
        if tensor.numel():
            tensor.view(-1)[-1:].fill_(1e-30) if tensor.is_contiguous() else tensor[-1, -1].fill_(1e-30)
            assert int(bits_checksum(tensors)) != before
            before = int(bits_checksum(tensors))


def test_checksum_reads_tensors_of_several_devices() -> None:
    """Adam keeps its step counts on the CPU next to parameters on a GPU."""
    tensors = [torch.zeros(3, device="meta"), torch.zeros(()), torch.zeros(1 << 17)]
    assert bits_checksum(tensors).device.type == "meta"


# --- which ranks hold replicas


def flip(tensor: Tensor) -> None:
    """Flip one bit of the first local element."""
    local_tensor = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    bits = local_tensor.reshape(-1).view(INTEGERS[local_tensor.element_size()])
    assert bits.data_ptr() == local_tensor.data_ptr()
    bits[0] ^= 1


def guard_messages(world: World, name: str, layout: str, names: list[str], rank: int) -> list[str]:
    """Return the messages of the guard after two updates, and after each flip of a bit on this rank.

    A bit of each named tensor is flipped, and then flipped back. `weight/exp_avg` names an optimizer state tensor.
    """
    workload = mixed_workload("adamw") if name == "mixed" else zoo.workload(name, "adamw")
    session = TrainingSession(world, workload, layout)
    guard = Guard(session.prepared, "warn", 1, 0)
    session.train(0, 2)
    messages = [guard.check(2) if guard.compares else "nothing to compare"]
    trainable = session.prepared.trainable
    named_tensors = dict(trainable.model.named_parameters()) | dict(trainable.model.named_buffers())
    for step, tensor_name in enumerate(names, 3):
        parameter_name, _, key = tensor_name.partition("/")
        tensor = named_tensors.get(parameter_name)
        if tensor is not None and key:
            tensor = trainable.optimizer.state[tensor][key]
        for flips_back in (False, True):
            if tensor is not None and world.rank == rank:
                flip(tensor)
            messages.append(guard.check(step + 1000 if flips_back else step))
    return messages


@pytest.mark.parametrize(
    ("name", "layout", "names", "expected_ranks"),
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
def test_flipped_bit_is_located(ranks: Any, name: str, layout: str, names: list[str], expected_ranks: str) -> None:
    """The message has the ranks, the tensor and the updates. It is empty before the flip and after flipping back."""
    messages, *other_messages = ranks(4, guard_messages, name, layout, names, 2)
    assert other_messages == [messages] * 3, "all ranks say the same"
    assert messages[0] == ""
    for index, tensor_name in enumerate(names):
        after_flip, after_flip_back = messages[1 + 2 * index], messages[2 + 2 * index]
        assert expected_ranks in after_flip, after_flip
        assert tensor_name.partition("/")[0] in after_flip
        assert after_flip_back == ""
        assert ("optimizer state" in after_flip) == ("/" in tensor_name)
    assert "updates 3 to 3" in messages[1]


@pytest.mark.parametrize(
    ("name", "layout", "message"),
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
def test_state_that_may_differ_between_ranks_is_not_reported(ranks: Any, name: str, layout: str, message: str) -> None:
    """Examples are experts, momentum between two parameter averages, and the shard of a parameter server."""
    assert ranks(4, guard_messages, name, layout, [], 2) == [[message]] * 4


def diverge_and_check(world: World) -> str:
    """Flip a bit on rank 1 and return the message of the guard's error."""
    session = TrainingSession(world, mixed_workload("sgd"), "ddp")
    guard = Guard(session.prepared, "stop", 1, 0)
    if world.rank == 1:
        flip(session.prepared.trainable.parameters[0])
    with pytest.raises(DivergedError) as caught:
        guard.check(1)
    assert guard.check(1) == "", "what was compared is not compared again before it is saved"
    return str(caught.value)


def test_guard_stop_raises_on_all_ranks(ranks: Any) -> None:
    """With two ranks the guard cannot tell which one is right, so the message names both."""
    first_message, second_message = ranks(2, diverge_and_check)
    assert first_message == second_message
    assert "differs between rank 0 and rank 1" in first_message
    assert "--resume" in first_message


# --- in a training

# Each loss of rank 1 with a gradient is one update. The weight is found by its shape among all live objects.
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


def test_diverged_training_stops_before_the_next_checkpoint(cli: Cli, tmp_path: Path) -> None:
    """A checkpoint is due before the next comparison. It is not saved, the status is 4, and `--resume` works."""
    (tmp_path / "mine.py").write_text(WORKLOAD.replace("def squared(output, target):\n", FLIP))
    train_args = ("train", "mine.py", "--layout", "ddp:precision=float64", "--save-every", "5", "--out", "run")
    guard_args = ("--guard", "stop", "--guard-every", "50")
    result = cli.on_ranks(tmp_path, *train_args, *guard_args, size=2, FLIP="7")
    assert result.status == 4, result
    error_line = result.err.splitlines()[-1]
    assert error_line.startswith("everyrank: ")
    assert "after update 10: " in error_line
    assert "0.weight differs between rank 0 and rank 1" in error_line
    assert "updates 7 to 10" in error_line
    checkpoint_names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert checkpoint_names == ["step-00000005", "step-00000006"]
    result = cli.on_ranks(tmp_path, *train_args, *guard_args, "--resume", size=2)
    assert result.status == 0, result
    assert "resumed after update 6" in result.out
    result = cli.on_ranks(
        tmp_path, *train_args[:-1], "warned", "--guard", "warn", "--guard-every", "4", size=2, FLIP="7"
    )
    assert result.status == 0, result
    assert result.out.count("the training continues (--guard warn)") == 1
    assert "after update 8: " in result.out


# --- --save-every auto


def test_optimal_interval_minimizes_the_expected_time() -> None:
    """In Daly's model, the expected time at this interval is within 0.1% of the minimum that a search finds."""
    for save, mtbf in ((1.0, 86400.0), (60.0, 3600.0), (300.0, 1800.0), (0.01, 10.0)):

        def expected_time(interval: float, save: float = save, mtbf: float = mtbf) -> float:
            return mtbf * math.expm1((interval + save) / mtbf) / interval

        shortest = min(expected_time(mtbf * 1.001**-k) for k in range(20000))
        assert expected_time(optimal_interval_seconds(save, mtbf)) < 1.001 * shortest
    assert optimal_interval_seconds(100.0, 10.0) == 10.0
    assert optimal_interval_seconds(1.0, 86400.0) == pytest.approx((2 * 86400.0) ** 0.5, rel=0.01)


def test_auto_save_interval_depends_on_the_failure_rate(cli: Cli, tmp_path: Path) -> None:
    """With a tiny MTBF more checkpoints are saved. The first one measures how long saving takes."""
    (tmp_path / "mine.py").write_text(WORKLOAD)
    train_args = ("train", "mine.py", "--layout", "ddp", "--save-every", "auto", "--steps", "60", "--best", "eval_loss")
    result = cli.on_ranks(tmp_path, *train_args, "--evaluate-every", "0", "--mtbf", "1e-6", "--out", "run", size=2)
    assert result.status == 0, result
    interval_lines = [line for line in result.out.splitlines() if line.startswith("a checkpoint every ")]
    assert len(interval_lines) == 1, result.out
    rows = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    frequent_steps = [row["step"] for row in rows if row.get("checkpoint")]
    assert frequent_steps[0] == 10
    assert frequent_steps[-1] == 60
    result = cli.on_ranks(tmp_path, *train_args, "--evaluate-every", "0", "--mtbf", "1e9", "--out", "rare", size=2)
    assert result.status == 0, result
    rows = [json.loads(line) for line in (tmp_path / "rare" / "events.jsonl").read_text().splitlines()]
    rare_steps = [row["step"] for row in rows if row.get("checkpoint")]
    assert rare_steps == [10, 60]
    assert len(frequent_steps) > len(rare_steps)


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
def test_invalid_guard_and_save_options_are_refused(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], line: str
) -> None:
    assert line in refusal_message(capsys, "train", "digits", *words)

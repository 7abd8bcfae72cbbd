"""`audit --replay` repeats the first updates in one process in float64. Its lines are right, or give a reason."""

from __future__ import annotations

import dataclasses
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from auditing import SCRIPTS, audit_forked_script, line_numbers_with
from everyrank.audit import Audit, examine
from everyrank.audit.events import LossTerm
from everyrank.audit.replay.run import CollectiveCalledError, fake_process_group, term_weights
from everyrank.audit.replay.state import RecordedBackward
from everyrank.audit.rules.gradients import check_gradients
from everyrank.audit.watch import losses
from forkserver import ForkServer

NORMS = Path(__file__).parent / "replay" / "norms.py"


def audit_with_replay(
    server: ForkServer, folder: Path, *changes: tuple[str, str], updates: int = 2, processes: int = 2
) -> Audit:
    """Audit norms.py with these replacements, and replay its first updates."""
    text = NORMS.read_text()
    for before, after in changes:
        assert text.count(before) == 1, f"norms.py has changed: {before!r} no longer fits"
        text = text.replace(before, after)
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(text)
    return audit_forked_script(server, folder, folder / "train.py", processes=processes, replay=updates)


def unchecked_replay_lines(audit: Audit) -> list[str]:
    """Return the lines about what the replay did not check."""
    return [line for line in audit.unchecked if "replay" in line]


def batch_norm_texts(audit: Audit) -> list[str]:
    """Return the texts of findings about the effect of batch norm."""
    return [finding.text for finding in audit.findings if finding.rule == "replay.batchnorm"]


def gradients_of_first_update() -> tuple[torch.Tensor, torch.Tensor]:
    """Return gradients of the first update of norms.py in float64: of four single batches, and of their union."""
    script: dict[str, Any] = runpy.run_path(str(NORMS))
    torch.manual_seed(0)
    network = script["Network"]().double()
    batches = []
    for rank in range(2):
        torch.manual_seed(1 + rank)
        batches += [script["get_batch"]() for _ in range(2)]
    parameters = list(network.parameters())

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        return torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, parameters)])

    losses = [F.cross_entropy(network(inputs.double()), labels) for inputs, labels in batches]
    inputs, labels = (torch.cat(list(part)) for part in zip(*batches, strict=True))
    return gradient(torch.stack(losses).mean()), gradient(F.cross_entropy(network(inputs.double()), labels))


def test_replay_equals_the_training_and_measures_batch_norm(python: ForkServer, tmp_path: Path) -> None:
    """The effect of batch norm equals that of a manual calculation.

    The training and its generator are bitwise unchanged.
    """
    audit = audit_with_replay(python, tmp_path / "with", updates=1)
    [line] = audit.replayed
    match = re.fullmatch(r"update 0 of 2 ranks .* the gradient is equal to (\S+)", line)
    assert match, line
    assert 0 < float(match[1]) < 1e-5
    gradient_of_batches, gradient_of_union = gradients_of_first_update()
    relative_change = float((gradient_of_batches - gradient_of_union).norm() / gradient_of_union.norm())
    [text] = batch_norm_texts(audit)
    assert "5 samples at a time, not the 20" in text
    assert f"by {relative_change:.1%} of its norm" in text
    [note] = [finding for finding in audit.findings if finding.rule == "replay.batchnorm"]
    assert note.level == "NOTE"
    assert int(note.location.rpartition(":")[2]) in line_numbers_with(
        NORMS.read_text(), "F.cross_entropy(model(inputs)"
    )
    assert unchecked_replay_lines(audit) == []
    without = audit_with_replay(python, tmp_path / "without", updates=0)
    assert (without.replayed, batch_norm_texts(without)) == ((), [])
    assert (tmp_path / "with" / "rank0.txt").read_text() == (tmp_path / "without" / "rank0.txt").read_text() != ""


SYNC_NORM = """class SyncNorm(nn.Module):
    def forward(self, inputs):
        sums = torch.stack([inputs.sum((0, 2)), (inputs * inputs).sum((0, 2))])
        means = AllReduce.apply(sums) / (inputs[:, 0].numel() * dist.get_world_size())
        return (inputs - means[0][:, None]) * (means[1] - means[0] ** 2 + 1e-5)[:, None].rsqrt()


class AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        tensor = tensor.clone()
        dist.all_reduce(tensor)
        return tensor

    backward = forward


class Network"""
SUM_AND_GATHER = """def sum_over_ranks(value):
    dist.all_reduce(value)
    return value


def gathered(value):
    values = [torch.zeros_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value)
    return torch.stack(values).amax()


class Network"""
CUSTOM_LOSS = """class Chosen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output, labels):
        ctx.save_for_backward(labels)
        return output.gather(1, labels[:, None]).mean()

    @staticmethod
    def backward(ctx, grad):
        return grad * F.one_hot(ctx.saved_tensors[0], 3) / SIZE, None


class Network"""
LOSS = "F.cross_entropy(model(inputs), labels)"
EQUAL, COUPLED, NO_FINDING = r"the gradient is equal to \de-0[6-9]$", "changes the gradient by", ""

# (replacements, pattern of the replay line, pattern of the batch norm finding, text of the unchecked line)
CASES: dict[str, tuple[list[tuple[str, str]], str, str, str]] = {
    "scale": (
        [("(loss / ACCUMULATE)", "loss")],
        r"the gradient is 2x too large \(see gradient.scale\)",
        COUPLED,
        "",
    ),
    "changed": (
        [("        optimizer.step()", "        network.after.weight.grad.sign_()\n        optimizer.step()")],
        r"of its norm away, most in after.weight, .* \(see gradient.unexplained\)",
        COUPLED,
        "",
    ),
    "float32 alone": (
        [("self.before(inputs)", "self.before(inputs + 300)")],
        r"is \de-0[34] of its norm away, like each backward from its own replay \(float32 rounding\)$",
        COUPLED,
        "",
    ),
    "casts to float32": (
        [
            ("self.before(inputs)", "self.before(inputs.float()).to(torch.float32)"),
            (".relu()", ".softmax(1, dtype=torch.float32).type_as(torch.ones(1)).type(torch.FloatTensor)"),
            (LOSS, "F.cross_entropy(F.log_softmax(model(inputs).float(), 1, dtype=torch.float32), labels)"),
        ],
        EQUAL,
        COUPLED,
        "",
    ),
    "batch norm over all ranks": (
        [
            ("class Network", SYNC_NORM),
            ("nn.BatchNorm1d(6)", "SyncNorm()"),
            ("ACCUMULATE, SIZE = 2", "ACCUMULATE, SIZE = 1"),
        ],
        EQUAL,
        NO_FINDING,
        "",
    ),
    "a collective that is no mean over the batch": (
        [(".mean(-1))", ".mean(-1)) * sum_over_ranks(inputs.max())"), ("class Network", SUM_AND_GATHER)],
        "",
        NO_FINDING,
        "replay of update 0: the model calls collectives in its forward",
    ),
    "a collective that is no all-reduce": (
        [(".mean(-1))", ".mean(-1)) + gathered(inputs.mean())"), ("class Network", SUM_AND_GATHER)],
        "",
        NO_FINDING,
        "in its forward, and a replay as one batch fails: the model or the loss calls a collective",
    ),
    "dropout": (
        [("self.norm(self.before(inputs))", "F.dropout(self.norm(self.before(inputs)), 0.3, self.training)")],
        EQUAL,
        r"of its norm \(without dropout\)$",
        "",
    ),
    "noise": (
        [(".relu()", ".relu().add(torch.randn(1))")],
        EQUAL,
        NO_FINDING,
        "the effect of batch norm: forward draws random numbers",
    ),
    "another coupling": (
        [(".relu()", ".sub(inputs.mean()).relu()")],
        EQUAL,
        NO_FINDING,
        "the effect of batch norm: something else depends on the batch",
    ),
    "a loss inside of the model": (
        [
            ("def forward(self, inputs):", "def forward(self, inputs, labels):"),
            ("return self.after(", "return F.cross_entropy(self.after("),
            (".mean(-1))", ".mean(-1)), labels)"),
            (LOSS, "model(inputs, labels)"),
        ],
        EQUAL,
        NO_FINDING,
        "effect of batch norm: the model's output has no dimension of samples",
    ),
    "recomputation": (
        [
            ("return self.after(", "return torch.utils.checkpoint.checkpoint(lambda inputs: self.after("),
            (".mean(-1))", ".mean(-1)), inputs, use_reentrant=False)"),
            ("self.norm(self.before(inputs))", "self.before(inputs)"),
            (", nn.BatchNorm1d(6),", ", nn.Identity(),"),
        ],
        EQUAL,
        NO_FINDING,
        "",
    ),
    "two losses": (
        [(LOSS, "F.cross_entropy(output := model(inputs), labels) + 0.1 * output.square().mean()")],
        r"the gradient is a multiple, equal to \de-0[6-9]: the terms",
        COUPLED,
        "",
    ),
    "a loss of parameters": (
        [(LOSS, f"{LOSS} + sum(parameter.square().sum() for parameter in model.parameters())")],
        "",
        NO_FINDING,
        "replay: the loss depends on the model's output and on",
    ),
    "an own autograd.Function": (
        [("class Network", CUSTOM_LOSS), (LOSS, "Chosen.apply(model(inputs), labels)")],
        "",
        NO_FINDING,
        "replay of update 0: the loss is computed by an autograd.Function",
    ),
    "state outside of buffers": (
        [
            (
                "        return self.after(",
                "        self.n = getattr(self, 'n', 0) + 1\n        return self.n * self.after(",
            )
        ],
        "",
        NO_FINDING,
        "replay of update 0: backward 0 of rank 0 gives a different gradient",
    ),
    "two forwards": (
        [(LOSS, f"{LOSS} + F.mse_loss(model(inputs), model(inputs))")],
        "",
        NO_FINDING,
        "replay: two forwards of the model, then a backward",
    ),
    "autocast": (
        [(LOSS, "torch.autocast('cpu', torch.bfloat16)(lambda: F.cross_entropy(model(inputs).float(), labels))()")],
        "",
        NO_FINDING,
        "replay: forward runs under autocast",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_replay_line_is_right_or_has_a_reason(python: ForkServer, tmp_path: Path, name: str) -> None:
    changes, replay_pattern, batch_norm_pattern, unchecked = CASES[name]
    audit = audit_with_replay(python, tmp_path, *changes)
    assert bool(audit.replayed) == bool(replay_pattern), (audit.replayed, audit.unchecked)
    assert all(re.search(replay_pattern, text) for text in audit.replayed), audit.replayed
    assert bool(batch_norm_texts(audit)) == bool(batch_norm_pattern), (batch_norm_texts(audit), audit.unchecked)
    assert all(re.search(batch_norm_pattern, text) for text in batch_norm_texts(audit)), batch_norm_texts(audit)
    assert bool(unchecked_replay_lines(audit)) == bool(unchecked), audit.unchecked
    assert all(unchecked in text for text in unchecked_replay_lines(audit)), audit.unchecked
    assert not [finding for finding in audit.findings if finding.rule == "replay.differs"]


def test_replay_of_accumulation_in_one_process(python: ForkServer, tmp_path: Path) -> None:
    audit = audit_with_replay(python, tmp_path, processes=1)
    [line] = audit.replayed
    assert re.search(f"updates 0 to 1 of 1 rank .*{EQUAL}", line)
    [text] = batch_norm_texts(audit)
    assert "5 samples at a time, not the 10" in text


def test_sharded_parameters_are_not_replayed(python: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text((SCRIPTS / "sharded.py").read_text())
    audit = audit_forked_script(python, tmp_path, tmp_path / "train.py", replay=2)
    assert audit.replayed == ()
    [line] = unchecked_replay_lines(audit)
    assert "replay: the parameters are sharded" in line


def test_replay_finds_a_wrong_scale_without_the_gradient_rule(
    python: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replay agrees with the gradient rule, but does not depend on it."""
    other_rules = tuple(rule for rule in examine.RULES if rule.check is not check_gradients)
    assert len(other_rules) == len(examine.RULES) - 1
    monkeypatch.setattr(examine, "RULES", other_rules)
    audit = audit_with_replay(python, tmp_path, *CASES["scale"][0])
    [finding] = [finding for finding in audit.findings if finding.rule == "replay.differs"]
    assert finding.level == "WARN"
    assert finding.text.endswith("the gradient is 2x too large")
    assert int(finding.location.rpartition(":")[2]) in line_numbers_with(
        (tmp_path / "train.py").read_text(), "optimizer.step()"
    )


def recorded_backward(*losses: tuple[float, float, str]) -> RecordedBackward:
    """Return a recorded backward with losses of (scale, terms, reduction)."""
    loss_terms = [
        LossTerm("cross_entropy", f"train.py:{number}", terms, reduction, scale=scale)
        for number, (scale, terms, reduction) in enumerate(losses)
    ]
    return dataclasses.replace(RecordedBackward(None, []), losses=loss_terms)


TERM_WEIGHT_CASES = [
    ([recorded_backward((1, 4, "mean")), recorded_backward((1, 12, "mean"))], [0.25, 0.75]),
    ([recorded_backward((0.5, 4, "sum")), recorded_backward((2, 12, "sum"))], [1 / 8, 1 / 32]),
    ([recorded_backward((1, 4, "mean"), (0.1, 4, "mean"))], None),  # the script chose different weights
    ([recorded_backward((1, 4, "mean")), recorded_backward((1, 4, "mean"), (1, 4, "mean"))], None),
    ([recorded_backward((1, 4, "none"))], None),
    ([recorded_backward()], None),
]


@pytest.mark.parametrize(("pieces", "weights"), TERM_WEIGHT_CASES)
def test_term_weights(pieces: list[RecordedBackward], weights: list[float] | None) -> None:
    """Each term has the same weight, or the result is None if the losses do not allow it."""
    actual_weights = term_weights(pieces)
    assert actual_weights == (None if weights is None else pytest.approx(weights))


def test_all_reduce_of_one_rank_does_nothing_with_any_arguments() -> None:
    tensor = torch.ones(2)
    with fake_process_group(1):
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, dist.ReduceOp.SUM, None)
        dist.all_reduce(tensor=tensor, op=dist.ReduceOp.SUM)
        for call in (
            lambda: dist.all_reduce(tensor, async_op=True),
            lambda: dist.all_reduce(tensor, dist.ReduceOp.SUM, None, True),
        ):
            with pytest.raises(CollectiveCalledError):
                call()
    assert tensor.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("kwargs", "reduction"),
    [
        ({}, "mean"),
        ({"reduction": "sum", "size_average": None, "reduce": None}, "sum"),
        ({"reduction": "mean", "size_average": False, "reduce": None}, "sum"),
        ({"reduction": "mean", "size_average": None, "reduce": False}, "none"),
    ],
)
def test_reduction_of_a_loss_by_old_arguments(kwargs: dict[str, Any], reduction: str) -> None:
    assert losses._reduction(kwargs) == reduction


def test_terms_of_a_loss_with_probabilities_as_targets() -> None:
    """Each pixel is a term, not each sample."""
    assert losses.num_terms(F.cross_entropy, (torch.zeros(2, 3, 4, 5), torch.full((2, 3, 4, 5), 1 / 3)), {}) == 40

"""Notes about the wrapper of a model."""

from __future__ import annotations

import pytest
from test_idioms import SCRIPT, plan_port

FREEZE, UNFREEZE = "for p in net.parameters(): p.requires_grad = False\n", "p.requires_grad = True"


def notes(before: str, in_loop: str, target: str = "ddp") -> list[str]:
    """Return the notes about a script with these lines before the training, and this line in its loop."""
    script = SCRIPT.replace("net = Net().to(device)\n", f"net = Net().to(device)\n{before}")
    script = script.replace("        logits = model", f"        if i == 5: {in_loop}\n        logits = model")
    return [sentence for _, sentence in plan_port(script, target).notes if "unfrozen" in sentence]


@pytest.mark.parametrize("line", [UNFREEZE, "model.requires_grad_()", "model.requires_grad_(True)", "unfreeze(model)"])
def test_parameters_that_the_training_unfreezes_have_a_note(line: str) -> None:
    """The wrapper was made when they were frozen, so that it does not average their gradients."""
    unfreeze = "def unfreeze(net):\n    net.requires_grad_(True)\n"
    assert len(notes(FREEZE + unfreeze, line)) == 1


@pytest.mark.parametrize(
    ("before", "line"),
    [
        ("", f"p.requires_grad = False; {UNFREEZE}"),
        (FREEZE + "net.head.requires_grad_(True)\n", "pass"),
        ("def freeze(net):\n    net.requires_grad_(False)\n", "freeze(net); net.requires_grad_()"),
    ],
    ids=["gan", "before the training", "gan with a function"],
)
def test_parameters_that_were_not_frozen_have_no_note(before: str, line: str) -> None:
    assert notes(before, line) == []


def test_fsdp_needs_no_note_about_unfrozen_parameters() -> None:
    """It reduces all gradients that exist."""
    assert notes(FREEZE, UNFREEZE, target="fsdp") == []

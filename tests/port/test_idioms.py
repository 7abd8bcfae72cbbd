"""Ports to Accelerate and Fabric, as text. The libraries are not needed here; tests/integration runs the ports."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from everyrank.port.edits import edit_script
from everyrank.port.facts import CallSite, Fact
from everyrank.port.files import ScriptFiles
from everyrank.port.helpers import HELPERS, helper_text
from everyrank.port.idioms import IDIOMS, in_idiom
from everyrank.port.plan import Choice, Plan
from everyrank.port.source import NotPortedError
from processes import refusal_message

SCRIPT = """\
import torch
from torch import nn
from torch.utils.data import DataLoader

device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def train(model, loader, optimizer):
    for i, (x, y) in enumerate(loader):
        logits = model(x.to(device))
        loss = loss_of(logits, y)
        (loss / 2).backward()
        if i % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    print(loss.item(), model.classes)


def count(model):
    return sum(p.numel() for p in model.parameters())


net = Net().to(device)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(opt, 1)
train(net, DataLoader(data, batch_size=4), opt)
print(count(net))
net.eval()
torch.save(net.state_dict(), "net.pt")
"""
DEFAULT_DETAILS: dict[str, dict[str, Any]] = {
    "loader": {"id": 1, "is_stream": False, "has_batches": True},
    "forward": {
        "reached": True,
        "module": "Net",
        "has_batch_norm": False,
        "has_dropout": False,
        "shapes": [[4, 2]],
        "sources": [],
        "blocks": [],
    },
    "pass": {"id": 1, "trains": True},
    "loss": {"ignored": None, "reduction": "mean"},
    "backward": {"loader": 1, "is_scalar": True, "couples": False},
    "optimizer": {"id": 2},
    "step": {"id": 2, "unused": 0},
    "seed": {"library": "torch"},
}


def fact(script: str, kind: str, *calls: str, **details: Any) -> Fact:
    """Return a fact about these nested calls, the innermost first.

    Each call is at its first position in the script.
    """
    call_sites: list[CallSite] = []
    for call in calls:
        start = script.index(call)
        line, column = script.count("\n", 0, start) + 1, start - (script.rfind("\n", 0, start) + 1)
        call_sites.append(CallSite("train.py", (line, column, line, column + len(call)), "<module>"))
    return Fact(kind, tuple(call_sites), is_inner=True, details={**DEFAULT_DETAILS[kind], **details}, file="train.py")


def plan_port(
    script: str,
    target: str,
    *other_facts: Fact,
    first_facts: Sequence[Fact] = (),
    sampler: str = "batches",
    **details: dict[str, Any],
) -> Plan:
    """Return the plan of a port, with facts as a run of the script reports them, and others before or after them."""
    train_call = next(line.strip() for line in script.splitlines() if line.strip().startswith("train("))
    backward_call = next(line.strip() for line in script.splitlines() if ".backward(" in line)
    facts = [
        *first_facts,
        fact(script, "optimizer", "torch.optim.SGD(net.parameters(), lr=0.1)"),
        fact(
            script,
            "loader",
            re.findall(r"DataLoader\(data, [^()]*(?:\(.*?\))?\)", script)[0],
            **details.get("loader", {}),
        ),
        fact(script, "forward", "model(x.to(device))", train_call, **details.get("forward", {})),
        fact(script, "loss", "loss_of(logits, y)", train_call),
        fact(script, "backward", backward_call, train_call),
        fact(script, "step", "optimizer.step()", train_call, **details.get("step", {})),
        *other_facts,
    ]
    return edit_script(
        ScriptFiles(Path("train.py"), script, target=target), facts, Choice("mean", "split", sampler, target)
    )


def test_port_to_accelerate() -> None:
    """The port has these lines, and a note about the learning rate schedule."""
    plan = plan_port(SCRIPT, "accelerate")
    ported_script = plan.source.edited()
    for expected_lines in (
        'accelerator = Accelerator(cpu=not torch.accelerator.is_available(), mixed_precision="no")\n',
        "device = accelerator.device\n",
        "        with contextlib.nullcontext() if i % 2 else accelerator.no_sync(model):\n"
        "            logits = model(x.to(device))\n"
        "            loss = loss_of(logits, y)\n"
        "            loss = mean_over_ranks(loss, len(y))\n"
        "            accelerator.backward(loss / 2)\n"
        "        if i % 2:\n"
        "            accelerator.clip_grad_norm_(model.parameters(), 1.0)\n",
        "print(loss.item(), accelerator.unwrap_model(model).classes)\n",
        "net, opt = accelerator.prepare(net, opt)\n",
        "train(net, split(DataLoader(data, batch_size=4)), opt)\n",
        "print(count(accelerator.unwrap_model(net)))\nnet.eval()\n",
        "if accelerator.is_main_process:\n    torch.save(accelerator.unwrap_model(net).state_dict(),",
        "accelerator.end_training()\n",
    ):
        assert expected_lines in ported_script
    assert "dist." not in ported_script
    assert any("schedule" in sentence for _, sentence in plan.notes)


@pytest.mark.parametrize(
    ("changes", "condition"),
    [
        ((), "i % 2"),
        (
            (
                ("if i % 2:", 'if state["micro"] % 2:'),
                ("        loss = ", '        state["micro"] += 1\n        loss = '),
            ),
            "",
        ),
        ((("if i % 2:", "if (n := n + 1) % 2:"),), ""),
        ((("if i % 2:", "if flags[-1]:"), ("        loss = ", "        flags.append(i % 2)\n        loss = ")), ""),
        ((("if i % 2:", "if len(losses) % 2:"), ("        loss = ", "        losses.append(i)\n        loss = ")), ""),
        # a method or function of the script changes a name of the condition; `self.norm` is no method of the script
        (
            (
                ("if i % 2:", "if self.seen % 2:"),
                ("        loss = ", "        self.note(x)\n        loss = "),
                ("def count(", "def note(self, x):\n    self.seen += 1\n\n\ndef count("),
            ),
            "",
        ),
        (
            (
                ("if i % 2:", "if seen % 2:"),
                ("        loss = ", "        note(x)\n        loss = "),
                ("def count(", "def note(x):\n    global seen\n    seen += 1\n\n\ndef count("),
            ),
            "",
        ),
        (
            (("if i % 2:", "if i % self.every:"), ("        loss = ", "        self.norm(x)\n        loss = ")),
            "i % self.every",
        ),
        (
            (
                ("if i % 2:", "if i % self.every:"),
                ("        loss = ", "        self.note(x)\n        loss = "),
                ("def count(", "def note(self, x):\n    self.seen += 1\n\n\ndef count("),
            ),
            "i % self.every",
        ),
        ((("if i % 2:", "if (i + 1) % 2 == 0 or i + 1 == len(loader):"),), "(i + 1) % 2 == 0 or i + 1 == len(loader)"),
    ],
)
def test_condition_is_used_before_the_forward_only_if_it_is_constant(
    changes: Sequence[tuple[str, str]], condition: str
) -> None:
    script = SCRIPT
    for before, after in changes:
        script = script.replace(before, after)
    ported_script = plan_port(script, "accelerate").source.edited()
    assert ("accelerator.no_sync(" in ported_script) is bool(condition)
    assert f"if {condition} else accelerator.no_sync(model)" in ported_script or not condition


@pytest.mark.parametrize("target", ["ddp", "accelerate", "fabric"])
def test_gradients_that_are_clipped_at_each_backward_are_averaged_there(target: str) -> None:
    clip = "nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
    script = SCRIPT.replace(f"        if i % 2:\n            {clip}", f"        {clip}        if i % 2:\n")
    assert script != SCRIPT
    plan = plan_port(script, target)
    assert re.search(r"no_sync\(|no_backward_sync\(|require_backward_grad_sync =", plan.source.edited()) is None
    assert any("slower" in note for _, note in plan.notes)


@pytest.mark.parametrize("target", ["ddp", "accelerate", "fabric"])
@pytest.mark.parametrize(
    ("step", "has_other_step"),
    [
        ("    if len(loader) % 2:\n        optimizer.step()\n", True),
        ("    scaler.step(optimizer)\n", True),
        ("    scheduler.step()\n", False),
    ],
)
def test_gradients_of_an_update_after_the_loop_are_averaged(target: str, step: str, has_other_step: bool) -> None:
    """The last micro-batches of an epoch have an update of their own, whose gradients have to be averaged too."""
    plan = plan_port(SCRIPT.replace("    print(loss.item(),", f"{step}    print(loss.item(),"), target)
    is_edited = re.search(r"no_sync\(|no_backward_sync\(|require_backward_grad_sync =", plan.source.edited())
    assert (is_edited is None) is has_other_step
    assert any("slower" in note for _, note in plan.notes) is has_other_step


def test_port_to_fabric() -> None:
    """The port has these lines, and no call of torch.distributed."""
    ported_script = plan_port(SCRIPT, "fabric").source.edited()
    for expected_lines in (
        "fabric.launch()\n",
        "device = fabric.device\n",
        "        with fabric.no_backward_sync(model, enabled=not (i % 2)):\n            logits = model(",
        "            fabric.backward(loss / 2)\n",
        "fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)\n",
        "net, opt = fabric.setup(net, opt)\n",
        "fabric.setup_dataloaders(split(DataLoader(data, batch_size=4)), use_distributed_sampler=False)",
        "print(count(net.module))\n",
        "if fabric.is_global_zero:\n    torch.save(net.state_dict(),",
    ):
        assert expected_lines in ported_script
    assert "dist." not in ported_script


def test_cpu_script_stays_on_the_cpu() -> None:
    """The script does not use a GPU where one is available."""
    cpu_script = SCRIPT.replace('torch.device("cuda:0" if torch.cuda.is_available() else "cpu")', '"cpu"')
    assert 'Accelerator(cpu=True, mixed_precision="no")' in plan_port(cpu_script, "accelerate").source.edited()
    assert 'accelerator="cpu",' in plan_port(cpu_script, "fabric").source.edited()


def test_accelerator_gets_another_name_if_the_name_is_taken() -> None:
    """The script already has a variable named `accelerator`."""
    ported_script = plan_port(
        SCRIPT.replace("net = Net()", "accelerator = 1\nnet = Net()"), "accelerate"
    ).source.edited()
    assert "accelerator_.backward(" in ported_script
    assert re.search(r"accelerator\.(backward|prepare)", ported_script) is None


@pytest.mark.parametrize(
    ("backward", "expected"),
    [
        ("loss.backward()", "        accelerator.backward(loss)\n"),
        ("loss.backward(retain_graph=True)", "        accelerator.backward(loss, retain_graph=True)\n"),
        ("scaler.scale(loss).backward()", "        accelerator.backward(scaler.scale(loss))\n"),
        (
            "loss_of(logits, y).backward()",
            "        accelerator.backward(mean_over_ranks(loss_of(logits, y), len(y)))\n",
        ),
        ("(loss + 1).backward()", "        accelerator.backward(mean_over_ranks(loss + 1, len(y)))\n"),
    ],
)
def test_backward_call_is_replaced(backward: str, expected: str) -> None:
    """A scaled loss and the arguments of backward are kept."""
    # The loop has no if statement, so the port finds no accumulation.
    script = SCRIPT.replace("(loss / 2).backward()", backward).replace("if i % 2:", "while i % 2:")
    assert expected in plan_port(script, "accelerate").source.edited()


@pytest.mark.parametrize(
    ("backward", "expected"),
    [
        ("(0.5 * loss).backward()", "        loss = mean_over_ranks(loss, len(y))\n        (0.5 * loss).backward()\n"),
        (
            "(weight * loss).backward()",
            "        loss = mean_over_ranks(loss, len(y))\n        (weight * loss).backward()\n",
        ),
        (
            "(loss * weight / 2).backward()",
            "        loss = mean_over_ranks(loss, len(y))\n        (loss * weight / 2).",
        ),
        ("(weight * error).backward()", "        (mean_over_ranks(weight * error, len(y))).backward()\n"),
        ("(1 / loss).backward()", "        (mean_over_ranks(1 / loss, len(y))).backward()\n"),
    ],
)
def test_factor_of_a_loss_is_not_taken_for_the_loss(backward: str, expected: str) -> None:
    script = SCRIPT.replace("(loss / 2).backward()", backward).replace("if i % 2:", "while i % 2:")
    assert expected in plan_port(script, "ddp").source.edited()


def test_backward_with_positional_options_is_refused() -> None:
    """The error names the option, so that it can be passed by name."""
    with pytest.raises(NotPortedError, match="retain_graph"):
        plan_port(SCRIPT.replace("(loss / 2).backward()", "loss.backward(None, True)"), "accelerate")


def test_optimizer_whose_step_returns_a_loss_is_not_prepared() -> None:
    """Accelerate's prepared optimizers return nothing from step."""
    script = SCRIPT.replace("    optimizer.step()", "    loss = optimizer.step()")
    assert "net = accelerator.prepare(net)" in plan_port(script, "accelerate").source.edited()


@pytest.mark.parametrize(
    "branches",
    [
        "try:\n    from models import Net\n    net = Net().to(device)\nexcept ImportError:\n    net = Small()\n",
        'match size:\n    case "large":\n        net = Net()\n    case _:\n        net = Small()\n',
    ],
    ids=["try", "match"],
)
@pytest.mark.parametrize("target", ["ddp", "fsdp", "fabric"])
def test_model_assigned_in_branches_is_prepared_after_them(branches: str, target: str) -> None:
    """In the last branch only, the port would use a name that another branch does not define."""
    script = SCRIPT.replace("net = Net().to(device)\n", branches)
    prepares = {
        "ddp": "ddp_net = parallel(net)\n",
        "fsdp": "shard(net)\n",
        "fabric": "net, opt = fabric.setup(net, opt)\n",
    }
    ported_script = plan_port(script, target).source.edited()
    assert branches in ported_script
    assert f"\n{prepares[target]}" in ported_script


def test_model_parameter_that_is_passed_by_name_is_followed() -> None:
    call, call_by_name = "train(net, DataLoader", "train(model=net, optimizer=opt, loader=DataLoader"
    script = SCRIPT.replace("def train(model, loader, optimizer):", "def train(*, loader, optimizer, model):")
    script = script.replace(call, call_by_name).replace("batch_size=4), opt)", "batch_size=4))")
    assert "train(model=ddp_net, optimizer=" in plan_port(script, "ddp").source.edited()


def test_optimizer_created_in_a_branch_is_set_up_after_it() -> None:
    """Model and optimizer are set up after the whole if statement."""
    optimizer_line = "opt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
    branches = f"if fast:\n    opt = torch.optim.Adam(net.parameters())\nelse:\n    {optimizer_line}"
    ported_script = plan_port(SCRIPT.replace(optimizer_line, branches), "fabric").source.edited()
    assert f"{branches}net, opt = fabric.setup(net, opt)\n" in ported_script


def test_models_of_earlier_folds_are_freed() -> None:
    """A loop that trains one model per fold calls free_memory before each model."""
    script_with_folds = SCRIPT.replace("net = Net", "for fold in range(2):\n    net = Net").replace(
        "\nopt =", "\n    opt ="
    )
    script_with_folds = script_with_folds.replace("\nschedule =", "\n    schedule =").replace(
        "\ntrain(net", "\n    train(net"
    )
    expected_lines = "    accelerator.free_memory()\n    net, opt = accelerator.prepare(net, opt)\n"
    assert expected_lines in plan_port(script_with_folds, "accelerate").source.edited()
    assert "free_memory" not in plan_port(SCRIPT, "accelerate").source.edited()


def test_unused_parameters_and_batch_norm_are_configured() -> None:
    """The wrapper finds unused parameters, and batch norm layers are synchronized."""
    details = {"step": {"unused": 1}, "forward": {"has_batch_norm": True}}
    ported_script = plan_port(SCRIPT, "accelerate", **details).source.edited()
    assert "kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]" in ported_script
    assert "sync_batch_norms(net)\nnet, opt = accelerator.prepare(net, opt)\n" in ported_script
    assert 'strategy="ddp_find_unused_parameters_true"' in plan_port(SCRIPT, "fabric", **details).source.edited()


@pytest.mark.parametrize("target", IDIOMS)
def test_all_helpers_use_the_library(target: str) -> None:
    """No helper calls torch.distributed, and no placeholder is left."""
    helper_names = set(HELPERS) - {"setup", "parallel", "shard", "save_whole"}
    helper_code = helper_text(
        helper_names,
        has_batch_norm=True,
        finds_unused=False,
        sums=False,
        has_numpy=True,
        device=f"{IDIOMS[target].object}.device",
    )
    helper_code = in_idiom(helper_code, IDIOMS[target], IDIOMS[target].object)
    compile(helper_code, "helpers", "exec")
    assert "dist." not in helper_code
    assert "{" not in helper_code


@pytest.mark.parametrize("target", IDIOMS)
def test_missing_library_is_refused_with_pip_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """The error has the pip command, and the script is not run."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("raise SystemExit(9)\n")
    find_spec, missing_modules = importlib.util.find_spec, {name.partition(".")[0] for name in IDIOMS[target].modules}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing_modules else find_spec(name))
    assert f"pip install {IDIOMS[target].install}" in refusal_message(capsys, "port", "--to", target, "train.py")


def test_torch_sampler_is_refused_for_other_libraries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names a target that supports it."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import torch\n")
    assert "--to fsdp" in refusal_message(capsys, "port", "--to", "fabric", "--sampler", "torch", "train.py")

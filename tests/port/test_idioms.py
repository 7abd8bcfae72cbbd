"""The text of ports to Accelerate and Fabric, without the libraries; tests/integration has them."""

from __future__ import annotations

import importlib.util
import re
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
from processes import refused

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
DETAILS: dict[str, dict[str, Any]] = {
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
    "loss": {"ignored": None, "reduction": "mean"},
    "backward": {"loader": 1, "is_scalar": True, "couples": False},
    "optimizer": {"id": 2},
    "step": {"id": 2, "unused": 0},
}


def fact(text: str, kind: str, *calls: str, **details: Any) -> Fact:
    """A fact at the first call of each function that begins so, the innermost first."""
    chain: list[CallSite] = []
    for call in calls:
        start = text.index(call)
        line, column = text.count("\n", 0, start) + 1, start - (text.rfind("\n", 0, start) + 1)
        chain.append(CallSite("train.py", (line, column, line, column + len(call)), "<module>"))
    return Fact(kind, tuple(chain), is_inner=True, details={**DETAILS[kind], **details}, file="train.py")


def ported(text: str, target: str, **details: dict[str, Any]) -> Plan:
    outer = "train(net, DataLoader(data, batch_size=4), opt)"
    backward = next(line.strip() for line in text.splitlines() if ".backward(" in line)
    facts = [
        fact(text, "optimizer", "torch.optim.SGD(net.parameters(), lr=0.1)"),
        fact(text, "loader", "DataLoader(data, batch_size=4)"),
        fact(text, "forward", "model(x.to(device))", outer, **details.get("forward", {})),
        fact(text, "loss", "loss_of(logits, y)", outer),
        fact(text, "backward", backward, outer),
        fact(text, "step", "optimizer.step()", outer, **details.get("step", {})),
    ]
    return edit_script(
        ScriptFiles(Path("train.py"), text, target=target), facts, Choice("mean", "split", target=target)
    )


def test_accelerate() -> None:
    plan = ported(SCRIPT, "accelerate")
    text = plan.source.edited()
    for lines in (
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
        assert lines in text
    assert "dist." not in text
    assert any("schedule" in sentence for _, sentence in plan.notes)


def test_fabric() -> None:
    text = ported(SCRIPT, "fabric").source.edited()
    for lines in (
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
        assert lines in text
    assert "dist." not in text


def test_a_script_without_gpus_stays_on_the_cpu() -> None:
    text = SCRIPT.replace('torch.device("cuda:0" if torch.cuda.is_available() else "cpu")', '"cpu"')
    assert 'Accelerator(cpu=True, mixed_precision="no")' in ported(text, "accelerate").source.edited()
    assert 'accelerator="cpu",' in ported(text, "fabric").source.edited()


def test_a_name_that_the_script_has() -> None:
    text = ported(SCRIPT.replace("net = Net()", "accelerator = 1\nnet = Net()"), "accelerate").source.edited()
    assert "accelerator_.backward(" in text
    assert re.search(r"accelerator\.(backward|prepare)", text) is None


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
def test_backward(backward: str, expected: str) -> None:
    text = SCRIPT.replace("(loss / 2).backward()", backward).replace("if i % 2:", "while i % 2:")  # accumulates nothing
    assert expected in ported(text, "accelerate").source.edited()


def test_a_backward_with_its_options_by_position_is_refused() -> None:
    with pytest.raises(NotPortedError, match="retain_graph"):
        ported(SCRIPT.replace("(loss / 2).backward()", "loss.backward(None, True)"), "accelerate")


def test_an_optimizer_whose_step_gives_a_loss_is_not_prepared() -> None:
    text = SCRIPT.replace("    optimizer.step()", "    loss = optimizer.step()")
    assert "net = accelerator.prepare(net)" in ported(text, "accelerate").source.edited()


def test_an_optimizer_that_is_made_in_a_branch() -> None:
    made = "opt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
    branches = f"if fast:\n    opt = torch.optim.Adam(net.parameters())\nelse:\n    {made}"
    text = ported(SCRIPT.replace(made, branches), "fabric").source.edited()
    assert f"{branches}net, opt = fabric.setup(net, opt)\n" in text


def test_models_of_earlier_folds_are_released() -> None:
    text = SCRIPT.replace("net = Net", "for fold in range(2):\n    net = Net").replace("\nopt =", "\n    opt =")
    text = text.replace("\nschedule =", "\n    schedule =").replace("\ntrain(net", "\n    train(net")
    lines = "    accelerator.free_memory()\n    net, opt = accelerator.prepare(net, opt)\n"
    assert lines in ported(text, "accelerate").source.edited()
    assert "free_memory" not in ported(SCRIPT, "accelerate").source.edited()


def test_unused_parameters_and_batch_norm() -> None:
    details = {"step": {"unused": 1}, "forward": {"has_batch_norm": True}}
    text = ported(SCRIPT, "accelerate", **details).source.edited()
    assert "kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]" in text
    assert "sync_batch_norms(net)\nnet, opt = accelerator.prepare(net, opt)\n" in text
    assert 'strategy="ddp_find_unused_parameters_true"' in ported(SCRIPT, "fabric", **details).source.edited()


@pytest.mark.parametrize("target", IDIOMS)
def test_all_helpers_are_in_the_words_of_the_library(target: str) -> None:
    names = set(HELPERS) - {"setup", "parallel", "shard", "save_whole"}
    text = helper_text(
        names,
        has_batch_norm=True,
        finds_unused=False,
        sums=False,
        has_numpy=True,
        device=f"{IDIOMS[target].object}.device",
    )
    text = in_idiom(text, IDIOMS[target], IDIOMS[target].object)
    compile(text, "helpers", "exec")
    assert "dist." not in text
    assert "{" not in text


@pytest.mark.parametrize("target", IDIOMS)
def test_a_library_that_is_not_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("raise SystemExit(9)  # is not run\n")
    find, missing = importlib.util.find_spec, {name.partition(".")[0] for name in IDIOMS[target].modules}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else find(name))
    assert f"pip install {IDIOMS[target].install}" in refused(capsys, "port", "--to", target, "train.py")


def test_the_sampler_of_torch_is_for_torch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import torch\n")
    assert "--to fsdp" in refused(capsys, "port", "--to", "fabric", "--sampler", "torch", "train.py")

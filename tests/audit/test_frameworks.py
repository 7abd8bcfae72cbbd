"""What frameworks hide, and what they make the audit's own business: written small, in the ways of public scripts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from auditing import SCRIPTS, audit_forked, lines_with
from everyrank.audit.examine import Audit
from everyrank.audit.start import rank_environments
from forkserver import ForkServer

PREPARED = """
import types
library = types.ModuleType("accelerate.scheduler")
exec("def step(schedule, times):\\n    for _ in range(times): schedule.step()\\n", library.__dict__)
prepared = library.step
"""
EVALUATE_ONE = """
def evaluate_one(model, held_out):
    inputs, _ = next(iter(DataLoader(held_out, 3)))
    with torch.no_grad():
        model.module.eval()(inputs)
    model.module.train()
"""
BY_THREE = """
        for number, (inputs, labels) in enumerate(loader, 1):
            (F.cross_entropy(model(inputs), labels) / 3).backward()
            if number % 3 == 0 or number == len(loader):
                optimizer.step()
                optimizer.zero_grad()
"""
QUIETLY = """
    with torch.no_grad():
        random.gauss = lambda *_: 0
        random.seed = lambda _: None
        for inputs, _ in loader:
            model(inputs)
"""
CUTS = """
    for inputs, labels in loader:
        with torch.no_grad():
            output = model.module(inputs)
        output, labels = output[:5], labels[:5]
        loss = F.cross_entropy(output, labels)
        hits = (output.argmax(1) == labels).sum()
        totals += torch.tensor([loss * len(labels), hits, len(labels)])
"""


def changed(name: str, *replacements: tuple[str, str]) -> str:
    text = (SCRIPTS / f"{name}.py").read_text()
    for before, after in replacements:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


def audited(python: ForkServer, folder: Path, text: str, **settings: Any) -> Audit:
    (folder / "train.py").write_text(text)
    return audit_forked(python, folder, folder / "train.py", **settings)


def rules(audit: Audit) -> list[str]:
    return [finding.rule for finding in audit.findings if finding.level in ("FAIL", "WARN")]


def test_a_prepared_schedule_is_stepped_once_for_each_rank(python: ForkServer, tmp_path: Path) -> None:
    """Accelerate does, because the schedule was made for the batches of all ranks."""
    steps = (
        "            optimizer.step()\n",
        "            optimizer.step()\n            prepared(schedule, world_size)\n",
    )
    main = ("\n\ndef main():", f"{PREPARED}\n\ndef main():")
    text = changed("classifier", ("        schedule.step()\n", ""), steps, main)
    assert rules(audited(python, tmp_path, text)) == []


def test_loaders_are_held_against_their_like(python: ForkServer, tmp_path: Path) -> None:
    """Rank 0 has a loader more, and evaluates more often: no reason to compare it with another of rank 1's."""
    more = "        schedule.step()\n        if rank == 0:\n            evaluate_one(model, held_out)\n"
    main = ("\n\ndef main():", f"\n{EVALUATE_ONE}\n\ndef main():")
    text = changed("classifier", ("        schedule.step()\n", more), main)
    assert rules(audited(python, tmp_path, text)) == []


def test_what_is_cut_off_outside_of_no_grad_is_seen(python: ForkServer, tmp_path: Path) -> None:
    """The evaluation's forward alone is under no_grad; what the sampler repeated is cut off afterwards."""
    text = changed(
        "classifier",
        ("Subset(held_out, range(rank, len(held_out), world_size)), 5)",
         "held_out, 5, sampler=DistributedSampler(held_out, shuffle=False))"),
    )  # fmt: skip
    begin, end = text.index("    with torch.no_grad():"), text.index("    dist.all_reduce(totals)")
    audit = audited(python, tmp_path, text[:begin] + CUTS[1:] + text[end:])
    assert rules(audit) == []
    assert any("whether repeated samples are counted" in line for line in audit.unchecked)


@pytest.mark.parametrize(("batches", "is_named"), [(15, False), (16, True)])
def test_a_rest_is_that_of_the_whole_epoch(python: ForkServer, tmp_path: Path, batches: int, is_named: bool) -> None:
    """15 batches are 5 updates of 3: that the shortened epoch of 7 leaves one over is our doing."""
    count = 2 * 7 * batches
    text = changed(
        "classifier",
        ("[101, 23]", f"[{count}, 23]"),
        ("torch.randn(124,", f"torch.randn({count + 23},"),
        ("4, (124,))", f"4, ({count + 23},))"),
    )
    begin, end = (
        text.index("        for inputs, labels in loader:\n            loss = "),
        text.index("        schedule.st"),
    )
    text = text[:begin] + BY_THREE[1:] + text[end:]
    assert ("gradient.scale" in rules(audited(python, tmp_path, text))) is is_named


@pytest.mark.integration
def test_an_endless_sampler_costs_no_minutes(python: ForkServer, tmp_path: Path) -> None:
    """10^10 samples with replacement, in batches of 1,000: the beginning is enough."""
    endless = "DataLoader(train, 1000, sampler=torch.utils.data.RandomSampler(train, True, 10**10))"
    text = changed("classifier", ("DataLoader(train, 7, sampler=sampler, drop_last=True)", endless))
    audit = audited(python, tmp_path, text)
    assert audit.updates >= 4
    assert rules(audit) == []


def test_the_mode_is_that_of_what_is_wrapped(python: ForkServer, tmp_path: Path) -> None:
    """Lightning puts what is wrapped into train mode, and not the wrapper: dropout is still seen."""
    text = changed(
        "classifier",
        ("    model.train()\n", "    model.module.train()\n"),
        ("manual_seed(100 + rank)", "manual_seed(9)"),
        ("    sampler = ", "    model.eval()\n    model.module.train()\n    sampler = "),
    )
    audit = audited(python, tmp_path, text)
    assert rules(audit) == ["random.dropout"]


def test_files_that_are_named_by_bytes_and_given_rights(python: ForkServer, tmp_path: Path) -> None:
    """As loggers and atomic checkpoints do it; nothing of it is left where the script wrote it."""
    text = (SCRIPTS / "classifier.py").read_text()
    saves = (
        "            import os\n            os.makedirs('logs')\n            open(b'logs/events', 'wb').write(b'1')\n"
        "            os.chmod('logs/events', 0o600)\n            assert open('logs/events').read() == '1'\n"
        "            os.chmod('kept', 0o600)\n            os.remove('logs/events')\n            os.rmdir('logs')\n"
    )
    text = text.replace('            torch.save({"model"', f'{saves}            torch.save({{"model"')
    (tmp_path / "kept").write_text("mine")
    (tmp_path / "kept").chmod(0o644)
    audit = audited(python, tmp_path, text)
    assert audit.updates >= 8
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o644
    assert not (tmp_path / "logs").exists()


def test_what_to_empty_left_has_values_once_it_is_named(python: ForkServer, tmp_path: Path) -> None:
    """One finding, not a second one about gradients that our own NaN would have made."""
    text = (SCRIPTS / "sharded.py").read_text().replace("in model[::2]:", "in model[:3:2]:")
    assert rules(audited(python, tmp_path, text)) == ["weights.uninitialised"]


LIGHTNING = """
import sys
import types
sys.path.insert(0, FOLDER)
from lightning.fabric.accelerators.cpu import CPUAccelerator
assert CPUAccelerator.auto_device_count() == 2, CPUAccelerator.auto_device_count()
"""


def test_lightning_without_a_gpu_is_told_of_all_ranks(python: ForkServer, tmp_path: Path) -> None:
    """A package of that name, made here: `Trainer()` asks it how many devices there are."""
    package = tmp_path / "installed" / "lightning" / "fabric" / "accelerators"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "cpu.py").write_text(
        "class CPUAccelerator:\n    @staticmethod\n    def auto_device_count():\n        return 1\n"
    )
    text = (SCRIPTS / "classifier.py").read_text()
    begin = LIGHTNING.replace("FOLDER", repr(str(tmp_path / "installed")))
    audit = audited(python, tmp_path, text.replace("\n\ndef evaluate(", f"{begin}\n\ndef evaluate("))
    assert any("Lightning" in line for line in audit.altered)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is for hosts without a GPU")
def test_accelerate_without_a_gpu_is_told_to_use_the_cpu() -> None:
    assert all(rank["ACCELERATE_USE_CPU"] == "1" for rank in rank_environments(2))
    assert "ACCELERATE_USE_CPU" not in os.environ


@pytest.mark.integration
def test_the_same_augmentation_in_a_later_epoch(python: ForkServer, tmp_path: Path) -> None:
    """The evaluation's loader has a dataset of the same type, and draws nothing."""
    seeds = ("torch.initial_seed() + dist.get_rank()", "torch.initial_seed()")
    text = changed("stream", seeds, ("    if rank == 0:\n", QUIETLY[1:] + "    if rank == 0:\n"))
    audit = audited(python, tmp_path, text, epochs=0, batches=0, updates=200)
    assert "random.augment" in rules(audit)
    [line] = lines_with(text, "loader = DataLoader(")
    [found] = [finding for finding in audit.findings if finding.rule == "random.augment"]
    assert found.place.endswith(f":{line}")

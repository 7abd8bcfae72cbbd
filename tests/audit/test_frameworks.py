"""Idioms of frameworks under audit, written as small scripts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from auditing import SCRIPTS, audit_forked_script, line_numbers_with
from everyrank.audit.examine import Audit
from everyrank.audit.start import rank_environments
from forkserver import ForkServer

PREPARED_SCHEDULE = """
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
ACCUMULATE_3 = """
        for number, (inputs, labels) in enumerate(loader, 1):
            (F.cross_entropy(model(inputs), labels) / 3).backward()
            if number % 3 == 0 or number == len(loader):
                optimizer.step()
                optimizer.zero_grad()
"""
EVALUATE_WITHOUT_NOISE = """
    with torch.no_grad():
        random.gauss = lambda *_: 0
        random.seed = lambda _: None
        for inputs, _ in loader:
            model(inputs)
"""
EVALUATE_AND_CUT = """
    for inputs, labels in loader:
        with torch.no_grad():
            output = model.module(inputs)
        output, labels = output[:5], labels[:5]
        loss = F.cross_entropy(output, labels)
        hits = (output.argmax(1) == labels).sum()
        totals += torch.tensor([loss * len(labels), hits, len(labels)])
"""


def text_with(name: str, *replacements: tuple[str, str]) -> str:
    """Return the text of a script after these replacements."""
    text = (SCRIPTS / f"{name}.py").read_text()
    for before, after in replacements:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


def audit_text(python: ForkServer, folder: Path, text: str, **settings: Any) -> Audit:
    """Audit a script with this text."""
    (folder / "train.py").write_text(text)
    return audit_forked_script(python, folder, folder / "train.py", **settings)


def failed_rules(audit: Audit) -> list[str]:
    """Return the rules of the findings with level FAIL or WARN."""
    return [finding.rule for finding in audit.findings if finding.level in ("FAIL", "WARN")]


def test_schedule_stepped_by_accelerate_has_no_finding(python: ForkServer, tmp_path: Path) -> None:
    """Accelerate steps it once for each rank, because the schedule was made for the batches of all ranks."""
    steps = (
        "            optimizer.step()\n",
        "            optimizer.step()\n            prepared(schedule, world_size)\n",
    )
    main = ("\n\ndef main():", f"{PREPARED_SCHEDULE}\n\ndef main():")
    text = text_with("classifier", ("        schedule.step()\n", ""), steps, main)
    assert failed_rules(audit_text(python, tmp_path, text)) == []


def test_additional_evaluation_on_rank_0_has_no_finding(python: ForkServer, tmp_path: Path) -> None:
    """Rank 0 has one more loader and evaluates more often.

    The loader is not compared with a different one of rank 1.
    """
    evaluation = "        schedule.step()\n        if rank == 0:\n            evaluate_one(model, held_out)\n"
    main = ("\n\ndef main():", f"\n{EVALUATE_ONE}\n\ndef main():")
    text = text_with("classifier", ("        schedule.step()\n", evaluation), main)
    assert failed_rules(audit_text(python, tmp_path, text)) == []


def test_samples_dropped_after_no_grad_are_not_reported_as_repeated(python: ForkServer, tmp_path: Path) -> None:
    """Only the forward of the evaluation is under no_grad. The samples repeated by the sampler are dropped after it."""
    text = text_with(
        "classifier",
        ("Subset(held_out, range(rank, len(held_out), world_size)), 5)",
         "held_out, 5, sampler=DistributedSampler(held_out, shuffle=False))"),
    )  # fmt: skip
    start, end = text.index("    with torch.no_grad():"), text.index("    dist.all_reduce(totals)")
    audit = audit_text(python, tmp_path, text[:start] + EVALUATE_AND_CUT[1:] + text[end:])
    assert failed_rules(audit) == []
    assert any("whether repeated samples are counted" in line for line in audit.unchecked)


@pytest.mark.parametrize(("batches", "is_reported"), [(15, False), (16, True)])
def test_leftover_batches_are_counted_in_the_whole_epoch(
    python: ForkServer, tmp_path: Path, batches: int, is_reported: bool
) -> None:
    """15 batches are 5 updates of 3. The audit shortens the epoch to 7 batches, and only this leaves one over."""
    count = 2 * 7 * batches
    text = text_with(
        "classifier",
        ("[101, 23]", f"[{count}, 23]"),
        ("torch.randn(124,", f"torch.randn({count + 23},"),
        ("4, (124,))", f"4, ({count + 23},))"),
    )
    start, end = (
        text.index("        for inputs, labels in loader:\n            loss = "),
        text.index("        schedule.st"),
    )
    text = text[:start] + ACCUMULATE_3[1:] + text[end:]
    assert ("gradient.scale" in failed_rules(audit_text(python, tmp_path, text))) is is_reported


@pytest.mark.integration
def test_sampler_with_a_huge_length_is_read_in_part(python: ForkServer, tmp_path: Path) -> None:
    """The sampler draws 10^10 samples with replacement, in batches of 1,000. The audit records only the first ones."""
    loader = "DataLoader(train, 1000, sampler=torch.utils.data.RandomSampler(train, True, 10**10))"
    text = text_with("classifier", ("DataLoader(train, 7, sampler=sampler, drop_last=True)", loader))
    audit = audit_text(python, tmp_path, text)
    assert audit.updates >= 4
    assert failed_rules(audit) == []


def test_train_mode_is_read_from_the_wrapped_module(python: ForkServer, tmp_path: Path) -> None:
    """Lightning sets only the wrapped module to train mode. The audit still finds equal dropout masks."""
    text = text_with(
        "classifier",
        ("    model.train()\n", "    model.module.train()\n"),
        ("manual_seed(100 + rank)", "manual_seed(9)"),
        ("    sampler = ", "    model.eval()\n    model.module.train()\n    sampler = "),
    )
    audit = audit_text(python, tmp_path, text)
    assert failed_rules(audit) == ["random.dropout"]


def test_file_operations_of_loggers_are_redirected(python: ForkServer, tmp_path: Path) -> None:
    """Loggers use names in bytes, and atomic checkpoints use chmod. The user's files do not change."""
    text = (SCRIPTS / "classifier.py").read_text()
    saves = (
        "            import os\n            os.makedirs('logs')\n            open(b'logs/events', 'wb').write(b'1')\n"
        "            os.chmod('logs/events', 0o600)\n            assert open('logs/events').read() == '1'\n"
        "            os.chmod('kept', 0o600)\n            os.remove('logs/events')\n            os.rmdir('logs')\n"
    )
    text = text.replace('            torch.save({"model"', f'{saves}            torch.save({{"model"')
    (tmp_path / "kept").write_text("mine")
    (tmp_path / "kept").chmod(0o644)
    audit = audit_text(python, tmp_path, text)
    assert audit.updates >= 8
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o644
    assert not (tmp_path / "logs").exists()


def test_uninitialised_weights_give_one_finding(python: ForkServer, tmp_path: Path) -> None:
    """The audit fills reported weights with values, so their NaN does not cause a second finding about gradients."""
    text = (SCRIPTS / "sharded.py").read_text().replace("in model[::2]:", "in model[:3:2]:")
    assert failed_rules(audit_text(python, tmp_path, text)) == ["weights.uninitialised"]


CHECK_DEVICE_COUNT = """
import sys
import types
sys.path.insert(0, FOLDER)
from lightning.fabric.accelerators.cpu import CPUAccelerator
assert CPUAccelerator.auto_device_count() == 2, CPUAccelerator.auto_device_count()
"""


def test_lightning_without_a_gpu_sees_all_ranks_as_devices(python: ForkServer, tmp_path: Path) -> None:
    """A fake package `lightning` counts the devices, as `Trainer()` does."""
    package = tmp_path / "installed" / "lightning" / "fabric" / "accelerators"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "cpu.py").write_text(
        "class CPUAccelerator:\n    @staticmethod\n    def auto_device_count():\n        return 1\n"
    )
    text = (SCRIPTS / "classifier.py").read_text()
    check = CHECK_DEVICE_COUNT.replace("FOLDER", repr(str(tmp_path / "installed")))
    audit = audit_text(python, tmp_path, text.replace("\n\ndef evaluate(", f"{check}\n\ndef evaluate("))
    assert any("Lightning" in line for line in audit.altered)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this test needs a host without a GPU")
def test_accelerate_without_a_gpu_uses_the_cpu() -> None:
    """-"""
    assert all(rank["ACCELERATE_USE_CPU"] == "1" for rank in rank_environments(2))
    assert "ACCELERATE_USE_CPU" not in os.environ


@pytest.mark.integration
def test_equal_augmentation_on_all_ranks_is_found_in_a_later_epoch(python: ForkServer, tmp_path: Path) -> None:
    """The loader of the evaluation has a dataset of the same type, and draws no random numbers."""
    seeds = ("torch.initial_seed() + dist.get_rank()", "torch.initial_seed()")
    text = text_with("stream", seeds, ("    if rank == 0:\n", EVALUATE_WITHOUT_NOISE[1:] + "    if rank == 0:\n"))
    audit = audit_text(python, tmp_path, text, epochs=0, batches=0, updates=200)
    assert "random.augment" in failed_rules(audit)
    [line] = line_numbers_with(text, "loader = DataLoader(")
    [augment_finding] = [finding for finding in audit.findings if finding.rule == "random.augment"]
    assert augment_finding.location.endswith(f":{line}")

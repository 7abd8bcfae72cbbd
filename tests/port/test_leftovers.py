"""Ports replace GPU numbers in a script, and let ranks wait before they read files that rank 0 wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from everyrank.port.edits import replace_leftovers
from everyrank.port.facts import CallSite, Fact
from everyrank.port.files import ScriptFiles
from everyrank.port.outputs import edit_writes
from everyrank.port.plan import Choice, Plan


def plan_leftovers(script: str) -> Plan:
    """Return the plan of a port in which the leftovers of single-GPU code are replaced."""
    plan = Plan(ScriptFiles(Path("train.py"), script), [], Choice("mean", "split"))
    replace_leftovers(plan)
    return plan


@pytest.mark.parametrize(
    "name", ['"cuda:1"', 'f"cuda:{gpu}"', '"cuda:%d" % gpu', '"cuda:" + gpu', '"cuda:{}".format(0)']
)
def test_device_number_is_removed(name: str) -> None:
    """The number is a constant, or it is formatted into the name."""
    assert plan_leftovers(f"model.to({name})\n").source.edited() == 'model.to("cuda")\n'


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ('device = torch.device("cuda", 0)', 'device = torch.device("cuda")'),
        ('device = torch.device("cuda", args.gpu)', 'device = torch.device("cuda")'),
        ("model.cuda(0)", 'model.cuda("cuda")'),
        ("x.cuda(args.gpu, non_blocking=True)", 'x.cuda("cuda", non_blocking=True)'),
        ("y.to(0)", 'y.to("cuda")'),
        ("x.cuda(0); y.to('cuda:0')", 'x.cuda("cuda"); y.to("cuda")'),
        ("x.cuda()", "x.cuda()"),
        ("x.to(device)", "x.to(device)"),
    ],
)
def test_device_that_is_a_number_is_replaced(code: str, expected: str) -> None:
    """All ranks would use GPU 0."""
    assert plan_leftovers(f"{code}\n").source.edited() == f"{expected}\n"


def test_script_with_several_device_numbers_is_left_to_the_user() -> None:
    script = "one.cuda(0)\nother.cuda(1)\n"
    plan = plan_leftovers(script)
    assert plan.source.edited() == script
    assert [line for line, _ in plan.notes] == [2]


def test_device_selection_runs_only_without_a_launcher() -> None:
    """The lines run only if no launcher has set RANK."""
    script = "torch.cuda.set_device(1)\nos.environ['CUDA_VISIBLE_DEVICES'] = gpu\n"
    condition = 'if "RANK" not in os.environ:\n    '
    assert plan_leftovers(script).source.edited() == "".join(
        condition + line for line in script.splitlines(keepends=True)
    )


def test_script_with_several_devices_is_left_to_the_user() -> None:
    """The script is not changed, and a note names the second device."""
    script = 'one.to("cuda:0")\nother.to("cuda:1")\n'
    plan = plan_leftovers(script)
    assert plan.source.edited() == script
    assert [line for line, _ in plan.notes] == [2]


def test_ranks_wait_before_they_read_a_file_of_rank_0() -> None:
    """No barrier is added if only some ranks reach it."""
    save, load = "torch.save(x, path)\n", "x = torch.load(path)\n"
    guarded_save = "if dist.get_rank() == 0:\n    torch.save(x, path)\n"
    assert script_with_guarded_writes(save + load) == guarded_save + "dist.barrier()\n" + load
    # Ranks that find the file would wait for the ranks that do not.
    script_with_cache = "if not os.path.exists(path):\n    torch.save(x, path)\nelse:\n    x = torch.load(path)\n"
    assert "barrier" not in script_with_guarded_writes(script_with_cache)


@pytest.mark.parametrize(
    "write",
    [
        "torch.save(x, path)",
        'np.savez_compressed("x.npz", x)',
        "os.makedirs(folder)",
        "folder.mkdir(parents=True)",
        "shutil.copyfile(one, other)",
        "shutil.rmtree(folder)",
    ],
)
def test_only_rank_0_writes_in_code_that_the_run_does_not_reach(write: str) -> None:
    assert script_with_guarded_writes(f"{write}\n") == f"if dist.get_rank() == 0:\n    {write}\n"


def test_only_rank_0_saves_in_a_try() -> None:
    """All ranks may create the same folder, but not write the same file."""
    save = "try:\n    torch.save(x, path)\nexcept OSError:\n    pass\n"
    guarded_save = "try:\n    if dist.get_rank() == 0:\n        torch.save(x, path)\nexcept OSError:\n    pass\n"
    assert script_with_guarded_writes(save) == guarded_save
    for folder in (save.replace("torch.save(x, path)", "os.makedirs(path)"), "os.makedirs(path, exist_ok=True)\n"):
        assert script_with_guarded_writes(folder) == folder


@pytest.mark.parametrize(
    ("bar", "expected"),
    [
        ("tqdm(loader)", "tqdm(loader, disable=HIDDEN)"),
        ("tqdm()", "tqdm(disable=HIDDEN)"),
        ("tqdm(x for x in y)", "tqdm((x for x in y), disable=HIDDEN)"),
        ("tqdm((x for x in y))", "tqdm((x for x in y), disable=HIDDEN)"),
        ("tqdm(\n    loader,\n    total=(3)  # why\n)", "tqdm(\n    loader,\n    total=(3), disable=HIDDEN  # why\n)"),
        ("tqdm(\n    loader,  # why\n)", "tqdm(\n    loader, disable=HIDDEN  # why\n)"),
        ("tqdm(\n    loader  # why\n    # not\n)", "tqdm(\n    loader, disable=HIDDEN  # why\n    # not\n)"),
    ],
)
def test_progress_bar_is_hidden_on_other_ranks(bar: str, expected: str) -> None:
    """A comment after the last argument is kept."""
    assert script_with_guarded_writes(f"{bar}\n") == expected.replace("HIDDEN", "dist.get_rank() != 0") + "\n"


def script_with_guarded_writes(script: str) -> str:
    """Return the script after its writes are limited to rank 0."""
    call = CallSite("train.py", (1, 0, 1, 1), "<module>")
    forward = Fact("forward", (call,), is_inner=True, details={"reached": True})
    plan = Plan(ScriptFiles(Path("train.py"), script), [forward], Choice("mean", "split"))
    edit_writes(plan)
    return plan.source.edited()

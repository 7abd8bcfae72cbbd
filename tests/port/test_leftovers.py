"""GPUs that a script names by their number, and files that it reads after it has written them."""

from __future__ import annotations

from pathlib import Path

import pytest

from everyrank.port.edits import replace_leftovers
from everyrank.port.facts import CallSite, Fact
from everyrank.port.files import ScriptFiles
from everyrank.port.outputs import edit_writes
from everyrank.port.plan import Choice, Plan


def plan_of(text: str) -> Plan:
    plan = Plan(ScriptFiles(Path("train.py"), text), [], Choice("mean", "split"))
    replace_leftovers(plan)
    return plan


@pytest.mark.parametrize(
    "name", ['"cuda:1"', 'f"cuda:{gpu}"', '"cuda:%d" % gpu', '"cuda:" + gpu', '"cuda:{}".format(0)']
)
def test_a_numbered_device(name: str) -> None:
    assert plan_of(f"model.to({name})\n").source.edited() == 'model.to("cuda")\n'


def test_the_choice_of_a_device() -> None:
    text = "torch.cuda.set_device(1)\nos.environ['CUDA_VISIBLE_DEVICES'] = gpu\n"
    alone = 'if "RANK" not in os.environ:\n    '
    assert plan_of(text).source.edited() == "".join(alone + line for line in text.splitlines(keepends=True))


def test_several_devices_are_left_to_the_user() -> None:
    text = 'one.to("cuda:0")\nother.to("cuda:1")\n'
    plan = plan_of(text)
    assert plan.source.edited() == text
    assert [line for line, _ in plan.notes] == [2]


def test_ranks_wait_before_they_read_what_rank_0_saved() -> None:
    save, load = "torch.save(x, path)\n", "x = torch.load(path)\n"
    guarded = "if dist.get_rank() == 0:\n    torch.save(x, path)\n"
    assert written(save + load) == guarded + "dist.barrier()\n" + load
    # ranks that find the file would wait for those that do not
    cached = "if not os.path.exists(path):\n    torch.save(x, path)\nelse:\n    x = torch.load(path)\n"
    assert "barrier" not in written(cached)


def written(text: str) -> str:
    call = CallSite("train.py", (1, 0, 1, 1), "<module>")
    forward = Fact("forward", (call,), is_inner=True, details={"reached": True})
    plan = Plan(ScriptFiles(Path("train.py"), text), [forward], Choice("mean", "split"))
    edit_writes(plan)
    return plan.source.edited()

"""What names a GPU by its number names that of the rank; plain python still uses the GPU that the script chooses."""

from __future__ import annotations

from pathlib import Path

import pytest

from everyrank.port.edits import replace_leftovers
from everyrank.port.files import ScriptFiles
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

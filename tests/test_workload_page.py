"""docs/workload.md: its examples run, and it names every field there is."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from everyrank import Workload, parse_layout
from everyrank.loop import open_data
from everyrank.parity import check_layout, parity_case
from everyrank.world import World

# said by whoever finds the workload, not by a person
NOT_SAID = {"batch_rule", "source"}


def test_every_field_is_on_the_page(repository: Path) -> None:
    page = (repository / "docs" / "workload.md").read_text()
    for field in dataclasses.fields(Workload):
        assert field.name in NOT_SAID or re.search(rf"^\|.*`{field.name}`.*\|", page, re.MULTILINE), field.name


def test_the_examples_are_equal(ranks: Any, repository: Path) -> None:
    """Each workload on the page, as it stands there, under ddp on two ranks."""
    page = (repository / "docs" / "workload.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    for found in ranks(2, checked, "\n".join(blocks)):
        assert found == dict.fromkeys(["corners", "mixed", "streamed", "contrasted", "watched"], "equal")


def checked(world: World, code: str) -> dict[str, str]:
    names: dict[str, Any] = {"__name__": "page"}
    exec(code, names)
    found: dict[str, str] = {}
    for workload in (names["workload"](), *(names[name] for name in ("mixed", "streamed", "contrasted", "watched"))):
        subject = parity_case(workload, *open_data(workload, world), steps=4)
        key = f"page/{workload.name}"
        found[workload.name] = check_layout(subject, parse_layout("ddp"), world, key)[0].status
    return found

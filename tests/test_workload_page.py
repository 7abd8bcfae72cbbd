"""docs/workload.md: its examples are verified as equal, and it documents every field of Workload."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from everyrank import Workload, parse_layout
from everyrank.loop import open_data
from everyrank.parity import check_layout, parity_case
from everyrank.world import World

# set by everyrank, not by the user
INTERNAL_FIELDS = {"batch_rule", "source"}


def test_page_documents_every_field(repository: Path) -> None:
    page = (repository / "docs" / "workload.md").read_text()
    for field in dataclasses.fields(Workload):
        assert field.name in INTERNAL_FIELDS or re.search(rf"^\|.*`{field.name}`.*\|", page, re.MULTILINE), field.name


def test_examples_are_verified_as_equal(ranks: Any, repository: Path) -> None:
    """Each workload on the page is verified with ddp on two ranks."""
    page = (repository / "docs" / "workload.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    for statuses in ranks(2, verify_examples, "\n".join(blocks)):
        assert statuses == dict.fromkeys(["corners", "mixed", "streamed", "contrasted", "watched"], "equal")


def verify_examples(world: World, code: str) -> dict[str, str]:
    """Run the code of the page, and return the parity status of each workload by name."""
    names: dict[str, Any] = {"__name__": "page"}
    exec(code, names)
    statuses: dict[str, str] = {}
    for workload in (names["workload"](), *(names[name] for name in ("mixed", "streamed", "contrasted", "watched"))):
        case = parity_case(workload, *open_data(workload, world), steps=4)
        key = f"page/{workload.name}"
        statuses[workload.name] = check_layout(case, parse_layout("ddp"), world, key)[0].status
    return statuses

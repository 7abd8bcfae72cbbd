"""Hooks write every declared kind of event, and rules read every kind and field."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

import everyrank.audit
from everyrank.audit import events
from everyrank.audit.evidence import Evidence
from everyrank.audit.finding import Findings
from everyrank.audit.start import ScriptRun
from everyrank.audit.watch.recorder import Recorder, Settings

AUDIT = Path(everyrank.audit.__file__).parent
KINDS = events.Event.__subclasses__()
HOOKS = [*AUDIT.glob("watch/**/*.py"), *AUDIT.glob("replay/*.py")]
READERS = [*AUDIT.glob("rules/*.py"), AUDIT / "evidence.py", AUDIT / "examine.py"]


def syntax_nodes(paths: list[Path]) -> list[ast.AST]:
    """Return all syntax nodes of these files."""
    return [node for path in paths for node in ast.walk(ast.parse(path.read_text()))]


WRITTEN_KINDS = {
    node.func.id for node in syntax_nodes(HOOKS) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
}
READ_KINDS = {node.id for node in syntax_nodes(READERS) if isinstance(node, ast.Name)}
READ_FIELDS = {node.attr for node in syntax_nodes(READERS) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_kind_of_event_is_written_and_read(kind: type[events.Event]) -> None:
    """`ProcessEnd` only completes a record. A process that has written neither it nor `Stopped` was killed."""
    assert kind.__name__ in WRITTEN_KINDS
    assert kind.__name__ in READ_KINDS or kind is events.ProcessEnd
    field_names = {field.name for field in dataclasses.fields(kind)} - {
        field.name for field in dataclasses.fields(events.Event)
    }
    assert field_names <= READ_FIELDS
    assert kind.__doc__
    assert kind.__name__ in events.__all__


def test_event_is_equal_after_json() -> None:
    """The losses in it are objects too."""
    term = events.LossTerm("mse_loss", "/train.py:3", 4.0, "mean", scale=0.5, value=2.0)
    event = events.BackwardEnd(rank=1, update=2, losses=[term], scaling_lines=["/train.py:4"])
    line = json.dumps({"kind": "BackwardEnd", **vars(event)}, default=vars)
    assert events.event_from(json.loads(line)) == event


def test_event_without_its_folder_is_no_error(tmp_path: Path) -> None:
    """A process of the script may outlive the audit, which removes its folder."""
    Recorder(Settings(str(tmp_path / "removed"))).write(events.Stopped())
    assert list(tmp_path.iterdir()) == []


def test_undeclared_field_is_an_error() -> None:
    """This error is for files of events. In hooks and rules, the type checker finds an undeclared field."""
    with pytest.raises(TypeError, match="colour"):
        events.event_from({"kind": "NoSync", "line": "", "colour": "red"})


def test_example_rule_in_contributing_works(tmp_path: Path) -> None:
    """The code runs on two optimizer steps of one rank. The first has a learning rate of zero."""
    page = Path(__file__).parents[2] / "CONTRIBUTING.md"
    if not page.exists():
        pytest.skip("the sdist has no CONTRIBUTING.md")
    section = page.read_text().partition("## A new audit rule")[2].partition("\n## ")[0]
    [code] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(page), "exec"), names)
    values: dict[str, Any] = dict.fromkeys((field.name for field in dataclasses.fields(events.OptimizerStep)), 0)
    steps = [
        events.OptimizerStep(**{**values, "update": update, "line": "/train.py:7", "rates": [rate]})
        for update, rate in enumerate((0.0, 0.1))
    ]
    findings = Findings()
    run = ScriptRun(tmp_path, 1, "finished", (0,), ("",), 1.0)
    names["check_zero_rates"](Evidence(run, [0], {0: list[events.Event](steps)}), findings)
    assert [(finding.level, finding.rule, finding.location) for finding in findings] == [
        ("WARN", "schedule.zero", "/train.py:7")
    ]

"""The corpus of silent bugs (benchmarks/silent_bugs): bugs of several kinds are found by the rule that each file
expects, its correction is no alarm, and the page is what the Record says.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from auditing import audit_forked
from everyrank.audit import Audit
from forkserver import ForkServer

ROOT = Path(__file__).parents[2]

FOUND = ["gather_without_gradient", "loss_times_tensor_ranks"]
MORE = [
    "replicated_counted_in_norm",
    "stream_sharded_twice",
    "clipped_on_first_rank",
    "experts_not_divided",
    "sharded_parameter_not_in_norm",
    "tokens_over_tensor_ranks",
    "ragged_ranks",
    "set_epoch_missing",
    "broadcast_of_a_view",
    "evaluation_padded",
    "dropout_in_evaluation",
    "second_head_local_count",
]


@pytest.fixture(scope="module")
def corpus() -> Any:
    """benchmarks/silent_bugs.py, the command that runs it."""
    spec = importlib.util.spec_from_file_location("silent_bugs", ROOT / "benchmarks" / "silent_bugs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", [*FOUND, *(pytest.param(name, marks=pytest.mark.integration) for name in MORE)])
def test_a_bug_is_found_and_its_correction_is_none(python: ForkServer, tmp_path: Path, corpus: Any, name: str) -> None:
    script = corpus.FOLDER / f"{name}.py"
    (tmp_path / "wrong").mkdir()
    (tmp_path / "right").mkdir()
    found = {one.rule: one for one in audit_forked(python, tmp_path / "wrong", script).findings}
    expected = found.get(corpus.field(script.read_text(), "Expected"))
    assert expected is not None, found
    assert expected.level in ("FAIL", "WARN")
    assert expected.place.rpartition(":")[0] == str(script)
    right = audit_forked(python, tmp_path / "right", script, "--right")
    assert [one for one in right.findings if one.level in ("FAIL", "WARN")] == []
    assert right.updates >= 3


# what looks like the mistake, and is right: (file, what stands there, what is written instead)
RIGHT = [
    (  # each rank computes the whole loss: its own features have their whole gradient
        "gather_without_gradient",
        {
            "labels = torch.arange(len(images)) + len(images) * dist.get_rank()": "labels = torch.arange(BATCH)",
            "(images @ all_texts.T": "(all_images @ all_texts.T",
            "(texts @ all_images.T": "(all_texts @ all_images.T",
        },
    ),
    (  # all ranks read the whole stream, and the loop divides it
        "stream_sharded_twice",
        {"range(dist.get_rank(), self.size, dist.get_world_size())": "range(self.size)"},
    ),
    (  # half of the terms are masked, and the mean is over all of them
        "tokens_over_tensor_ranks",
        {
            "mask = words != PAD": "mask = (torch.arange(10) < 5).expand_as(words)",
            "(losses * mask).sum() * data_size / count": "(losses * mask).sum() / losses.numel()",
        },
    ),
]


@pytest.mark.parametrize(("name", "changes"), RIGHT, ids=[name for name, _ in RIGHT])
def test_what_looks_like_it_is_no_alarm(
    python: ForkServer, tmp_path: Path, corpus: Any, name: str, changes: dict[str, str]
) -> None:
    audit = audit_changed(python, tmp_path, corpus.FOLDER / f"{name}.py", changes)
    assert [one for one in audit.findings if one.level in ("FAIL", "WARN")] == []
    assert audit.updates >= 3


def audit_changed(python: ForkServer, folder: Path, script: Path, changes: dict[str, str]) -> Audit:
    text = script.read_text()
    for before, after in changes.items():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    (folder / "train.py").write_text(text)
    return audit_forked(python, folder, folder / "train.py")


ALL_GATHER = "    dist.all_gather(gathered, features)"
PUT_BACK = "    gathered[dist.get_rank()] = features\n"
CUT_OFF = {
    "detached": {ALL_GATHER: "    dist.all_gather(gathered, features.detach().contiguous())"},
    "no_grad": {ALL_GATHER: f"    with torch.no_grad():\n    {ALL_GATHER}"},
    "one_tensor": {
        "gathered = [torch.zeros_like(features) for _ in range(dist.get_world_size())]": "rank = dist.get_rank()\n"
        "    gathered = features.new_zeros(dist.get_world_size() * len(features), 16)",
        ALL_GATHER: "    dist.all_gather_into_tensor(gathered, features.data)",
        PUT_BACK: "    gathered[rank * len(features) : (rank + 1) * len(features)] = features\n",
        "return torch.cat(gathered)": "return gathered",
    },
}


@pytest.mark.parametrize("kind", CUT_OFF)
def test_features_that_are_cut_off_and_gathered(python: ForkServer, tmp_path: Path, corpus: Any, kind: str) -> None:
    """The rank's own, put back among them, say that a gradient was meant; without them it is a stop-gradient."""
    script = corpus.FOLDER / "gather_without_gradient.py"
    (tmp_path / "meant").mkdir()
    found = audit_changed(python, tmp_path, script, CUT_OFF[kind])
    assert [one.rule for one in found.findings if one.level in ("FAIL", "WARN")] == ["gradient.lost"]
    (place,) = [one.place for one in found.findings if one.rule == "gradient.lost"]
    assert "dist.all_gather" in (tmp_path / "train.py").read_text().splitlines()[int(place.rpartition(":")[2]) - 1]
    meant = audit_changed(python, tmp_path / "meant", script, {**CUT_OFF[kind], PUT_BACK: ""})
    assert [one for one in meant.findings if one.level in ("FAIL", "WARN")] == []
    assert any("gradient of the features gathered" in line for line in meant.unchecked)


WITH_BACKWARD = {
    ALL_GATHER: "    gathered = list(dist.nn.functional.all_gather(features))",
    "import time\n": "import time\nimport torch.distributed.nn.functional\n",
    PUT_BACK: "",
}


def test_a_gradient_that_is_a_view(python: ForkServer, tmp_path: Path, corpus: Any) -> None:
    """The backward of torch's own differentiable gather receives into what looks like the gradient: in its strides."""
    script, view = corpus.FOLDER / "gather_without_gradient.py", "torch.cat([part.T for part in gathered], 1).T"
    (tmp_path / "right").mkdir()
    wrong = audit_changed(python, tmp_path, script, {**WITH_BACKWARD, "torch.cat(gathered)": view})
    found = {one.rule: one for one in wrong.findings if one.level in ("FAIL", "WARN")}
    assert "scatter_ of float32[16, 16]" in found["collective.strides"].text
    right = audit_changed(python, tmp_path / "right", script, WITH_BACKWARD)
    assert [one for one in right.findings if one.level in ("FAIL", "WARN")] == []


def test_a_gather_with_a_backward_of_its_own_is_right(python: ForkServer, tmp_path: Path) -> None:
    audit = audit_forked(python, tmp_path, ROOT / "benchmarks" / "silent_bugs" / "blind_set_2" / "simclr_toy.py")
    assert [one for one in audit.findings if one.level in ("FAIL", "WARN")] == []
    assert not any("gradient of the features gathered" in line for line in audit.unchecked)


def test_nodes_of_one_graph_are_no_samples(python: ForkServer, tmp_path: Path) -> None:
    """All ranks feed the model the whole graph, and each its own nodes: right."""
    audit = audit_forked(python, tmp_path, ROOT / "benchmarks" / "silent_bugs" / "blind_set_2" / "graph_nodes.py")
    assert [one for one in audit.findings if one.level in ("FAIL", "WARN")] == []
    assert audit.updates >= 3


@pytest.mark.parametrize(
    "name",
    ["backward_not_reduced", *(pytest.param(name, marks=pytest.mark.integration) for name in (
        "bias_added_by_each_rank", "untied_by_to_empty", "recompute_over_wrong_group", "gathered_logits_split_loss",
        "padded_vocabulary_counted", "gather_over_wrong_group", "sharded_without_replicas",
    ))],
)  # fmt: skip
@pytest.mark.usefixtures("python")
def test_parallel_code_is_told_what_is_wrong_with_it(corpus: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong function and the right one, under `assert_same_gradients`."""
    row = corpus.by_verify(corpus.FOLDER / f"{name}.py")
    assert row["error"] == ""
    assert row["cause"] is True, row["named"]
    assert row["false_alarms"] == []


def test_every_file_says_what_it_expects(corpus: Any) -> None:
    """The judgement of the runner stands in the files, and reads them."""
    files = [file for file in sorted(corpus.FOLDER.glob("*.py")) if corpus.MISTAKE in file.read_text()]
    assert len(files) == 58
    for file in files:
        text = file.read_text()
        assert corpus.field(text, "Expected"), file
        assert corpus.field(text, "Reported").startswith("http"), file
        assert corpus.field(text, "Kind") in ("script", "parallelize"), file
        assert bool(corpus.field(text, "Mesh")) == (corpus.field(text, "Kind") == "parallelize"), file


def test_the_page_is_what_the_record_says(corpus: Any) -> None:
    record = json.loads(corpus.RECORD.read_text())
    assert corpus.tables(record) in corpus.DOCS.read_text(), "python benchmarks/silent_bugs.py --docs"
    assert len(record["rows"]) == 58
    for row in record["rows"]:  # what is missed says why
        assert row["cause"] or row["missed"], row["name"]
    changed = {**record, "rows": [{**record["rows"][0], "found": not record["rows"][0]["found"]}, *record["rows"][1:]]}
    assert corpus.tables(changed) not in corpus.DOCS.read_text()

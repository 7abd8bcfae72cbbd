"""The corpus of silent bugs in benchmarks/silent_bugs.

The expected rule finds bugs of several kinds. Corrected scripts have no findings. The page matches the record.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from auditing import audit_forked_script
from everyrank.audit import Audit
from forkserver import ForkServer

ROOT = Path(__file__).parents[2]

FOUND = ["gather_without_gradient", "loss_times_tensor_ranks"]
FOUND_AT_LENGTH = [
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
    """Return the module benchmarks/silent_bugs.py, which runs the corpus."""
    spec = importlib.util.spec_from_file_location("silent_bugs", ROOT / "benchmarks" / "silent_bugs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name", [*FOUND, *(pytest.param(name, marks=pytest.mark.integration) for name in FOUND_AT_LENGTH)]
)
def test_bug_is_found_and_its_correction_has_no_findings(
    python: ForkServer, tmp_path: Path, corpus: Any, name: str
) -> None:
    """The expected rule names a line of the script. The script corrects itself with the flag --right."""
    script = corpus.CORPUS_FOLDER / f"{name}.py"
    (tmp_path / "wrong").mkdir()
    (tmp_path / "right").mkdir()
    findings_by_rule = {
        finding.rule: finding for finding in audit_forked_script(python, tmp_path / "wrong", script).findings
    }
    expected_finding = findings_by_rule.get(corpus.header_field(script.read_text(), "Expected"))
    assert expected_finding is not None, findings_by_rule
    assert expected_finding.level in ("FAIL", "WARN")
    assert expected_finding.location.rpartition(":")[0] == str(script)
    corrected = audit_forked_script(python, tmp_path / "right", script, "--right")
    assert [finding for finding in corrected.findings if finding.level in ("FAIL", "WARN")] == []
    assert corrected.updates >= 3


# correct scripts that look like the mistake: (file, replacements in its text)
CORRECT_VARIANTS = [
    (  # each rank computes the whole loss, so its own features have their whole gradient
        "gather_without_gradient",
        {
            "labels = torch.arange(len(images)) + len(images) * dist.get_rank()": "labels = torch.arange(BATCH)",
            "(images @ all_texts.T": "(all_images @ all_texts.T",
            "(texts @ all_images.T": "(all_texts @ all_images.T",
        },
    ),
    (  # all ranks read the whole stream, and the training loop splits it
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


@pytest.mark.parametrize(("name", "changes"), CORRECT_VARIANTS, ids=[name for name, _ in CORRECT_VARIANTS])
def test_correct_script_similar_to_a_bug_has_no_findings(
    python: ForkServer, tmp_path: Path, corpus: Any, name: str, changes: dict[str, str]
) -> None:
    audit = audit_changed(python, tmp_path, corpus.CORPUS_FOLDER / f"{name}.py", changes)
    assert [finding for finding in audit.findings if finding.level in ("FAIL", "WARN")] == []
    assert audit.updates >= 3


def audit_changed(python: ForkServer, folder: Path, script: Path, changes: dict[str, str]) -> Audit:
    """Audit the script after these replacements in its text."""
    text = script.read_text()
    for before, after in changes.items():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    (folder / "train.py").write_text(text)
    return audit_forked_script(python, folder, folder / "train.py")


ALL_GATHER = "    dist.all_gather(gathered, features)"
PUT_LOCAL_FEATURES_BACK = "    gathered[dist.get_rank()] = features\n"
DETACHED_FEATURES = {
    "detached": {ALL_GATHER: "    dist.all_gather(gathered, features.detach().contiguous())"},
    "no_grad": {ALL_GATHER: f"    with torch.no_grad():\n    {ALL_GATHER}"},
    "one_tensor": {
        "gathered = [torch.zeros_like(features) for _ in range(dist.get_world_size())]": "rank = dist.get_rank()\n"
        "    gathered = features.new_zeros(dist.get_world_size() * len(features), 16)",
        ALL_GATHER: "    dist.all_gather_into_tensor(gathered, features.data)",
        PUT_LOCAL_FEATURES_BACK: "    gathered[rank * len(features) : (rank + 1) * len(features)] = features\n",
        "return torch.cat(gathered)": "return gathered",
    },
}


@pytest.mark.parametrize("kind", DETACHED_FEATURES)
def test_gather_of_detached_features_is_found(python: ForkServer, tmp_path: Path, corpus: Any, kind: str) -> None:
    """A script that puts the local features back intends a gradient. Without that, it is a stop-gradient."""
    script = corpus.CORPUS_FOLDER / "gather_without_gradient.py"
    (tmp_path / "stop_gradient").mkdir()
    audit = audit_changed(python, tmp_path, script, DETACHED_FEATURES[kind])
    assert [finding.rule for finding in audit.findings if finding.level in ("FAIL", "WARN")] == ["gradient.lost"]
    (location,) = [finding.location for finding in audit.findings if finding.rule == "gradient.lost"]
    assert "dist.all_gather" in (tmp_path / "train.py").read_text().splitlines()[int(location.rpartition(":")[2]) - 1]
    stop_gradient = audit_changed(
        python, tmp_path / "stop_gradient", script, {**DETACHED_FEATURES[kind], PUT_LOCAL_FEATURES_BACK: ""}
    )
    assert [finding for finding in stop_gradient.findings if finding.level in ("FAIL", "WARN")] == []
    assert any("gradient of the features gathered" in line for line in stop_gradient.unchecked)


DIFFERENTIABLE_GATHER = {
    ALL_GATHER: "    gathered = list(dist.nn.functional.all_gather(features))",
    "import time\n": "import time\nimport torch.distributed.nn.functional\n",
    PUT_LOCAL_FEATURES_BACK: "",
}


def test_non_contiguous_gradient_of_a_gather_is_found(python: ForkServer, tmp_path: Path, corpus: Any) -> None:
    """The backward of torch's differentiable gather receives into a buffer with the strides of the gradient."""
    script, view = corpus.CORPUS_FOLDER / "gather_without_gradient.py", "torch.cat([part.T for part in gathered], 1).T"
    (tmp_path / "right").mkdir()
    audit_of_view = audit_changed(python, tmp_path, script, {**DIFFERENTIABLE_GATHER, "torch.cat(gathered)": view})
    findings_by_rule = {
        finding.rule: finding for finding in audit_of_view.findings if finding.level in ("FAIL", "WARN")
    }
    assert "scatter_ of float32[16, 16]" in findings_by_rule["collective.strides"].text
    audit_of_correct_script = audit_changed(python, tmp_path / "right", script, DIFFERENTIABLE_GATHER)
    assert [finding for finding in audit_of_correct_script.findings if finding.level in ("FAIL", "WARN")] == []


def test_gather_with_a_custom_backward_has_no_findings(python: ForkServer, tmp_path: Path) -> None:
    audit = audit_forked_script(python, tmp_path, ROOT / "benchmarks" / "silent_bugs" / "blind_set_2" / "simclr_toy.py")
    assert [finding for finding in audit.findings if finding.level in ("FAIL", "WARN")] == []
    assert not any("gradient of the features gathered" in line for line in audit.unchecked)


def test_nodes_of_a_shared_graph_have_no_findings(python: ForkServer, tmp_path: Path) -> None:
    """All ranks feed the whole graph to the model, and each computes the loss of its own nodes."""
    audit = audit_forked_script(
        python, tmp_path, ROOT / "benchmarks" / "silent_bugs" / "blind_set_2" / "graph_nodes.py"
    )
    assert [finding for finding in audit.findings if finding.level in ("FAIL", "WARN")] == []
    assert audit.updates >= 3


@pytest.mark.parametrize(
    "name",
    ["backward_not_reduced", *(pytest.param(name, marks=pytest.mark.integration) for name in (
        "bias_added_by_each_rank", "untied_by_to_empty", "recompute_over_wrong_group", "gathered_logits_split_loss",
        "padded_vocabulary_counted", "gather_over_wrong_group", "sharded_without_replicas",
    ))],
)  # fmt: skip
@pytest.mark.usefixtures("python")
def test_bug_in_parallel_code_is_found_by_assert_same_gradients(
    corpus: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrong parallelize function is reported with its cause, and the corrected one is not."""
    row = corpus.check_parallelize(corpus.CORPUS_FOLDER / f"{name}.py")
    assert row["error"] == ""
    assert row["cause"] is True, row["named"]
    assert row["false_alarms"] == []


def test_every_bug_declares_rule_source_and_kind(corpus: Any) -> None:
    """The runner reads these fields from the files."""
    files = [file for file in sorted(corpus.CORPUS_FOLDER.glob("*.py")) if corpus.MISTAKE_MARK in file.read_text()]
    assert len(files) == 58
    for file in files:
        text = file.read_text()
        assert corpus.header_field(text, "Expected"), file
        assert corpus.header_field(text, "Reported").startswith("http"), file
        assert corpus.header_field(text, "Kind") in ("script", "parallelize"), file
        assert bool(corpus.header_field(text, "Mesh")) == (corpus.header_field(text, "Kind") == "parallelize"), file


def test_documentation_matches_the_record(corpus: Any) -> None:
    record = json.loads(corpus.RECORD.read_text())
    assert corpus.make_tables(record) in corpus.DOCS_PAGE.read_text(), "python benchmarks/silent_bugs.py --docs"
    assert len(record["rows"]) == 58
    for row in record["rows"]:  # a missed bug has a reason
        assert row["cause"] or row["missed"], row["name"]
    changed = {**record, "rows": [{**record["rows"][0], "found": not record["rows"][0]["found"]}, *record["rows"][1:]]}
    assert corpus.make_tables(changed) not in corpus.DOCS_PAGE.read_text()

"""Updates on a CUDA device, under every strategy: host synchronizations, copies and number of operators.

Tensors and the process group are fake (fake_cuda.py), so no GPU is needed. Results and speed are not tested here.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

import fake_cuda
from everyrank.layout import STRATEGIES, parse_layout
from forkserver import ForkServer

# (workload, layout, rank, ranks) -> maximum number of operators in an update. Most are the model's: compare with
# `single`. Versions of torch differ by a few. The CPU wheel gives the counts of a CUDA build (fake_cuda.py).
BUDGETS: dict[tuple[str, str, int, int], int] = {
    ("text", "single", 0, 1): 290,
    ("text", "single:precision=bf16", 0, 1): 380,
    ("text", "single:precision=fp16", 0, 1): 380,
    ("text", "single:recompute,accumulate=2", 0, 1): 790,
    ("average", "single", 0, 1): 300,
    ("text", "dataparallel", 0, 1): 290,
    ("text", "ddp", 0, 2): 300,
    ("digits", "ddp", 0, 2): 220,
    ("digits", "ddp:batch_norm=local", 0, 2): 110,
    ("digits", "ddp", 0, 1): 100,
    ("text", "ddp:compress=fp16", 0, 2): 330,
    ("text", "ddp:compress=powersgd", 0, 2): 720,
    ("text", "zero1", 0, 2): 330,
    ("text", "fsdp", 0, 2): 310,
    ("digits", "fsdp", 1, 2): 200,
    ("text", "fsdp:replicate=2", 0, 4): 310,
    ("text", "fsdp:tensor=2", 1, 4): 320,
    ("text", "tensor", 0, 2): 290,
    ("text", "tensor:sequence=true", 1, 2): 340,
    ("text", "context", 0, 2): 700,
    ("text", "context:method=ulysses", 1, 2): 370,
    ("text", "pipeline", 0, 2): 560,
    ("text", "pipeline", 1, 2): 610,
    ("text", "pipeline:shard=2", 1, 4): 600,
    ("experts", "single", 0, 1): 460,
    ("experts", "expert", 0, 2): 450,
    ("experts", "fsdp:expert=2", 0, 4): 510,
    ("text", "local_sgd:every=1", 0, 2): 390,
    ("digits", "local_sgd:every=1", 1, 2): 140,
    ("text", "parameter_server", 1, 2): 280,
}

# (workload, layout) -> number of host synchronizations in an update, and their reason
EXPECTED_WAITS: dict[tuple[str, str], tuple[int, str]] = {
    ("text", "single:precision=fp16"): (1, "an update that overflows in fp16 is left out: the host decides"),
    ("experts", "single"): (2, "the built-in model cuts tokens into as many pieces as experts, once a block"),
    ("experts", "expert"): (4, "how many rows travel to and from other ranks; and the model's own, once a block"),
    ("experts", "fsdp:expert=2"): (4, "the same"),
    ("text", "parameter_server"): (1, "servers read loss and count, which travel ahead of the gradients"),
}

NOT_SIMULATED = {
    "horovod": "its operators are Horovod's, which has to be built with CUDA",
}


@pytest.fixture(scope="module")
def report(python: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of all cases, from one process: the patches for fake tensors stay in that process."""
    path = tmp_path_factory.mktemp("fake_cuda") / "report.json"
    child = python.fork(fake_cuda.write_report, list(BUDGETS), path)
    try:
        assert child.wait(200.0) == 0
    finally:
        child.kill()
        child.close()
    return json.loads(path.read_text())


def row_of(report: dict[str, Any], case: tuple[str, str, int, int]) -> dict[str, dict[str, int]]:
    row = report["rows"][list(BUDGETS).index(case)]
    assert "error" not in row, row["error"]
    return row


@pytest.mark.integration
@pytest.mark.parametrize("case", BUDGETS, ids=lambda case: "-".join(map(str, case)))
def test_update_has_no_unexpected_host_synchronization(report: dict[str, Any], case: tuple[str, str, int, int]) -> None:
    """The host waits for the device only as often as EXPECTED_WAITS allows, and copies no more often than that."""
    row = row_of(report, case)
    num_waits, _ = EXPECTED_WAITS.get(case[:2], (0, ""))
    assert sum(row["waits"].values()) == num_waits, row["waits"]
    assert sum(row["copies"].values()) <= num_waits, row["copies"]


@pytest.mark.integration
@pytest.mark.parametrize("case", BUDGETS, ids=lambda case: "-".join(map(str, case)))
def test_number_of_operators_is_within_budget(report: dict[str, Any], case: tuple[str, str, int, int]) -> None:
    """It is at least 80% of the budget, so that budgets stay tight."""
    operators = row_of(report, case)["operators"]
    assert 0.8 * BUDGETS[case] <= sum(operators.values()) <= BUDGETS[case], _most_frequent(operators)


def _most_frequent(operators: dict[str, int]) -> str:
    rows = sorted(operators.items(), key=lambda row: -row[1])[:12]
    return f"{sum(operators.values())} operators: " + "; ".join(f"{count} x {name}" for name, count in rows)


@pytest.mark.integration
def test_fake_device_counts_synchronizations_and_copies(report: dict[str, Any]) -> None:
    """The values are [waits, copies] of operations whose behavior is known."""
    assert report["seen"] == {
        "float": [1, 0],
        "bool": [1, 0],
        "tolist": [1, 1],
        "tensor": [1, 1],
        "tensor of the host into an element": [1, 1],
        "cpu": [1, 1],
        "to the device": [1, 1],
        "to the device, not blocking": [0, 1],
        "bincount": [1, 0],
        "fill": [0, 0],
        "full": [0, 0],
    }


@pytest.mark.integration
def test_clipping_of_a_model_on_two_devices(report: dict[str, Any]) -> None:
    """The model is on two devices (devices=2). One norm covers both, and each device gets the scaling factor."""
    assert report["two devices"] == ""


def test_every_strategy_has_a_case() -> None:
    """A new strategy needs a case in BUDGETS, or a reason in NOT_SIMULATED."""
    covered_strategies = {parse_layout(layout).strategy for _, layout, _, _ in BUDGETS}
    assert covered_strategies | NOT_SIMULATED.keys() == STRATEGIES.keys()
    assert not covered_strategies & NOT_SIMULATED.keys()

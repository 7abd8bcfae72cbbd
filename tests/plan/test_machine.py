"""A measured machine: curves are read between their points, files are read back, and a traced step has its time."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from everyrank.cli import main
from everyrank.errors import UsageError
from everyrank.plan.machine import Machine, read_machine, traced_seconds, write_machine

KERNELS = ("product", "other", "convolution", "convolution_backward", "attention", "attention_backward")
LINKS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")


@dataclass(frozen=True)
class Called:
    name: str
    flops: int = 0
    bytes: int = 0
    group: str = ""


def machine() -> Machine:
    """Kernels of 1 us or a billion a second, links of 10 us or 100 million a second."""
    kernels = {kind: [(1e3, 1e-6), (1e9, 1.0)] for kind in KERNELS}
    links = {"shm": {kind: [(1e3, 1e-5), (1e8, 1.0)] for kind in LINKS}}
    overhead = {"shm": {"ddp": 2e-6, "pipeline": 2e-6, "fsdp": 2e-6, "zero1": 2e-6, "tensor": 2e-6}}
    return Machine("cpu", 2, 1, kernels, links, overhead, {"host": "test"})


def test_the_time_of_a_step_is_the_slowest_rank_and_its_bubble() -> None:
    """Products go by operations, others by bytes, collectives by theirs; waiting takes nothing."""
    light = [Called("mm", flops=10**6), Called("add", bytes=10), Called("wait_tensor", group="0")]
    heavy = [*light, Called("mm", flops=10**9), Called("allreduce_", bytes=10**8, group="0")]
    parts = traced_seconds([light, heavy], "ddp", machine(), "shm")
    assert parts["kernels"] == pytest.approx(1 + 1e-3 + 1e-6, rel=1e-6)
    assert parts["links"] == pytest.approx(1)
    assert parts["overhead"] == pytest.approx(5 * 2e-6)
    idle = traced_seconds([heavy], "pipeline", machine(), "shm", bubble=0.2)
    assert idle["bubble"] == pytest.approx(0.25 * sum(value for name, value in idle.items() if name != "bubble"))
    more = traced_seconds([[Called("mm", flops=4 * 10**9)]], "ddp", machine(), "shm")
    assert more["kernels"] == pytest.approx(4), "beyond the last point at its rate"


def test_a_machine_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(write_machine(machine()))
    assert read_machine(path) == machine()
    path.write_text(json.dumps([1]))
    assert read_machine(path) is None
    path.write_text(write_machine(machine()).replace('"product"', '"produce"').replace("1e-05", "-1"))
    with pytest.raises(UsageError, match="plan --calibrate"):
        read_machine(path)
    with pytest.raises(UsageError, match="calibrate again"):
        machine().link_seconds([], "gloo")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--decoder 8b", "a workload"),
        ("digits --gpus 8xh100", "leave --gpus out"),
        ("digits --backend gloo --layout ddp", "ddp on gloo"),
        ("digits --layout local_sgd", "local_sgd on shm"),
    ],
)
def test_wrong_calls_with_a_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, named: str) -> None:
    path = tmp_path / "machine.json"
    path.write_text(write_machine(machine()))
    assert main(["plan", *words.split(), "--calibration", str(path)]) == 2
    assert named in capsys.readouterr().err


def test_a_workload_has_its_time_on_a_measured_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "machine.json", tmp_path / "plan.json"
    path.write_text(write_machine(machine()))
    words = ["plan", "digits", "--layout", "ddp", "--calibration", str(path), "--json", str(out)]
    assert main(words) == 0
    row = json.loads(out.read_text())["layouts"][0]
    assert row["step_seconds"] == pytest.approx(sum(row["parts"].values()))
    assert row["parts"]["links"] > 0
    assert "an update" in capsys.readouterr().out

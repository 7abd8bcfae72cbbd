"""everyrank.testing in a user's test file, which a separate pytest process runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from forkserver import MARK, ForkServer
from processes import wait_for_marked_processes

FILE = """\
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from everyrank import ParallelContract, Workload
from everyrank.testing import assert_same_gradients, assert_same_training


class Mlp(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.up, self.down = nn.Linear(4, width, bias=False), nn.Linear(width, 2, bias=False)

    def forward(self, value):
        return self.down(torch.tanh(self.up(value)))


def squared(output, target):
    return (output - target).square().sum(), target.numel()


def batch(length=6):
    return torch.randn(length, 4), torch.randn(length, 2)


def workload(loss):
    return Workload(
        name="mlp",
        model=lambda: Mlp(),
        train_data=lambda: TensorDataset(*batch(20)),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        global_batch=6,
    )


def parallelize(model, mesh):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, mesh["tensor"], plan)


def test_training():
    assert_same_training(workload(squared), ["ddp", "fsdp"])


def test_wrong_training():
    assert_same_training(workload(lambda output, target: ((output - target).square().mean(), 1)), ["ddp", "fsdp"])


def test_gradients():
    assert_same_gradients(Mlp(), parallelize, batch(), squared, {"tensor": 2})


def test_a_closure():
    width = 12

    def ddp(model, mesh):
        assert model.up.weight.shape == (width, 4)
        return DistributedDataParallel(model, process_group=mesh["data"].get_group())

    loss = lambda output, target: squared(output, target)
    assert_same_gradients(lambda: Mlp(width), ddp, batch(7), loss, {"data": 2})


def test_wrong_gradients():
    def halved(model, mesh):
        model = parallelize(model, mesh)
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient / 2)
        return model

    assert_same_gradients(Mlp(), halved, batch(), squared, {"tensor": 2})


class Part(nn.Module):
    def __init__(self, linear, group):
        super().__init__()
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self.weight = nn.Parameter(linear.weight.detach().chunk(size)[rank].clone())
        self.group = group

    def forward(self, value):
        return all_gather_tensor_autograd(torch.nn.functional.linear(value, self.weight), 1, self.group)


def by_hand(model, mesh):
    model.up = Part(model.up, mesh["tensor"].get_group())
    return model


def put_together(model, mesh):
    rows = [torch.empty_like(model.up.weight) for _ in range(mesh["tensor"].size())]
    dist.all_gather(rows, model.up.weight.detach().contiguous(), group=mesh["tensor"].get_group())
    return {"up.weight": torch.cat(rows)}


def own_part(model, mesh):
    model.up.weight.grad /= mesh["tensor"].size()  # the gather adds up the gradients of all ranks, which are the same


def of_parts(**more):
    return ParallelContract(axes={"tensor": "same"}, after_backward=own_part, **more)


def test_not_compared():
    assert_same_gradients(Mlp(), by_hand, batch(), squared, {"tensor": 2}, contract=of_parts())


def test_allowed():
    allowed = ["up.*"]
    assert_same_gradients(
        Mlp(), by_hand, batch(), squared, {"tensor": 2}, contract=of_parts(), allow_uncompared=allowed, backend="gloo"
    )
    assert_same_gradients(Mlp(), by_hand, batch(), squared, {"tensor": 2}, contract=of_parts(gather=put_together))


def clip_own(model, max_norm, mesh):
    norm = torch.stack([parameter.grad.full_tensor().norm() for parameter in model.parameters()]).norm()
    for parameter in model.parameters():
        parameter.grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))


def clip_half(model, max_norm, mesh):
    norm = torch.stack([parameter.grad.to_local().norm() for parameter in model.parameters()]).norm()
    for parameter in model.parameters():
        parameter.grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))


def test_clipping():
    for clip in (clip_own, clip_half):
        contract = ParallelContract(axes={"tensor": "same"}, clip_grad_norm=clip)
        assert_same_gradients(Mlp(), parallelize, batch(), squared, {"tensor": 2}, contract=contract, clip_norm=0.01)


def test_wrong_call():
    assert_same_gradients(Mlp(), parallelize, batch()[0], squared, {"tensor": 2})
"""


@pytest.fixture(scope="module")
def run_user_test(python: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that runs one test of FILE. It returns pytest's exit code and output, and remaining processes."""

    def run(name: str, mode: str = "prepend", content: str = FILE) -> tuple[int, str, dict[int, str]]:
        folder: Path = tmp_path_factory.mktemp("user")
        # pytest runs in another directory, so Python does not find the test file by itself
        for subfolder in ("suite", "elsewhere"):
            (folder / subfolder).mkdir()
        (folder / "suite" / "test_mine.py").write_text(content)
        args = (
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            f"--import-mode={mode}",
            "-q",
            f"../suite/test_mine.py::{name}",
        )
        mark = uuid.uuid4().hex
        with (folder / "out").open("w") as out:
            environment = {**os.environ, MARK: mark}
            process = python.start(folder / "elsewhere", *args, streams=(None, out, out), environment=environment)
            status = process.wait(200)
        return status, (folder / "out").read_text(), wait_for_marked_processes(mark)

    return run


@pytest.mark.parametrize("mode", ["prepend", "importlib"])
@pytest.mark.parametrize("name", ["test_training", "test_gradients", "test_a_closure"])
def test_correct_code_passes(run_user_test: Any, name: str, mode: str) -> None:
    """Modules, closures and lambdas of a test file work with both import modes of pytest."""
    status, text, left = run_user_test(name, mode)
    assert status == 0, text
    assert "1 passed" in text
    assert not left


@pytest.mark.integration
def test_ranks_need_not_import_the_test_file(tmp_path: Path) -> None:
    """With `--import-mode=importlib`, ranks cannot import the file by name. Here pytest is not forked."""
    for name in ("suite", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "suite" / "test_mine.py").write_text(FILE)
    test_id = "../suite/test_mine.py::test_gradients"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--import-mode=importlib", "-q", test_id]
    process = subprocess.run(
        command, cwd=tmp_path / "elsewhere", capture_output=True, text=True, timeout=300, check=False
    )
    assert "1 passed" in process.stdout, process.stdout


def test_failure_message_explains_the_difference(run_user_test: Any) -> None:
    """The message has the layout, the first difference, its size and the cause. No process is left."""
    status, text, left = run_user_test("test_wrong_gradients")
    assert status == 1, text
    assert "test_mine.py:halved:tensor=2: DIFFERENT: update 0" in text
    assert "gradient of up.weight" in text
    assert "off by " in text
    assert "0.5 times that of one device" in text
    assert not left


def test_failure_message_lists_every_layout(run_user_test: Any) -> None:
    """Each layout that differs has its own line."""
    status, text, left = run_user_test("test_wrong_training", "importlib")
    assert status == 1, text
    for layout in ("ddp", "fsdp"):
        assert f"{layout}: DIFFERENT: update 0, count of loss terms" in text
    assert "2 terms over all ranks and 1" in text
    assert not left


def test_uncompared_parameters_fail_the_test(run_user_test: Any) -> None:
    """A shard that is no DTensor cannot be compared. Use `allow_uncompared`, or `gather` in the contract."""
    status, text, _ = run_user_test("test_not_compared")
    assert status == 1, text
    assert "by_hand:tensor=2: not compared: up.weight" in text
    assert "allow_uncompared=['up.weight']" in text
    assert run_user_test("test_allowed")[0] == 0


def test_wrong_gradient_clipping_is_detected(run_user_test: Any) -> None:
    """Clipping by the global norm passes. Clipping by local norms fails, although the gradients are right."""
    status, text, _ = run_user_test("test_clipping")
    assert status == 1, text
    assert "each rank clips by the norm" in text
    assert "contract=contract, clip_norm=0.01" in text


def test_wrong_arguments_raise_a_usage_error(run_user_test: Any) -> None:
    """Inputs that are not a pair are refused before any rank is started."""
    status, text, _ = run_user_test("test_wrong_call")
    assert status == 1, text
    assert "UsageError: inputs: give (input, target)" in text


def test_examples_of_the_testing_page_work(run_user_test: Any, repository: Path) -> None:
    """The correct examples in docs/testing.md pass. The wrong example fails with the message on the page."""
    page = (repository / "docs" / "testing.md").read_text()
    blocks = re.findall(r"^```(?:python)?\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    code = next(block for block in blocks if "def test_a_mistake" in block)
    message_block = next(block for block in blocks if block.startswith("E "))
    status, text, left = run_user_test("test_a_mistake", content=code)
    assert status == 1, text
    expected = " ".join(message_block.split()).partition("AssertionError: test_parallel.py")[2]
    numbers = re.compile(r"[0-9.]+e-[0-9]+")
    assert numbers.sub("N", expected) in numbers.sub("N", " ".join(text.split()))
    assert not left
    assert run_user_test("test_gradients", content=code)[0] == 0
    docs = repository / "docs"
    for link in re.findall(r"\]\(([^)#]+)\)", page):
        assert (docs / link).exists(), link

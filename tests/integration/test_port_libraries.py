"""Ports to Accelerate and Fabric run with the real libraries: they are equal, and wrong ports are detected."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from everyrank.port import IDIOMS, PortResult, check_ported, port_script
from everyrank.rerun import ScriptHost
from forkserver import ForkServer
from integration.conftest import needs_library
from scripts_to_port import (
    ENGINE_MODULE,
    FIT_FUNCTION_SCRIPT,
    FUNCTIONS_SCRIPT,
    GAN_SCRIPT,
    GPT_SCRIPT,
    NO_LOADER_SCRIPT,
    SCRIPT_WITH_ENGINE,
    SUMMED_LOSS_SCRIPT,
    TRAINER_CLASS_SCRIPT,
)

PACKAGES = {"accelerate": "accelerate", "fabric": "lightning"}
STYLES = {
    "functions": FUNCTIONS_SCRIPT,
    "one_function": FIT_FUNCTION_SCRIPT,
    "class": TRAINER_CLASS_SCRIPT,
    "no_loader": NO_LOADER_SCRIPT,
    "summed": SUMMED_LOSS_SCRIPT,
    "gan": GAN_SCRIPT,
}
IN_ORDER = GPT_SCRIPT.replace(", shuffle=True", "")  # a shuffle of ranks that share a seed is not that of the script
# what people write: the loader given to the library as it is, and the loss of each rank as it is
MISTAKES = {
    ("accelerate", "its loader"): (r"split\((DataLoader\(.*?=16\))\)", r"accelerator.prepare(\1)"),
    ("accelerate", "mean of means"): (r"loss = mean_over_ranks\(loss, .*\)", "pass"),
    ("accelerate", "no prepare"): (r"model, optimizer = accelerator\.prepare\(.*\)", "pass"),
    ("fabric", "its loader"): (r"split\((DataLoader\(.*?=16\))\), use_distributed_sampler=False", r"\1"),
    ("fabric", "mean of means"): (r"loss = mean_over_ranks\(loss, .*\)", "pass"),
}


def ported(folder: Path, text: str, target: str, ranks: tuple[int, ...] = (2, 3)) -> PortResult:
    script = folder / "train.py"
    script.write_text(text)
    return port_script([str(script)], ranks, 120.0, target=target)


@pytest.fixture(params=PACKAGES)
def target(request: pytest.FixtureRequest) -> str:
    needs_library(PACKAGES[request.param])
    return request.param


@pytest.fixture(scope="module", params=PACKAGES)
def gpt(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Generator[tuple[str, Path, ScriptHost]]:
    """Yield a library, the folder of a script and its equal port, and the host of the script."""
    needs_library(PACKAGES[request.param])
    folder = tmp_path_factory.mktemp(request.param)
    best = ported(folder, IN_ORDER, request.param).best
    assert best.is_equal, [comparison.difference for comparison in best.comparisons]
    assert not best.differing_lines
    assert not best.doubts
    (folder / "port.py").write_text(best.text)
    with ScriptHost([str(folder / "train.py")]) as host:
        yield request.param, folder, host


@pytest.mark.parametrize("style", STYLES)
def test_ports_are_equal(tmp_path: Path, target: str, style: str) -> None:
    ranks = (2, 3) if style == "functions" else (2,)  # three ranks have uneven batches
    best = ported(tmp_path, STYLES[style], target, ranks).best
    assert best.is_equal, [comparison.difference for comparison in best.comparisons]
    assert not best.differing_lines
    assert not best.doubts
    assert "everyrank" not in best.text
    assert "dist." not in best.text


def test_training_loop_in_a_second_file_is_ported(tmp_path: Path, target: str) -> None:
    (tmp_path / "engine.py").write_text(ENGINE_MODULE)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT_WITH_ENGINE)
    best = port_script([str(script)], (2,), 120.0, other=tmp_path / "engine.py", target=target).best
    assert best.is_equal, [comparison.difference for comparison in best.comparisons]
    assert not best.differing_lines
    assert f"{IDIOMS[target].object}.backward(loss)" in best.other_text


def test_port_trains_the_same_with_the_launcher_of_the_library(
    python: ForkServer, gpt: tuple[str, Path, ScriptHost]
) -> None:
    """The launcher starts a new Python. The fork server starts the script and the port on one process."""
    target, folder, _ = gpt
    scripts = Path(sys.executable).parent
    command = shlex.split(IDIOMS[target].start)
    forked = str(python.programs / "python")
    expected = [pytest.approx(number, abs=2e-3) for number in printed([forked, "train.py"], folder)]
    weights = torch.load(folder / "gpt.pt")["model"]
    (folder / "gpt.pt").unlink()
    assert printed([str(scripts / command[0]), *command[1:], "2", "port.py"], folder) == expected
    for name, value in torch.load(folder / "gpt.pt")["model"].items():
        torch.testing.assert_close(value, weights[name], rtol=1e-3, atol=1e-4)
    assert printed([forked, "port.py"], folder) == expected  # as one process


def printed(command: list[str], folder: Path) -> list[float]:
    """Return the numbers that a run prints."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [float(number) for number in re.findall(r"\d+\.?\d*", done.stdout)]


@pytest.mark.parametrize("mistake", sorted({name for _, name in MISTAKES}))
def test_wrong_ports_are_detected(gpt: tuple[str, Path, ScriptHost], mistake: str) -> None:
    target, folder, host = gpt
    if (target, mistake) not in MISTAKES:
        return
    before, after = MISTAKES[target, mistake]
    wrong, count = re.subn(before, after, (folder / "port.py").read_text())
    assert count == 1
    (folder / "wrong.py").write_text(wrong)
    assert not check_ported(host, folder / "wrong.py", (2,)).best.is_equal

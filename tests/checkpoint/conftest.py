"""Fixtures of the tests in this folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from checkpointing import DIGITS
from processes import Cli


@pytest.fixture(scope="module")
def _saved_once(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    words = ("--layout", "ddp", "--processes", "2", "--save-every", "2", "--evaluate-every", "0", "--out", "run")
    done = cli(folder, *DIGITS, *words)
    assert done.status == 0, done.err
    return folder / "run"


@pytest.fixture
def run_folder(_saved_once: Path, tmp_path: Path) -> Path:
    """A run of two ranks with checkpoints after the updates 2, 4 and 6."""
    return Path(shutil.copytree(_saved_once, tmp_path / "run", symlinks=True))

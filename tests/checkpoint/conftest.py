"""Fixtures for the checkpoint tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from checkpointing import DIGITS_ARGS
from processes import Cli


@pytest.fixture(scope="module")
def _saved_once(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    args = ("--layout", "ddp", "--processes", "2", "--save-every", "2", "--evaluate-every", "0", "--out", "run")
    result = cli(folder, *DIGITS_ARGS, *args)
    assert result.status == 0, result.err
    return folder / "run"


@pytest.fixture
def run_folder(_saved_once: Path, tmp_path: Path) -> Path:
    """Return a copy of a run of two ranks with checkpoints after updates 2, 4 and 6."""
    return Path(shutil.copytree(_saved_once, tmp_path / "run", symlinks=True))

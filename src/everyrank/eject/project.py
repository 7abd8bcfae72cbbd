"""write_project: writes all files of a project into an empty folder."""

from __future__ import annotations

import shutil
from importlib.resources import files
from pathlib import Path

from everyrank.eject.compose import compose, conditions_of, render_template
from everyrank.eject.facts import look_at
from everyrank.eject.readme import readme, requirements, start_command
from everyrank.eject.request import EjectRequest, refuse_layout, refuse_workload
from everyrank.eject.sources import own_sources
from everyrank.errors import EveryrankError, UsageError, WorkloadError, describe
from everyrank.workload import load

__all__ = ["write_project"]


def write_project(request: EjectRequest, folder: Path) -> list[Path]:
    """Write the project. Returns its files in the order of the README.

    Raises `UsageError` for a workload that cannot be ejected or a folder that is not empty; then nothing is written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder}: the folder is not empty; name an empty or new folder")
    refuse_layout(request)
    workload = load(request.source)
    refuse_workload(workload, request)
    try:
        facts = look_at(workload, request)
    except EveryrankError:
        raise
    except Exception as error:  # raised by user code
        raise WorkloadError(describe(error)) from error
    sources = own_sources(request.source)
    holds = conditions_of(workload, facts, request)
    command, names = start_command(request, sources.names.script), sources.names
    script = compose(workload, facts, request, sources, command)
    texts = {f"{names.script}.py": script, **sources.files, "requirements.txt": requirements(sources)}
    if "batch_norm" in holds:
        texts[f"{names.batch_norm}.py"] = render_template("batch_norm", holds, {})
    if request.launcher == "slurm":
        texts[f"{names.script}.sbatch"] = _sbatch(request, names.script)
    texts["README.md"] = readme(workload, facts, request, sources, "batch_norm" in holds)
    return _write_files(folder, texts, sources.data)


def _sbatch(request: EjectRequest, script: str) -> str:
    """Return the batch script that starts `script`.py."""
    text = (files("everyrank.eject.parts") / "train.sbatch.txt").read_text(encoding="utf-8")
    return text.replace("@PROCESSES@", str(request.processes)).replace("@SCRIPT@", script)


def _write_files(folder: Path, texts: dict[str, str], data: list[Path]) -> list[Path]:
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for file in data:
        shutil.copyfile(file, folder / file.name)
    return [folder / name for name in (*texts, *(file.name for file in data))]

"""Runs when a Python process of an audited script starts, because this folder is on PYTHONPATH.

It redirects files, and installs the hooks right after the first `import torch`. It does nothing without the environment
variable of the audit.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

_HERE = str(Path(__file__).parent)


def _chain() -> None:
    """Run the `sitecustomize` of the user's environment, which this one hides. As in Python, its errors end nothing."""
    for folder in sys.path:
        path = Path(folder or ".") / "sitecustomize.py"
        if str(path.parent.absolute()) != _HERE and path.is_file():
            names = {"__name__": "sitecustomize", "__file__": str(path)}
            try:
                exec(compile(path.read_bytes(), str(path), "exec"), names)  # noqa: S102
            except Exception as error:
                print(f"Error in {path}: {type(error).__name__}: {error}", file=sys.stderr)
            return


def _load(name: str):
    """Load a module of the audit from its file, without its package, which imports more than a small process needs."""
    full = f"everyrank.audit.watch.{name}"
    spec = importlib.util.spec_from_file_location(full, Path(_HERE).parent / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[full] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _install(_torch: Any) -> None:
    from everyrank.audit.watch.install import install

    install()


_chain()
if os.environ.get("EVERYRANK_AUDIT"):
    _settings = json.loads(os.environ["EVERYRANK_AUDIT"])
    if not _settings["keep_files"]:
        _load("overlay").install_overlay(_settings["folder"], _settings["main"])
    _load("imports").after_import("torch", _install)

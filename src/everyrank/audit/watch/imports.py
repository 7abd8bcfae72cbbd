"""Changes a module right after the script has imported it.

Imports only the standard library, because every Python process of an audited script loads it at its start.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["after_import"]


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds modules as the other finders do, and runs the actions after the code of a module has run."""

    def __init__(self) -> None:
        self.actions: dict[str, list[Callable[[Any], None]]] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        if name not in self.actions:
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next((s for finder in others if (s := finder.find_spec(name, path)) is not None), None)
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return spec
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            for action in self.actions.pop(name, []):
                action(module)

        loader.exec_module = exec_module
        return spec


_finder = _AfterImport()


def after_import(name: str, action: Callable[[Any], None]) -> None:
    """Call `action(module)` when the module of this name has been imported, or now if it already is."""
    if name in sys.modules and getattr(sys.modules[name], "__spec__", None) is not None:
        action(sys.modules[name])
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.actions.setdefault(name, []).append(action)

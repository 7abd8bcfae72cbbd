"""On PYTHONPATH of a script that is audited: puts the hooks in right after its first `import torch`.

In every Python process that it starts, too. Does nothing where the audit's variable is not set.
"""

# pyright: basic
import importlib.abc
import importlib.machinery
import os
import sys
from pathlib import Path

_HERE = str(Path(__file__).parent)


def _chain() -> None:
    """Run the `sitecustomize` that this one hides."""
    for folder in sys.path:
        path = Path(folder or ".") / "sitecustomize.py"
        if str(path.parent.absolute()) != _HERE and path.is_file():
            exec(compile(path.read_text(), str(path), "exec"), {"__name__": "sitecustomize", "__file__": str(path)})  # noqa: S102
            return


class _Finder(importlib.abc.MetaPathFinder):
    """Libraries ask with `find_spec` whether torch is there: what counts is that its code runs."""

    def find_spec(self, name, path=None, target=None):  # noqa: ARG002
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module) -> None:
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            run(module)
            from everyrank.audit.watch.install import install

            install()

        spec.loader.exec_module = exec_module
        return spec


_chain()
if os.environ.get("EVERYRANK_AUDIT"):
    sys.meta_path.insert(0, _Finder())

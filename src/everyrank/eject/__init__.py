"""A workload and a layout as a project in plain PyTorch, for somebody to own: no everyrank in it.

request.py     what is asked for, and what of it cannot be ejected
facts.py       what the workload's model and data are like: one batch goes through
imports.py     import statements, read and written as isort does
flatten.py     definitions of everyrank that a workload uses, as one file that needs no everyrank
sources.py     the user's own files, which import that file instead
parts/         pieces of train.py, each with its condition
compose.py     train.py, out of parts/: a line of a part stands there where its conditions hold
readme.py      README.md and how to start it
project.py     all files of a project, and writing them
"""

from everyrank.eject.project import write_project
from everyrank.eject.request import EJECTED_LAUNCHERS, EJECTED_STRATEGIES, EjectRequest

__all__ = ["EJECTED_LAUNCHERS", "EJECTED_STRATEGIES", "EjectRequest", "write_project"]

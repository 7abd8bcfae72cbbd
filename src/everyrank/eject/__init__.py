"""`everyrank eject`: exports a workload and a layout as a project in plain PyTorch, without everyrank.

request.py     EjectRequest, and the features that cannot be ejected
facts.py       inspects the model and data of the workload with one batch
imports.py     import statements, read and written as isort does
flatten.py     copies the definitions of everyrank that a workload uses into one file without everyrank
sources.py     the user's files, which import that file instead
parts/         templates of train.py, with a condition on some lines
compose.py     renders train.py from parts/, with the lines whose conditions hold
readme.py      README.md with the commands that start the project
project.py     writes all files of a project
"""

from everyrank.eject.project import write_project
from everyrank.eject.request import EJECTED_LAUNCHERS, EJECTED_STRATEGIES, EjectRequest, launcher_of

__all__ = ["EJECTED_LAUNCHERS", "EJECTED_STRATEGIES", "EjectRequest", "launcher_of", "write_project"]

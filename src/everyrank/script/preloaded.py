"""`run_script_rank` in a module that imports torch, so that a fork server imports torch once for all ranks."""

import torch as torch

from everyrank.script.rank import run_script_rank

__all__ = ["run_script_rank"]

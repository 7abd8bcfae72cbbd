"""Runs any training script under any launcher, and explains why it hangs.

    command.py      the script or module to run, and its arguments
    variables.py    the environment variables that torchrun would set for a rank
    rank.py         runs the script as one rank
    preloaded.py    rank.py for a fork server that imports torch first
    start.py        starts all ranks, passes signals on, and starts failed ranks again
    watching.py     writes the state of a rank for the autopsy, and prints the autopsy when the rank waits for too long

    function.py     calls a function of a test as one rank

Only preloaded.py and function.py import torch before the script does.
"""

from everyrank.script.command import UserScript, read_command
from everyrank.script.start import ScriptOptions, launch_script

__all__ = ["ScriptOptions", "UserScript", "launch_script", "read_command"]

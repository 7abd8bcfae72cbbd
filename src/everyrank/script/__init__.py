"""Run any training script: start its ranks under each launcher, explain it when it hangs.

    command.py      the script or module to run, and its arguments
    variables.py    the environment variables that torchrun would set for a rank
    rank.py         runs the script as one rank
    preloaded.py    the same, for a fork server that imports torch first
    start.py        starts all ranks, passes signals on, and starts failed ranks again
    watching.py     writes the state of a rank for the autopsy, and prints one when the rank waits for too long

    function.py     calls a function of a test as one rank

No file here imports torch before the script has done so, except preloaded.py and function.py.
"""

from everyrank.script.command import UserScript, read_command
from everyrank.script.start import ScriptOptions, launch_script
from everyrank.script.watching import watch

__all__ = ["ScriptOptions", "UserScript", "launch_script", "read_command", "watch"]

"""`import everyrank.watch` at the top of a script makes its ranks explain why they hang, under any launcher.

The same as `python -m everyrank watch train.py`. See `everyrank.script.watching`.
"""

from everyrank.script.watching import watch_process

__all__: list[str] = []

watch_process()

"""Records and imposes random numbers of Python and NumPy that the script draws for a batch, as the weight of mixup.

Ranks that draw different numbers for their batches cannot be put together: one rank has one number for all samples.
"""

# sys._getframe is private.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import functools
import random
import sys
import zlib
from typing import Any

import numpy as np

from everyrank.audit.watch.place import is_own_file
from everyrank.rerun.inside.session import Session

__all__ = ["install_number_draws"]

_PYTHON = ("random", "uniform", "randint", "randrange", "betavariate", "gauss", "normalvariate", "choice", "triangular")
_NUMPY = ("random", "rand", "uniform", "randint", "beta", "normal", "randn", "choice", "binomial", "permutation")
_INTEGERS = ("randint", "randrange", "choice", "permutation")
_MOST = 5000


def install_number_draws(session: Session) -> None:
    """Hook the functions of `random` and `numpy.random`, for the script's own code while it trains."""
    for owner, names in ((random, _PYTHON), (np.random, _NUMPY)):
        for name in names:
            setattr(owner, name, _watched(session, getattr(owner, name), name))


def _watched(session: Session, function: Any, name: str) -> Any:
    @functools.wraps(function)
    def drawn(*args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        frame = sys._getframe(1)
        if not session.is_active or session.in_source or not session.has_begun:
            return value
        if not is_own_file(frame.f_code.co_filename):
            return value
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        key = " ".join(map(str, session.key(f"number {name}", place)))
        recorded = session.facts.setdefault("numbers_drawn", {})
        if not session.imposed:
            if len(recorded) < _MOST:
                recorded[key] = _kept(value)
            return value
        parts = [each["facts"].get("numbers_drawn", {}).get(key) for each in session.imposed]
        if None in parts or session.settings["by_rows"]:
            return value
        chooses_rows = session.settings["reads"] and name in _INTEGERS  # the rows are put together
        if any(part != parts[0] for part in parts[1:]) and not chooses_rows:
            session.refuse(f"the ranks draw different random numbers for their batches at {place} ({name})")
        return parts[0] if type(value) is type(parts[0]) else value

    return drawn


def _kept(value: Any) -> Any:
    """A number as it is; the checksum of anything else, as text."""
    if type(value) in (int, float):
        return value
    content = value.tobytes() if isinstance(value, np.ndarray | np.generic) else repr(value).encode()
    return f"{zlib.crc32(content)}"

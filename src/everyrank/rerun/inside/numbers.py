"""Records and imposes random numbers of Python and NumPy that the script draws for a batch, such as mixup's weight.

If ranks draw different numbers for their batches, their draws cannot be merged, because one rank draws one number for
all samples.
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

from everyrank.audit.watch.source_location import is_user_file
from everyrank.rerun.inside.session import Session

__all__ = ["install_number_draws"]

_PYTHON = ("random", "uniform", "randint", "randrange", "betavariate", "gauss", "normalvariate", "choice", "triangular")
_NUMPY = ("random", "rand", "uniform", "randint", "beta", "normal", "randn", "choice", "binomial", "permutation")
_INTEGERS = ("randint", "randrange", "choice", "permutation")
_MAX_DRAWS = 5000


def install_number_draws(session: Session) -> None:
    """Hook the functions of `random` and `numpy.random` for the user's code while it trains."""
    for module, names in ((random, _PYTHON), (np.random, _NUMPY)):
        for name in names:
            setattr(module, name, _with_recording(session, getattr(module, name), name))


def _with_recording(session: Session, function: Any, name: str) -> Any:
    @functools.wraps(function)
    def draw_and_record(*args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        frame = sys._getframe(1)
        if not session.is_active or session.in_source or not session.has_started:
            return value
        if not is_user_file(frame.f_code.co_filename):
            return value
        location = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        key = " ".join(map(str, session.key(f"number {name}", location)))
        recorded = session.facts.setdefault("numbers_drawn", {})
        if not session.imposed:
            if len(recorded) < _MAX_DRAWS:
                recorded[key] = _comparable(value)
            return value
        rank_values = [each["facts"].get("numbers_drawn", {}).get(key) for each in session.imposed]
        if None in rank_values or session.settings["by_rows"]:
            return value
        chooses_rows = session.settings["reads"] and name in _INTEGERS  # their rows are merged
        if any(rank_value != rank_values[0] for rank_value in rank_values[1:]) and not chooses_rows:
            session.report_not_imposed(
                f"the ranks draw different random numbers for their batches at {location} ({name})"
            )
        return rank_values[0] if _is_number(value) and _is_number(rank_values[0]) else value

    return draw_and_record


def _is_number(value: Any) -> bool:
    """Whether a value is imposed. Of other values only a checksum is recorded."""
    return type(value) in (int, float)


def _comparable(value: Any) -> Any:
    """A number unchanged, or the checksum of any other value as text."""
    if _is_number(value):
        return value
    content = value.tobytes() if isinstance(value, np.ndarray | np.generic) else repr(value).encode()
    return f"{zlib.crc32(content)}"

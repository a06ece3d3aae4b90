"""How the functions of two tuples are called: told where somebody calls them otherwise."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

CALLED_AS = {
    "jvp": "Call jvp((q, k, v), (q_dot, k_dot, v_dot)).",
    "hvp": "Call hvp((q, k, v), (q_dot, k_dot, v_dot), dout).",
}


def told_how(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, whose TypeError for arguments too many or missing says how it is called."""
    name = function.__name__

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                raise  # of its body, not of the call
            raise TypeError(f"{name}: {str(error).removeprefix(f'{name}() ')}. {CALLED_AS[name]}") from None

    return call

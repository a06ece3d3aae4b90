"""The number of threads, and the instruction set, that the compiled kernels use."""

from __future__ import annotations

import os

from attngrad import _native
from attngrad.core.checks import check_integer, fail


def set_num_threads(n: int) -> None:
    """Let the kernels use up to ``n`` threads. Results do not depend on it, bit for bit.

    At start it is ``ATTNGRAD_NUM_THREADS``, else the number of processors that this process may run on.

    >>> before = get_num_threads()
    >>> set_num_threads(1)
    >>> get_num_threads()
    1
    >>> set_num_threads(before)
    """
    number = check_integer("set_num_threads", "n", n)
    if not 1 <= number <= 4096:
        fail(ValueError, "set_num_threads", "n", "be from 1 to 4096", number)
    _native.set_num_threads(number)


def get_num_threads() -> int:
    """How many threads the kernels may use.

    >>> get_num_threads() >= 1
    True
    """
    return _native.get_num_threads()


def check_variable() -> None:
    """``ATTNGRAD_NUM_THREADS`` is a number of threads, if it is set; called before it is used."""
    text = os.environ.get("ATTNGRAD_NUM_THREADS")
    if text and not (text.isascii() and text.isdigit() and 1 <= int(text) <= 4096):
        raise ImportError(f"attngrad: ATTNGRAD_NUM_THREADS must be an integer from 1 to 4096; got {text!r}.")


def choose_isa() -> None:
    """Take the instruction set that ``ATTNGRAD_ISA`` names, if it is set; called before it is used or named."""
    name = os.environ.get("ATTNGRAD_ISA")
    if name is None:
        return
    if name not in _native.isa_names():
        raise ImportError(
            f"attngrad: ATTNGRAD_ISA must be one of {', '.join(_native.isa_names())} on this machine; got {name!r}."
        )
    _native.set_isa(name)

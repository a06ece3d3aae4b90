"""Audits make thousands of small products. Beside other workers of pytest each of them runs on one thread: the threads
of OpenBLAS and OpenMP spin after a product, and those of one worker would hold up the other (measured: three times as
long on two cores)."""

import ctypes
import importlib
import os

import pytest
import torch

import attngrad

COUNTS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # of the processes that the command starts


def openblas(name):
    """A function of the OpenBLAS that NumPy computes with; None where it is another library."""
    library = ctypes.CDLL(importlib.import_module("numpy._core._multiarray_umath").__file__)
    names = [f"{before}openblas_{name}{after}" for before in ("scipy_", "") for after in ("64_", "")]
    return next((getattr(library, n) for n in names if hasattr(library, n)), None)


@pytest.fixture(scope="module", autouse=True)  # of a folder without __init__.py, a package is the session
def one_thread():
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    count, set_count = openblas("get_num_threads"), openblas("set_num_threads")
    before = torch.get_num_threads(), attngrad.get_num_threads(), count() if count is not None else 1
    with pytest.MonkeyPatch.context() as patch:
        for name in COUNTS:
            patch.setenv(name, "1")
        for threads in ((1, 1, 1), before):
            torch.set_num_threads(threads[0])
            attngrad.set_num_threads(threads[1])
            if set_count is not None:
                set_count(threads[2])
            if threads is not before:
                yield

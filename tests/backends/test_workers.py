"""Workers from elsewhere: OpenMP's for the kernels, the kernels' for OpenBLAS. Who runs a task changes no bit."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import attngrad
from attngrad import _native
from attngrad.backends.cpu import workers
from processes import script
from tests.robustness.load import jobs, same


@pytest.fixture
def openmp():
    """Every call borrows from libgomp while the test runs."""
    before, environment = workers._runtime, os.environ.get(workers.VARIABLE)
    if environment is not None:
        pytest.skip(f"{workers.VARIABLE} is set")
    workers.use_openmp(workers._loaded())
    assert workers._runtime is not None
    _native.force_workers("openmp")
    yield
    _native.force_workers("")
    ctypes.CDLL(workers._runtime.file).omp_set_num_threads(os.cpu_count())
    workers._runtime = before


def runs() -> dict[str, int]:
    return _native.worker_runs()


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_results_are_the_same_bit_for_bit_whoever_runs_the_tasks(openmp, threads, count):
    threads(count)
    ctypes.CDLL(workers._runtime.file).omp_set_num_threads(count)
    begun = runs()["openmp"]
    for job in jobs():
        _native.force_workers("own")
        own = job.run()
        before = runs()["own"]
        _native.force_workers("openmp")
        borrowed = job.run()
        assert same(own, borrowed), job.name
        assert runs()["own"] == before
    assert (runs()["openmp"] > begun) == (count > 1)


def test_borrowed_workers_are_used_and_own_ones_are_not(openmp, threads):
    threads(2)
    q = np.ones((4, 8, 256, 32), np.float32)
    before = runs()
    attngrad.attention(q, q, q)
    after = runs()
    assert after["openmp"] == before["openmp"] + 1
    assert after["own"] == before["own"]


def test_other_threads_than_the_main_one_have_the_pool(openmp, threads):
    import threading

    threads(2)
    q = np.ones((4, 8, 256, 32), np.float32)
    before = runs()
    thread = threading.Thread(target=lambda: attngrad.attention(q, q, q))
    thread.start()
    thread.join()
    after = runs()
    assert (after["openmp"], after["own"]) == (before["openmp"], before["own"] + 1)


def test_no_more_workers_are_asked_for_than_the_runtime_would_use(openmp, threads):
    threads(4096)  # libgomp ends the process where a thread cannot be made
    ctypes.CDLL(workers._runtime.file).omp_set_num_threads(1)
    q = np.ones((4, 8, 256, 32), np.float32)
    before = runs()
    attngrad.attention(q, q, q)
    assert runs()["alone"] == before["alone"] + 1


def test_within_a_parallel_region_a_call_runs_on_its_own_thread(openmp, threads):
    threads(2)
    q = np.ones((4, 8, 256, 32), np.float32)
    library = ctypes.CDLL("libgomp.so.1")
    seen: list[tuple[int, int]] = []
    region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

    @region
    def inside(_: object) -> None:
        if library.omp_get_thread_num() == 0:
            before = runs()
            attngrad.attention(q, q, q)
            seen.append((runs()["openmp"] - before["openmp"], runs()["own"] - before["own"]))

    library.GOMP_parallel(inside, None, 2, 0)
    assert seen == [(0, 0)]


OPENMP = {"ATTNGRAD_THREADS": "openmp"}


def test_a_child_of_a_process_that_borrowed_has_the_pool():
    code = """
        import os, signal, numpy as np, attngrad
        from attngrad import _native
        attngrad.set_num_threads(2)
        q = np.random.default_rng(0).standard_normal((4, 8, 256, 32)).astype(np.float32)
        expected = attngrad.attention(q, q, q)
        assert _native.worker_runs()["openmp"] == 1
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)  # a hang ends here
            same = np.array_equal(attngrad.attention(q, q, q), expected)
            runs = _native.worker_runs()
            os._exit(0 if same and runs["openmp"] == 1 and runs["own"] == 1 else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    assert script(code, **OPENMP) == "0"


def test_an_unknown_kind_of_workers_is_an_error_that_names_those_there_are():
    code = """
        import attngrad
        try:
            attngrad.attention
        except ImportError as error:
            print(error)
    """
    assert script(code, ATTNGRAD_THREADS="mine") == "attngrad: ATTNGRAD_THREADS must be one of own, openmp; got 'mine'."


def test_info_says_who_runs_the_tasks():
    code = "import sys; from attngrad.cli import main; sys.argv = ['attngrad', 'info']; main()"
    assert "workers      their own; in attngrad.torch OpenMP's" in script(code)
    assert "(ATTNGRAD_THREADS=own)" in script(code, ATTNGRAD_THREADS="own")
    assert "libgomp" in script(code, **OPENMP)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runtime with LLVM's entry alone, __kmpc_fork_call: a team of the caller and one thread."""
    if shutil.which("c++") is None:
        pytest.skip("no compiler")
    folder = tmp_path_factory.mktemp("kmpc")
    source = folder / "kmpc.cpp"
    source.write_text(
        """
        #include <thread>
        static thread_local bool inside = false;
        extern "C" int omp_in_parallel() { return inside; }
        extern "C" int omp_get_max_threads() { return 2; }
        extern "C" void __kmpc_fork_call(void* location, int count, void (*task)(int*, int*, void*), void* argument) {
            int zero = 0, one = 1;
            if (count != 1 || static_cast<int*>(location)[1] != 2) return;
            std::thread other([&] { inside = true; task(&one, &one, argument); });
            inside = true;
            task(&zero, &zero, argument);
            inside = false;
            other.join();
        }
        """
    )
    built = folder / "libkmpc.so"
    subprocess.run(["c++", "-shared", "-fPIC", "-pthread", "-o", str(built), str(source)], check=True)  # noqa: S603, S607
    return built


def test_a_runtime_with_the_interface_of_llvm_is_borrowed_from_too(library):
    code = f"""
        import ctypes, numpy as np, attngrad
        from attngrad import _native
        from attngrad.backends.cpu import workers
        attngrad.set_num_threads(2)
        q = np.random.default_rng(0).standard_normal((4, 8, 256, 32)).astype(np.float32)
        expected = attngrad.attention(q, q, q)
        workers.use_openmp([ctypes.CDLL({str(library)!r})])
        assert workers._runtime.parallel == 0 and workers._runtime.fork_call
        _native.force_workers("openmp")
        same = np.array_equal(attngrad.attention(q, q, q), expected)
        print(same, _native.worker_runs()["openmp"])
    """
    assert script(code) == "True 1"


# --- NumPy's OpenBLAS on the workers of the kernels -------------------------------------------------------------------


@pytest.fixture
def shared():
    attngrad.share_threads()
    yield
    attngrad.share_threads(False)


def test_products_of_matrices_are_right_on_shared_workers(shared):
    rng = np.random.default_rng(0)
    for n in (1, 7, 64, 300, 777):
        a, b = rng.integers(-8, 8, (2, n, n)).astype(np.float64)  # sums of products of these are exact
        together = a @ b
        assert np.array_equal(together, np.einsum("ij,jk->ik", a, b))


def test_products_from_many_threads_beside_attention_are_right(shared):
    from concurrent.futures import ThreadPoolExecutor

    rng = np.random.default_rng(0)
    a = rng.integers(-8, 8, (400, 400)).astype(np.float64)
    q = rng.standard_normal((2, 4, 200, 32))
    product, attended = a @ a, attngrad.attention(q, q, q)
    with ThreadPoolExecutor(4) as pool:
        products = [pool.submit(lambda: a @ a) for _ in range(12)]
        others = [pool.submit(attngrad.attention, q, q, q) for _ in range(12)]
        assert all(np.array_equal(p.result(), product) for p in products)
        assert all(np.array_equal(p.result(), attended) for p in others)


def test_sharing_from_the_environment_and_after_a_fork():
    code = """
        import os, signal, numpy as np, attngrad
        attngrad.attention
        a = np.arange(160000.0).reshape(400, 400) % 7
        expected = np.einsum("ij,jk->ik", a, a)
        right = np.array_equal(a @ a, expected)
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)  # a hang ends here
            os._exit(0 if np.array_equal(a @ a, expected) else 1)
        print(right, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    assert script(code, ATTNGRAD_SHARE_THREADS="1") == "True 0"


def test_a_blas_that_takes_no_workers_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda *_: object())
    with pytest.raises(RuntimeError, match=r"share_threads: NumPy must compute with OpenBLAS.*; got "):
        attngrad.share_threads()

"""Under load: many threads, forks in the middle, an interpreter that shuts down, more threads than processors.

``soak.py`` does the same for minutes, and watches the memory.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import attngrad
from load import Job, jobs, same
from processes import script


@pytest.fixture(scope="module")
def work() -> list[tuple[Job, list[Any]]]:
    """Every job, with its results when it runs alone on one thread."""
    before = attngrad.get_num_threads()
    attngrad.set_num_threads(1)
    found = [(job, job.run()) for job in jobs()]
    attngrad.set_num_threads(before)
    return found


# --- many threads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 16], ids=["as many as the machine has", "many more"])
def test_every_pass_at_once_gives_the_results_it_gives_alone(work, threads, count):
    """16 Python threads, each of whose calls may use ``count`` threads."""
    threads(count)
    with ThreadPoolExecutor(16) as pool:
        for _ in range(3):
            together = list(pool.map(lambda pair: pair[0].run(), work))
            wrong = [job.name for (job, alone), got in zip(work, together, strict=True) if not same(alone, got)]
            assert not wrong


def test_the_number_of_threads_may_change_while_others_compute(work, threads):
    stop = threading.Event()

    def change(numbers: list[int]) -> None:
        while not stop.is_set():
            for n in numbers:
                attngrad.set_num_threads(n)
                assert 1 <= attngrad.get_num_threads() <= 64

    changers = [threading.Thread(target=change, args=(numbers,)) for numbers in ([1, 2, 3], [64, 1], [7])]
    for changer in changers:
        changer.start()
    try:
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(lambda pair: pair[0].run(), work))
    finally:
        stop.set()
        for changer in changers:
            changer.join()
    assert [job.name for (job, alone), got in zip(work, together, strict=True) if not same(alone, got)] == []


def test_where_the_system_gives_no_more_threads_a_call_makes_do():
    code = """
        import resource, numpy as np, attngrad
        q = np.random.default_rng(0).standard_normal((8, 8, 200, 32))
        attngrad.set_num_threads(1)
        expected = attngrad.attention(q, q, q)
        attngrad.set_num_threads(4096)
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28), -1))  # room for some thirty stacks
        print(np.array_equal(attngrad.attention(q, q, q), expected))
    """
    assert script(code) == "True"


# --- forks ------------------------------------------------------------------------------------------------------------


def test_children_of_a_process_whose_threads_compute_are_right_and_end():
    code = """
        import os, signal, threading, numpy as np, attngrad
        attngrad.set_num_threads(3)
        q = np.random.default_rng(0).standard_normal((1, 8, 200, 32)).astype(np.float32)

        def results():
            out, pullback = attngrad.vjp(q, q, q, causal=True)
            return [out, *pullback(q)[:3]]

        expected = results()

        def compute():
            while True:
                results()

        for _ in range(3):
            threading.Thread(target=compute, daemon=True).start()
        bad = 0
        for _ in range(25):
            pid = os.fork()
            if pid == 0:
                signal.alarm(60)  # a hang ends here
                same = all(np.array_equal(a, b) for a, b in zip(results(), expected))
                os._exit(0 if same else 1)
            bad += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
        print(bad, flush=True)
    """
    assert script(code) == "0"


def test_a_signal_handler_may_fork_in_the_middle_of_a_call():
    """The parent's call goes on; the child's, whose workers are in the parent, says so, and the next one is right."""
    code = """
        import os, signal, numpy as np, attngrad
        attngrad.set_num_threads(2)
        q = np.ones((1, 16, 4000, 64), np.float32)
        children = []

        def fork(*_):
            children.append(os.fork())
            if children[-1] == 0:
                signal.alarm(60)  # a hang ends here

        signal.signal(signal.SIGUSR1, fork)
        import threading
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
        told = "finished"
        while not children:  # until a call is hit
            try:
                out = attngrad.attention(q, q, q)
            except RuntimeError as error:
                told = str(error)
        x = q[:, :, :300]
        right = bool(np.allclose(attngrad.attention(x, x, x), 1.0))
        if children[0] == 0:
            os._exit(0 if right and told != "finished" and "forked" in told else 1)
        print(told, right, os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]))
    """
    assert script(code) == "finished True 0"


# --- the end of the interpreter ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "count"), [(3000, 1), (100, 4), (5, 8)])
def test_the_interpreter_ends_while_daemon_threads_compute(tokens, count):
    code = f"""
        import threading, time, numpy as np, attngrad
        attngrad.set_num_threads(2)
        q = np.ones((1, 8, {tokens}, 32), np.float32)

        def compute():
            while True:
                out, pullback = attngrad.vjp(q, q, q)
                pullback(out)

        for _ in range({count}):
            threading.Thread(target=compute, daemon=True).start()
        time.sleep(0.3)
        print("the main thread ends")
    """
    assert script(code) == "the main thread ends"


SUB = """
    try:
        import _interpreters as interpreters
    except ImportError:
        import _xxsubinterpreters as interpreters
    inside = (
        "import warnings; warnings.simplefilter('ignore')",
        "try:",
        "    import numpy as np, attngrad",
        "    attngrad.attention(*[np.ones((2, 3, 4))] * 3)",
        "    print('computed', flush=True)",
        "except ImportError as error:",
        "    print(str(error).splitlines()[0], flush=True)",
    )
    other = interpreters.create()

    def there():
        interpreters.run_string(other, chr(10).join(inside))

    def here():
        import numpy as np, attngrad
        print(attngrad.attention(*[np.ones((2, 3, 4))] * 3).all(), flush=True)

"""


def test_a_sub_interpreter_refuses_the_import_and_leaves_the_main_one_alone():
    """Where the main one has NumPy, it is NumPy that refuses."""
    told = script(SUB + "    here(); there(); here()").splitlines()
    assert told == ["True", "cannot load module more than once per process", "True"]


def test_a_sub_interpreter_that_comes_first_is_refused_by_name():
    told = script(SUB + "    there()")
    assert told == "attngrad: cannot be imported in a sub-interpreter. Import it in the main interpreter."


# --- memory -----------------------------------------------------------------------------------------------------------


SMALL_CALLS = """
    import sys
    sys.path.append({folder!r})
    import numpy as np, attngrad, soak
    right, kept = attngrad.attention, []
    def leaks(*args, **options):
        kept.append(np.ones(2000))
        return right(*args, **options)
    attngrad.attention = {attention}
    print(soak.small_calls(10_000, warm=1000))
"""


@pytest.mark.parametrize(("attention", "flat"), [("right", True), ("leaks", False)])
def test_small_calls_leave_no_memory_behind_and_a_leak_is_seen(attention, flat):
    code = SMALL_CALLS.format(folder=str(Path(__file__).parent), attention=attention)
    assert script(code).endswith(str(flat))  # in a process of its own: others have memory free, which hides a leak

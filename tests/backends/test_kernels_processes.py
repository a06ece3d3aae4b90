"""The compiled kernels and their process: environment, forks, signals, memory."""

from __future__ import annotations

import numpy as np
import pytest

import attngrad
from attngrad import Gradients
from cases import Shape, make
from passes import all_passes
from processes import script


def test_the_environment_chooses_threads_and_instruction_set():
    code = "import attngrad, attngrad.backends.cpu, attngrad._native as n; print(attngrad.get_num_threads(), n.isa())"
    assert script(code, ATTNGRAD_NUM_THREADS="5", ATTNGRAD_ISA="baseline") == "5 baseline"


@pytest.mark.parametrize("text", ["abc", "0", "-1", "1.5", "5000"])
def test_a_number_of_threads_that_is_none_is_an_error(text):
    code = """
        import attngrad
        try:
            attngrad.get_num_threads
        except ImportError as error:
            print(error)
    """
    expected = f"attngrad: ATTNGRAD_NUM_THREADS must be an integer from 1 to 4096; got {text!r}."
    assert script(code, ATTNGRAD_NUM_THREADS=text) == expected


def test_an_unknown_instruction_set_is_an_error_that_names_those_there_are():
    code = """
        import attngrad
        try:
            attngrad.attention
        except ImportError as error:
            print(error)
    """
    assert "ATTNGRAD_ISA must be one of" in script(code, ATTNGRAD_ISA="mmx")


def test_affinity_is_respected():
    code = """
        import os
        os.sched_setaffinity(0, {next(iter(os.sched_getaffinity(0)))})
        import attngrad
        print(attngrad.get_num_threads())
    """
    assert script(code) == "1"


def test_a_forked_child_computes_the_same():
    code = """
        import os, numpy as np, attngrad
        attngrad.set_num_threads(2)
        q = np.random.default_rng(0).standard_normal((2, 4, 300, 32))
        expected = attngrad.attention(q, q, q)
        pid = os.fork()
        if pid == 0:
            same = np.array_equal(attngrad.attention(q, q, q), expected)
            os._exit(0 if same else 1)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), np.array_equal(attngrad.attention(q, q, q), expected))
    """
    assert script(code) == "0 True"


def test_ctrl_c_interrupts_long_calls():
    """Each call would take many seconds; the script's own time limit is what a hang would meet."""
    code = """
        import os, signal, threading, numpy as np, attngrad
        signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a shell ignore it
        q = np.zeros((1, 16, 30000, 64), np.float32)
        _, pullback = attngrad.vjp(q, q, q, window=(0, 0))
        calls = {
            "attention": lambda: attngrad.attention(q, q, q),
            "pullback": lambda: [pullback(q) for _ in range(10**6)],
            "jvp": lambda: attngrad.jvp((q, q, q), (q, None, None)),
            "hvp": lambda: [attngrad.hvp((q, q, q), (q, None, None), q, window=(0, 0)) for _ in range(10**6)],
        }
        for name, call in calls.items():
            threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            try:
                call()
                print("finished")
            except KeyboardInterrupt:
                print(name, "interrupted")
        print(attngrad.attention(q[:, :, :8], q[:, :, :8], q[:, :, :8]).any())
    """
    assert script(code) == "\n".join(
        [*(f"{name} interrupted" for name in ("attention", "pullback", "jvp", "hvp")), "False"]
    )


LONG = """
    import resource, numpy as np, attngrad
    n, d = 16384, 64
    rng = np.random.default_rng(0)
    q, k, v, dout, q_dot, k_dot, v_dot, dout_dot = (
        rng.standard_normal((1, 1, n, d), dtype=np.float32) for _ in range(8)
    )

    def pullback(n, **options):
        out, pullback = attngrad.vjp(q[:, :, :n], k[:, :, :n], v[:, :, :n], **options)
        return out, pullback(dout[:, :, :n])

    def hvp(n, **options):
        primals, tangents = ([x[:, :, :n] for x in xs] for xs in ((q, k, v), (q_dot, k_dot, v_dot)))
        return attngrad.hvp(tuple(primals), tuple(tangents), dout[:, :, :n], dout_dot[:, :, :n], **options)

    def growth(call):
        call(64)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        results = call(n, window=(100, 100))
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print((after - before) * 1024 / q.nbytes)

"""


@pytest.mark.parametrize(("call", "limit"), [("pullback", 12), ("hvp", 16)])
def test_a_long_sequence_takes_linear_memory(call, limit):
    """In multiples of the size of q, beyond the inputs."""
    assert float(script(LONG + f"    growth({call})")) < limit


def test_results_that_are_alive_are_never_reused():
    c = make(("causal",), Shape((2,), 4, 2, 150, 160, 32, 16))
    first = all_passes(c)
    copies = {name: x.copy() for name, x in first.items()}
    view = first["out"][0, 0]
    for seed in range(4):
        all_passes(make(("causal",), c.shape, seed))
    assert all(np.array_equal(first[name], copies[name]) for name in first)
    del first["out"]
    all_passes(make((), c.shape))
    assert np.array_equal(view, copies["out"][0, 0])  # a view keeps its memory


def test_out_may_be_overwritten_before_the_pullback():
    c = make(("causal",))
    out, pullback = attngrad.vjp(*c.qkv, **c.options)
    expected = pullback(c.dout)
    out[...] = 7.0
    again = pullback(c.dout)
    assert all(np.array_equal(getattr(again, name), getattr(expected, name)) for name in Gradients._fields[:3])

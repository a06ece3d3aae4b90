"""The bridge on PyTorch's own workers: the same bits, torch's number of threads, and what OpenMP does not survive."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import attngrad
import attngrad.torch
from attngrad import _native
from attngrad.backends.cpu import workers
from processes import script

Q = torch.randn(4, 8, 256, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def numbers_of_threads():
    if os.environ.get(workers.VARIABLE) is not None:
        pytest.skip(f"{workers.VARIABLE} is set")
    before = torch.get_num_threads(), attngrad.get_num_threads()
    torch.set_num_threads(2)
    attngrad.set_num_threads(2)
    yield
    torch.set_num_threads(before[0])
    attngrad.set_num_threads(before[1])


def used(call) -> dict[str, int]:
    """Who ran the tasks of a call."""
    before = _native.worker_runs()
    call()
    return {name: n - before[name] for name, n in _native.worker_runs().items()}


def passes() -> dict[str, object]:
    x = Q.clone().requires_grad_()
    mask = torch.ones(256, 256, dtype=torch.bool).tril()
    grad = lambda out: torch.autograd.grad(out.sum(), x, create_graph=True)[0]  # noqa: E731
    return {
        "forward": lambda: attngrad.torch.attention(Q, Q, Q),
        "forward with a mask": lambda: attngrad.torch.attention(Q, Q, Q, mask=mask),
        "backward": lambda: grad(attngrad.torch.attention(x, x, x)),
        "backward with a mask": lambda: grad(attngrad.torch.attention(x, x, x, mask=mask)),
        "double backward": lambda: grad(grad(attngrad.torch.attention(x, x, x)).square()),
        "forward mode": lambda: torch.func.jvp(lambda q: attngrad.torch.attention(q, q, q), (Q,), (Q,)),
    }


@pytest.mark.parametrize("name", list(passes()))
def test_every_pass_borrows_and_gives_the_same_bits_as_on_own_workers(name):
    run = passes()[name]
    found = used(run)
    assert found["openmp"] > 0
    assert found["own"] == 0
    borrowed = run()
    _native.force_workers("own")
    try:
        assert used(run)["openmp"] == 0
        own = run()
    finally:
        _native.force_workers("")
    pairs = zip(borrowed, own, strict=True) if isinstance(own, tuple) else [(borrowed, own)]
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_smaller_of_both_numbers_of_threads_counts():
    run = passes()["forward"]
    torch.set_num_threads(1)
    assert used(run) == {"alone": 1, "own": 0, "openmp": 0}
    torch.set_num_threads(2)
    attngrad.set_num_threads(1)
    assert used(run) == {"alone": 1, "own": 0, "openmp": 0}
    attngrad.set_num_threads(7)
    assert used(run)["openmp"] == 1


def test_the_functions_on_arrays_keep_to_their_own_workers():
    q = Q.numpy()
    assert used(passes()["forward"])["openmp"] == 1  # and the loan ends with the call
    assert used(lambda: attngrad.attention(q, q, q)) == {"alone": 0, "own": 1, "openmp": 0}


def test_an_error_in_a_call_leaves_nothing_borrowed():
    with pytest.raises(ValueError, match="k must have"):
        attngrad.torch.attention(Q, Q[:1], Q[:1])
    q = Q.numpy()
    assert used(lambda: attngrad.attention(q, q, q))["openmp"] == 0


def test_of_two_runtimes_the_one_of_pytorch_is_borrowed_from(tmp_path):
    """As scikit-learn does, a package has loaded a libgomp of its own before."""
    shipped = [*Path(torch.__file__).with_name("lib").glob("libgomp*")]
    if not shipped:
        pytest.skip("this PyTorch ships no libgomp")
    other = tmp_path / "libother.so.1"
    other.write_bytes(shipped[0].read_bytes().replace(b"libgomp.so.1\0", b"libother.so\0\0"))  # its name for the loader
    code = f"""
        import ctypes
        other = ctypes.CDLL({str(other)!r})
        other.omp_set_num_threads(5)
        import torch, attngrad.torch
        from attngrad.backends.cpu import workers
        torch.set_num_threads(3)  # which PyTorch tells its own runtime
        found = ctypes.CDLL(workers._runtime.file)
        print(other.omp_get_max_threads(), found.omp_get_max_threads(), workers._runtime.file != {str(other)!r})
    """
    assert script(code) == "5 3 True"


def test_a_data_loader_with_forked_workers_computes_the_same():
    code = """
        import torch, attngrad.torch
        from torch.utils.data import DataLoader
        q = torch.randn(8, 4, 128, 32, generator=torch.Generator().manual_seed(0))

        class Attended(torch.utils.data.Dataset):
            def __len__(self):
                return len(q)

            def __getitem__(self, i):
                return attngrad.torch.attention(q[i], q[i], q[i])

        torch.mm(torch.ones(500, 500), torch.ones(500, 500))
        expected = torch.stack([Attended()[i] for i in range(8)])
        loader = DataLoader(Attended(), batch_size=4, num_workers=2, multiprocessing_context="fork", timeout=60)
        print(torch.equal(torch.cat(list(loader)), expected))
    """
    assert script(code) == "True"


def test_ctrl_c_and_forks_within_a_borrowed_call():
    """As on workers of our own: the interrupt comes through; a child made within says so, and can compute."""
    code = """
        import os, signal, threading, torch, attngrad.torch
        from attngrad import _native
        signal.signal(signal.SIGINT, signal.default_int_handler)
        q = torch.ones(1, 16, 6000, 64)
        small = q[:, :, :300]
        torch.set_num_threads(2)
        while True:
            threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            try:
                for _ in range(50):
                    attngrad.torch.attention(q, q, q)
            except KeyboardInterrupt:
                break
        children, told = [], "finished"

        def fork(*_):
            children.append(os.fork())
            if children[-1] == 0:
                signal.alarm(60)  # a hang ends here

        signal.signal(signal.SIGUSR1, fork)
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
        while not children:
            try:
                attngrad.torch.attention(q, q, q)
            except RuntimeError as error:
                told = str(error)
        right = bool(torch.allclose(attngrad.torch.attention(small, small, small), torch.ones(())))
        if children[0] == 0:
            os._exit(0 if right and "forked" in told else 1)
        status = os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1])
        print(told, right, status, _native.worker_runs()["openmp"] > 0)
    """
    assert script(code) == "finished True 0 True"


def test_compiled_functions_borrow_too():
    compiled = torch.compile(lambda q: attngrad.torch.attention(q, q, q) * 2, backend="aot_eager")
    expected = attngrad.torch.attention(Q, Q, Q) * 2
    assert torch.equal(compiled(Q), expected)
    assert used(lambda: compiled(Q))["openmp"] == 1


def test_the_passes_of_a_ring_borrow_too():
    code = """
        import torch, attngrad, attngrad.distributed as ring
        from attngrad import _native
        torch.set_num_threads(2)
        attngrad.set_num_threads(2)
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        q = torch.randn(4, 8, 256, 32, requires_grad=True)
        out = ring.ring_attention(q, q, q)
        forward = _native.worker_runs()
        out.sum().backward()
        backward = _native.worker_runs()
        torch.func.jvp(lambda q: ring.ring_attention(q, q, q), (q.detach(),), (q.detach(),))
        tangent = _native.worker_runs()
        borrowed = [runs["openmp"] for runs in (forward, backward, tangent)]
        print(tangent["own"], 0 < borrowed[0] < borrowed[1] < borrowed[2])
    """
    assert script(code) == "0 True"

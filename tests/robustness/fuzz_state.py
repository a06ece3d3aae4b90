"""Random programs: threads and instruction sets change; a layer is called, updated, copied, saved and loaded.

Each program runs beside a model of what must be: a layer's parameters, what its last forward saw, what its grads have
summed. Results are those of a layer that does nothing else. A part of `make fuzz`; see fuzz.py. test_state.py runs a
few hundred steps.
"""

from __future__ import annotations

import copy
import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import attngrad
import instruction_sets
from attngrad import _native

WHAT = "programs of up to 40 steps, 5 a number"
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window": (1, 0), "softcap": 2.0},
    {"dropout": 0.3, "seed": 7},
    {"causal": True, "offset": 0},
]


class Layers(RuleBasedStateMachine):
    """One layer and what it should be."""

    @initialize(bias=st.booleans(), rope=st.sampled_from([None, 100.0]), kv=st.sampled_from([1, 2]))
    def make(self, bias: bool, rope: float | None, kv: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.layer = attngrad.MultiHeadAttention(8, 2, kv, bias=bias, rope=rope, dtype=np.float64)
        self.draws = np.random.default_rng(0)
        self.params = {name: p.copy() for name, p in self.layer.params.items()}
        self.grads = {name: np.zeros_like(p) for name, p in self.params.items()}
        self.seen: tuple[Any, ...] | None = None
        self.shape: tuple[int, ...] = ()
        self.saved: dict[str, Any] | None = None
        self.threads = attngrad.get_num_threads()
        self.isa = _native.isa()

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()

    # --- settings ----------------------------------------------------------------------------------------------------

    @rule(n=st.integers(-1, 9))
    def set_threads(self, n: int) -> None:
        try:
            attngrad.set_num_threads(n)
            assert n >= 1
            self.threads = n
        except ValueError:
            assert n < 1

    @rule(name=st.sampled_from([*instruction_sets.ALL, "mmx"]))
    def set_isa(self, name: str) -> None:
        try:
            _native.set_isa(name)
            self.isa = name
        except ValueError:
            assert name == "mmx"

    # --- the layer ---------------------------------------------------------------------------------------------------

    def alone(self, params: dict[str, Any]) -> attngrad.MultiHeadAttention:
        """A layer with these parameters and no past."""
        fresh = copy.copy(self.layer)
        fresh.params = {name: p.copy() for name, p in params.items()}
        fresh.grads = {name: np.zeros_like(p) for name, p in params.items()}
        return fresh

    @rule(t=st.integers(0, 5), s=st.none() | st.integers(0, 5), batch=st.booleans(), options=st.sampled_from(OPTIONS))
    def forward(self, t: int, s: int | None, batch: bool, options: dict[str, Any]) -> None:
        lead = (2,) if batch else ()
        inputs = [self.draws.standard_normal((*lead, n, 8)) for n in (t, s) if n is not None]
        y = self.layer(*inputs, **options)
        self.seen, self.shape = ({n: p.copy() for n, p in self.params.items()}, inputs, options), y.shape
        close(y, self.alone(self.params)(*inputs, **options))

    @rule()
    def a_bad_forward_leaves_nothing_to_go_back_through(self) -> None:
        try:
            self.layer(np.zeros((3, 7)))
            raise AssertionError("7 features went through")
        except ValueError:
            self.seen = None

    @rule(times=st.integers(1, 2))
    def backward(self, times: int) -> None:
        if self.seen is None:
            try:
                self.layer.backward(np.zeros((2, 8)))
                raise AssertionError("backward without a forward")
            except RuntimeError:
                return
        params, inputs, options = self.seen
        dy = self.draws.standard_normal(self.shape)
        fresh = self.alone(params)
        fresh(*inputs, **options)
        expected = fresh.backward(dy)
        for _ in range(times):
            got = self.layer.backward(dy)
            for a, b in zip(got, expected, strict=True) if isinstance(got, tuple) else [(got, expected)]:
                close(a, b)
            for name, g in fresh.grads.items():
                self.grads[name] = self.grads[name] + g

    @rule()
    def zero_grad(self) -> None:
        self.layer.zero_grad()
        self.grads = {name: np.zeros_like(p) for name, p in self.params.items()}

    @rule(step=st.floats(-0.5, 0.5))
    def update(self, step: float) -> None:
        for name, p in self.layer.params.items():
            change = step * self.draws.standard_normal(p.shape)
            p += change
            self.params[name] = self.params[name] + change

    # --- files and copies --------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        return Path(self.folder.name) / "layer.safetensors"

    @rule()
    def save(self) -> None:
        self.layer.save(self.path)
        self.saved = {name: p.copy() for name, p in self.params.items()}
        assert [p.name for p in Path(self.folder.name).iterdir()] == [self.path.name]

    @precondition(lambda self: getattr(self, "saved", None) is not None)
    @rule()
    def load(self) -> None:
        self.layer = attngrad.MultiHeadAttention.load(self.path)
        self.params = {name: p.copy() for name, p in (self.saved or {}).items()}
        self.grads, self.seen = {name: np.zeros_like(p) for name, p in self.params.items()}, None

    @rule(how=st.sampled_from(["pickle", "deepcopy"]))
    def replace_by_a_copy(self, how: str) -> None:
        self.layer = pickle.loads(pickle.dumps(self.layer)) if how == "pickle" else copy.deepcopy(self.layer)  # noqa: S301
        self.seen = None

    # --- what always holds -------------------------------------------------------------------------------------------

    @invariant()
    def nothing_else_has_changed(self) -> None:
        if not hasattr(self, "layer"):
            return
        assert attngrad.get_num_threads() == self.threads
        assert _native.isa() == self.isa
        assert all(np.array_equal(p, self.params[name]) for name, p in self.layer.params.items())
        for name, g in self.layer.grads.items():
            close(g, self.grads[name])


def close(a: Any, b: Any) -> None:
    """Equal but for the order of sums, which differs between instruction sets."""
    assert a.shape == b.shape
    assert np.abs(a - b).max(initial=0.0) <= 1e-9 * max(1.0, np.abs(b).max(initial=0.0))


def describe(number: int) -> str:
    """Hypothesis prints the program where it fails, made as short as it can."""
    return f"seed {number}"


def judge(number: int, *, shorten: bool = True) -> str:
    """Run five programs of this seed; one that fails is made as short as it can be."""
    phases = [phase for phase in Phase if shorten or phase not in (Phase.shrink, Phase.explain)]
    chosen = settings(
        max_examples=5,
        stateful_step_count=40,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=phases,
    )
    threads, isa = attngrad.get_num_threads(), _native.isa()
    try:
        run_state_machine_as_test(seed(number)(Layers), settings=chosen)
    finally:
        attngrad.set_num_threads(threads)
        _native.set_isa(isa)
    return "held"

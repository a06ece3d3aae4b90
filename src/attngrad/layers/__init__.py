"""The multi-head attention layer: projections around attention, with its backward, forward mode and second order.

::

    Q = rope(X_q W_q + b_q)    K = rope(X_k W_k + b_k)    V = X_v W_v + b_v        heads split
    O = attention(Q, K, V)                                                        heads merged
    Y = O W_o + b_o

A 16-bit layer stores parameters and activations in 16 bits and computes every product in float32, rounded once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self, Unpack

import numpy as np
import numpy.typing as npt

from attngrad.core.arrays import NDArray, kind_of
from attngrad.core.binding import require_numpy
from attngrad.core.checks import check_flag, check_like, fail, plain
from attngrad.core.dtypes import ACCUMULATE
from attngrad.core.files import FilePath
from attngrad.core.operands import Gradients
from attngrad.core.options import OptionArguments
from attngrad.functional import jvp, second_order, vjp
from attngrad.layers import checkpoint, checks, torch_state
from attngrad.layers.linear import affine, affine_hvp, affine_jvp, affine_vjp, merge, split
from attngrad.layers.rope import Rotation, rotation

if TYPE_CHECKING:
    from attngrad.explain.trace import Trace

__all__ = ["LayerGradients", "MultiHeadAttention"]


_NAME = "MultiHeadAttention"
_LETTERS = ("q", "k", "v")


class _Saved(NamedTuple):
    """What backward needs of the last forward."""

    inputs: dict[str, NDArray]
    source: dict[str, str]
    weights: dict[str, NDArray]
    turns: dict[str, Rotation]
    out: NDArray
    pullback: Callable[[NDArray], Gradients]


class _Moved(NamedTuple):
    """A forward pass up to the heads of q, k and v, and how they move."""

    x: dict[str, NDArray]
    w: dict[str, NDArray]
    x_dot: dict[str, NDArray]
    w_dot: dict[str, NDArray]
    source: dict[str, str]
    turns: dict[str, Rotation]
    heads: tuple[NDArray, NDArray, NDArray]
    heads_dot: tuple[NDArray | None, NDArray | None, NDArray | None]


class _Collected:
    """Gradients of inputs and parameters; an input that serves more than once gets the sum."""

    def __init__(self) -> None:
        self.inputs: dict[str, NDArray] = {}
        self.params: dict[str, NDArray] = {}

    def add(self, letter: str, found: tuple[NDArray, NDArray, NDArray], source: str = "out") -> NDArray:
        """Take dx, dw, db of one projection; dx."""
        dx, self.params[f"w_{letter}"], self.params[f"b_{letter}"] = found
        self.inputs[source] = self.inputs[source] + dx if source in self.inputs else dx
        return dx


class LayerGradients(NamedTuple):
    """Gradients of a layer: one an input given, the parameters by name, and those of the options bias and sinks.

    >>> layer = MultiHeadAttention(4, 2)
    >>> x = np.ones((3, 4), np.float32)
    >>> grads, grads_dot = layer.hvp((x,), (x,), x)
    >>> len(grads.inputs), sorted(grads_dot.params)
    (1, ['w_k', 'w_o', 'w_q', 'w_v'])
    """

    inputs: tuple[NDArray, ...]
    params: dict[str, NDArray]
    bias: NDArray | None
    sinks: NDArray | None


class MultiHeadAttention:
    """Multi-head attention, ``Y = attention(X_q W_q, X_k W_k, X_v W_v) W_o`` with biases, and its derivatives.

    Inputs are ``(..., T, d_model)`` for the query and ``(..., S, d_model)`` for key and value; the output is
    ``(..., T, d_model)``. The options mask and bias broadcast to ``(..., H, T, S)``: a padding mask of shape (B, S)
    is passed as ``mask[:, None, None, :]``.

    Args:
        d_model: features of the inputs and of the output.
        num_heads: H, the query heads.
        num_kv_heads: heads of keys and values, a divisor of H (grouped queries); None: H.
        d_head: features of a head; None: d_model / H.
        bias: whether b_q, b_k, b_v and b_o are added.
        rope: None, or the base of rotary positions (10000.0, say): keys stand at 0 to S - 1, query i at i + offset
            with the option ``offset``, S - T where that is not given.
        dtype: of parameters, inputs and output: float64, float32, float16 or bfloat16.
        rng: seed or Generator of the Xavier uniform weights, None for a seed that differs each time; biases start at
            zero.

    ``params`` and ``grads`` map w_q w_k w_v w_o, of shape (in, out), and b_q b_k b_v b_o to arrays, to be written in
    place. Backward adds to grads; those of 16-bit parameters are float32. ``attention_gradients`` are the gradients
    at the attention in the last backward: look there for those of the options bias and sinks. A layer can be pickled
    and copied; the copy has not seen the last forward.

    >>> layer = MultiHeadAttention(8, 2, num_kv_heads=1, rope=10000.0)
    >>> x = np.random.default_rng(0).standard_normal((3, 5, 8), dtype=np.float32)
    >>> y = layer(x, causal=True)
    >>> layer.backward(np.ones_like(y)).shape
    (3, 5, 8)
    >>> {name: g.shape for name, g in layer.grads.items()}
    {'w_q': (8, 8), 'w_k': (8, 4), 'w_v': (8, 4), 'w_o': (8, 8)}
    """

    params: dict[str, NDArray]
    grads: dict[str, NDArray]
    attention_gradients: Gradients | None

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        d_head: int | None = None,
        bias: bool = False,
        rope: float | None = None,
        dtype: npt.DTypeLike = np.float32,
        rng: int | np.random.Generator | None = 0,
    ) -> None:
        d_model = checks.positive(_NAME, "d_model", d_model)
        config = checks.check_config(_NAME, num_heads, num_kv_heads, rope)
        if d_head is None and d_model % config.num_heads:
            rule = f"be divisible by num_heads, {num_heads}, where d_head is not given"
            fail(ValueError, _NAME, "d_model", rule, d_model, "Pass d_head.")
        d_head = d_model // config.num_heads if d_head is None else checks.positive(_NAME, "d_head", d_head)
        bias = check_flag(_NAME, "bias", bias)
        kind, draw = checks.layer_dtype(_NAME, dtype), checks.generator(_NAME, rng)

        inner, kv_inner = config.num_heads * d_head, config.num_kv_heads * d_head
        shapes = {"q": (d_model, inner), "k": (d_model, kv_inner), "v": (d_model, kv_inner), "o": (inner, d_model)}
        params: dict[str, NDArray] = {}
        for letter, shape in shapes.items():
            if math.prod(shape) >= 2**60:  # a weight that no array can hold
                rule = "be sizes of a layer that fits into memory"
                fail(ValueError, _NAME, "d_model, num_heads and d_head", rule, f"w_{letter} of shape {shape}")
            limit = math.sqrt(6.0 / sum(shape))  # of the uniform distribution of variance 2 / (in + out)
            params[f"w_{letter}"] = draw.uniform(-limit, limit, shape).astype(kind)
        if bias:
            params |= {f"b_{letter}": np.zeros(shape[1], kind) for letter, shape in shapes.items()}
        self._adopt(_NAME, params, config)

    def _adopt(self, function: str, params: dict[str, NDArray], config: checks.Config) -> Self:
        """Take these arrays as the parameters, if they fit."""
        checks.check_fit(function, params, config)
        self._config = config
        self._dtype = params["w_q"].dtype
        self._wide = ACCUMULATE.get(self._dtype, self._dtype)
        self.params = params
        self.grads = {name: np.zeros(p.shape, self._wide) for name, p in params.items()}
        self.attention_gradients = None
        self._saved: _Saved | None = None
        return self

    @property
    def d_model(self) -> int:
        """Features of the query and of the output."""
        return int(self.params["w_q"].shape[0])

    @property
    def kdim(self) -> int:
        """Features of the key; d_model but in layers of ``from_torch``."""
        return int(self.params["w_k"].shape[0])

    @property
    def vdim(self) -> int:
        """Features of the value; d_model but in layers of ``from_torch``."""
        return int(self.params["w_v"].shape[0])

    @property
    def num_heads(self) -> int:
        """H, the query heads."""
        return self._config.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self._config.num_kv_heads

    @property
    def d_head(self) -> int:
        """Features of a head."""
        return int(self.params["w_q"].shape[1]) // self.num_heads

    @property
    def rope(self) -> float | None:
        """The base of the rotary positions; None without."""
        return self._config.rope

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of parameters, inputs and output."""
        return self._dtype

    def __repr__(self) -> str:
        apart = f", kdim={self.kdim}, vdim={self.vdim}" if {self.kdim, self.vdim} != {self.d_model} else ""
        return (
            f"{_NAME}(d_model={self.d_model}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"d_head={self.d_head}, bias={'b_q' in self.params}, rope={self.rope}, dtype={self.dtype}{apart})"
        )

    def __getstate__(self) -> dict[str, Any]:
        # the pullback is a closure, which neither pickles nor copies
        return {**self.__dict__, "_saved": None}

    # --- forward -----------------------------------------------------------------------------------------------------

    def __call__(
        self,
        query: NDArray,
        key: NDArray | None = None,
        value: NDArray | None = None,
        **options: Unpack[OptionArguments],
    ) -> NDArray:
        """The output ``(..., T, d_model)``; key defaults to query, value to key; options are those of ``attention``.

        Inputs and weights are copied for backward, so that both may be written to afterwards (``x += layer(x)``, or
        an update of the parameters). Arrays among the options are not: leave them alone until backward. Only the last
        call is kept.
        """
        self._saved = None
        call = self._check(_NAME, query, key, value, options)
        x = {name: a.astype(self._wide, order="C") for name, a in call.inputs.items()}
        w = {name: p.astype(self._wide) for name, p in self.params.items()}
        turns = self._turns(call)
        with np.errstate(all="ignore"):
            q, k, v = (self._heads(c, affine(x[call.source[c]], w[f"w_{c}"], w.get(f"b_{c}")), turns) for c in _LETTERS)
            heads, pullback = vjp(q, k, v, **options)
            out = merge(heads).astype(self._wide, copy=False)
            y = self._round(affine(out, w["w_o"], w.get("b_o")))
        self._saved = _Saved(x, call.source, w, turns, out, pullback)
        return y

    def _check(self, function: str, query: Any, key: Any, value: Any, options: Mapping[str, Any]) -> checks.Call:
        """Check everything that comes from outside, the parameters too."""
        checks.check_params(function, self.params, self.grads, self.dtype)
        return checks.check_call(function, self.params, self._config, query, key, value, options)

    def _turns(self, call: checks.Call) -> dict[str, Rotation]:
        """The rotations of q and k; none without rope."""
        if self.rope is None:
            return {}
        starts = {"q": call.offset, "k": 0}
        return {
            c: rotation(self.rope, self.d_head, call.inputs[call.source[c]].shape[-2], start, self._wide)
            for c, start in starts.items()
        }

    def _heads(self, letter: str, x: NDArray, turns: Mapping[str, Rotation]) -> NDArray:
        """``rope(split(x))``, rounded to the layer's dtype."""
        heads = split(x, self.d_head)
        return self._round(turns[letter].apply(heads) if letter in turns else heads)

    def _round(self, x: NDArray) -> NDArray:
        return x.astype(self.dtype, copy=False)

    # --- reverse mode ------------------------------------------------------------------------------------------------

    def backward(self, dy: NDArray) -> Any:
        """The gradient of <dy, Y> at each input that was given; those of the parameters are added to ``grads``.

        One array where only query was given; else a tuple, (dquery, dkey) or (dquery, dkey, dvalue). An input that
        served more than once gets the sum. The weights are those of the forward pass, never the updated ones. May be
        called more than once.

        ::

            dW_o = O^T dY        dO = dY W_o^T        dQ, dK, dV = pullback(dO)
            dW_q = X_q^T dQ      dX_q = dQ W_q^T      likewise k and v
        """
        function = f"{_NAME}.backward"
        if self._saved is None:
            raise RuntimeError(f"{function}: there is no forward pass to go back through. Call the layer first.")
        x, source, w, turns, out, pullback = self._saved
        require_numpy(function, dy=dy)
        dy = plain(dy)
        check_like(function, "dy", dy, (*out.shape[:-1], w["w_o"].shape[1]), self.dtype, "the output")
        checks.check_grads(function, w, self.grads)
        found = _Collected()
        with np.errstate(all="ignore"):
            # y = out w_o + b_o
            dout = found.add("o", affine_vjp(out, w["w_o"], dy.astype(self._wide, copy=False)))
            # out = merge(attention(q, k, v))
            gradients = pullback(self._round(split(dout, self.d_head)))
            for c, dheads in zip(_LETTERS, gradients[:3], strict=True):
                # q = rope(split(x w_q + b_q))
                dq = self._features(c, dheads, turns)
                found.add(c, affine_vjp(x[source[c]], w[f"w_{c}"], dq), source[c])
            for name, gradient in self.grads.items():
                gradient += found.params[name]
            given = tuple(self._round(found.inputs[name]) for name in x)
        self.attention_gradients = gradients
        return given[0] if len(given) == 1 else given

    def zero_grad(self) -> None:
        """Set ``grads`` to zero, in place."""
        for gradient in self.grads.values():
            gradient[...] = 0.0

    # --- forward mode ------------------------------------------------------------------------------------------------

    def jvp(
        self,
        inputs: tuple[NDArray, ...],
        inputs_dot: tuple[NDArray | None, ...],
        params_dot: Mapping[str, NDArray] | None = None,
        *,
        bias_dot: NDArray | None = None,
        sinks_dot: NDArray | None = None,
        **options: Unpack[OptionArguments],
    ) -> tuple[NDArray, NDArray]:
        """The output and its directional derivative, ``y, y_dot``; keeps nothing for backward.

        inputs are (query,), (query, key) or (query, key, value); inputs_dot as many, None being zero; params_dot maps
        names to tangents, a missing one being zero.

        ::

            Q_dot = rope(X_dot W_q + X W_q_dot + b_q_dot)        likewise K_dot and V_dot
            Y_dot = O_dot W_o + O W_o_dot + b_o_dot              O_dot: the JVP of attention
        """
        function = f"{_NAME}.jvp"
        m = self._move(function, inputs, inputs_dot, params_dot, options)
        with np.errstate(all="ignore"):
            heads, heads_dot = jvp(m.heads, m.heads_dot, bias_dot=bias_dot, sinks_dot=sinks_dot, **options)
            out, out_dot = (merge(h).astype(self._wide, copy=False) for h in (heads, heads_dot))
            y = affine(out, m.w["w_o"], m.w.get("b_o"))
            y_dot = affine_jvp(out, m.w["w_o"], out_dot, m.w_dot.get("w_o"), m.w_dot.get("b_o"))
            return self._round(y), self._round(np.asarray(y_dot))

    # --- second order ------------------------------------------------------------------------------------------------

    def hvp(
        self,
        inputs: tuple[NDArray, ...],
        inputs_dot: tuple[NDArray | None, ...],
        dy: NDArray,
        dy_dot: NDArray | None = None,
        params_dot: Mapping[str, NDArray] | None = None,
        *,
        bias_dot: NDArray | None = None,
        sinks_dot: NDArray | None = None,
        **options: Unpack[OptionArguments],
    ) -> tuple[LayerGradients, LayerGradients]:
        """The gradients of <dy, Y> and their directional derivative, ``grads, grads_dot``: second order.

        Inputs and tangents as for ``jvp``. With dy_dot = None, grads_dot is the Hessian of <dy, Y> over inputs and
        parameters, applied to the tangents. Keeps nothing for backward, and leaves ``self.grads`` alone.

        ::

            dO_dot   = dY_dot W_o^T + dY W_o_dot^T          dW_o_dot = O_dot^T dY + O^T dY_dot
            dX_q_dot = dQ_dot W_q^T + dQ W_q_dot^T          dW_q_dot = X_q_dot^T dQ + X_q^T dQ_dot, likewise k and v
        """
        function = f"{_NAME}.hvp"
        m = self._move(function, inputs, inputs_dot, params_dot, options)
        x, w, x_dot, w_dot, source = m.x, m.w, m.x_dot, m.w_dot, m.source
        for name, cotangent in (("dy", dy), ("dy_dot", dy_dot)):
            if cotangent is not None or name == "dy":
                require_numpy(function, **{name: cotangent})
                shape = (*x["query"].shape[:-1], w["w_o"].shape[1])
                check_like(function, name, plain(cotangent), shape, self.dtype, "the output")
        with np.errstate(all="ignore"):
            wide = plain(dy).astype(self._wide, copy=False)
            wide_dot = None if dy_dot is None else plain(dy_dot).astype(self._wide, copy=False)
            dout = affine(wide, w["w_o"].T)
            dout_dot = affine_jvp(wide, w["w_o"].T, wide_dot, w_dot["w_o"].T if "w_o" in w_dot else None)
            found = second_order(
                function,
                m.heads,
                m.heads_dot,
                self._round(split(dout, self.d_head)),
                None if dout_dot is None else self._round(split(dout_dot, self.d_head)),
                bias_dot=bias_dot,
                sinks_dot=sinks_dot,
                **options,
            )
            out, out_dot = merge(found.out), merge(found.out_dot)
            grads, grads_dot = _Collected(), _Collected()
            grads.add("o", affine_vjp(out, w["w_o"], wide))
            grads_dot.add("o", affine_hvp(out, w["w_o"], wide, out_dot, w_dot.get("w_o"), wide_dot))
            for c, dheads, dheads_dot in zip(_LETTERS, found.grads[:3], found.grads_dot[:3], strict=True):
                dq, dq_dot = (self._features(c, d, m.turns) for d in (dheads, dheads_dot))
                name, weight = source[c], f"w_{c}"
                grads.add(c, affine_vjp(x[name], w[weight], dq), name)
                moved = affine_hvp(x[name], w[weight], dq, x_dot.get(name), w_dot.get(weight), dq_dot)
                grads_dot.add(c, moved, name)
            return self._collect(grads, x, found.grads), self._collect(grads_dot, x, found.grads_dot)

    def _collect(self, found: _Collected, inputs: Iterable[str], attention: Gradients) -> LayerGradients:
        """What was found, rounded, for the inputs and parameters that there are."""
        params = {name: found.params[name] for name in self.params}
        given = tuple(self._round(found.inputs[name]) for name in inputs)
        return LayerGradients(given, params, attention.bias, attention.sinks)

    def _features(self, letter: str, dheads: NDArray, turns: Mapping[str, Rotation]) -> NDArray:
        """The transpose of ``_heads``: ``merge(rope^T(dheads))``, in the wide dtype."""
        wide = dheads.astype(self._wide, copy=False)
        return merge(turns[letter].invert(wide) if letter in turns else wide)

    def _move(
        self,
        function: str,
        inputs: tuple[NDArray, ...],
        inputs_dot: tuple[NDArray | None, ...],
        params_dot: Mapping[str, NDArray] | None,
        options: Mapping[str, Any],
    ) -> _Moved:
        """Check, widen, and project: the heads of q, k and v and how they move."""
        for name, given in (("inputs", inputs), ("inputs_dot", inputs_dot)):
            if not isinstance(given, (tuple, list)):
                fail(TypeError, function, name, "be a tuple, one entry an input", kind_of(given))
            if not 1 <= len(given) <= 3 or len(given) != len(inputs):
                rule = "have an entry for query, key (optional) and value (optional), inputs_dot as many as inputs"
                fail(ValueError, function, name, rule, f"{len(given)} entries")
        query, key, value = (*inputs, None, None)[:3]
        call = self._check(function, query, key, value, options)
        x_dot = self._widen(checks.check_input_tangents(function, call, inputs_dot))
        w_dot = self._widen(checks.check_param_tangents(function, self.params, params_dot))
        x, w, turns = self._widen(call.inputs), self._widen(self.params), self._turns(call)
        heads: list[NDArray] = []
        heads_dot: list[NDArray | None] = []
        with np.errstate(all="ignore"):
            for c in _LETTERS:
                name, weight, bias = call.source[c], f"w_{c}", f"b_{c}"
                heads.append(self._heads(c, affine(x[name], w[weight], w.get(bias)), turns))
                moved = affine_jvp(x[name], w[weight], x_dot.get(name), w_dot.get(weight), w_dot.get(bias))
                heads_dot.append(None if moved is None else self._heads(c, moved, turns))
        return _Moved(
            x,
            w,
            x_dot,
            w_dot,
            call.source,
            turns,
            (heads[0], heads[1], heads[2]),
            (heads_dot[0], heads_dot[1], heads_dot[2]),
        )

    def _widen(self, arrays: Mapping[str, NDArray]) -> dict[str, NDArray]:
        return {name: a.astype(self._wide, copy=False) for name, a in arrays.items()}

    def trace(
        self,
        query: NDArray,
        dy: NDArray | None = None,
        *,
        key: NDArray | None = None,
        value: NDArray | None = None,
        tokens: Sequence[str] | None = None,
        **options: Unpack[OptionArguments],
    ) -> Trace:
        """Every intermediate of a forward and, given dy, a backward pass: an ``attngrad.trace`` with the projections.

        Its names are those of ``attngrad.trace`` and X, W_q, ..., Y, dY, dW_o, dW_q, ..., dX; cross-attention adds X_k
        and X_v. Computed in float64; keeps nothing for backward, and adds nothing to grads.

        >>> layer = MultiHeadAttention(4, 2)
        >>> x = np.ones((3, 4), np.float32)
        >>> layer.trace(x, x)["dW_q"].formula
        'X^T dQ'
        """
        from attngrad.explain.layer import trace_layer
        from attngrad.explain.trace import check_tokens

        function = f"{_NAME}.trace"
        call = self._check(function, query, key, value, options)
        if dy is not None:
            require_numpy(function, dy=dy)
            check_like(function, "dy", dy, (*query.shape[:-1], self.params["w_o"].shape[1]), self.dtype, "the output")
        sizes = (query.shape[-2], call.inputs[call.source["k"]].shape[-2])
        return trace_layer(self, call, dy, options, check_tokens(function, tokens, *sizes))

    # --- files and PyTorch -------------------------------------------------------------------------------------------

    def save(self, path: FilePath) -> None:
        """Write parameters and configuration to a safetensors file, all or nothing."""
        checks.check_params(f"{_NAME}.save", self.params, self.grads, self.dtype)
        checkpoint.write(path, self.params, {"layer": _NAME, **self._config._asdict()})

    @classmethod
    def load(cls, path: FilePath) -> Self:
        """The layer that ``save`` wrote, bit for bit."""
        function = f"{_NAME}.load({os.fspath(path)!r})"
        tensors, config = checkpoint.read(function, path, _NAME)
        checks.check_names(function, tensors)
        params = {name: tensors[name] for name in checks.PARAMETERS if name in tensors}
        saved = checks.check_config(function, *(config.get(field) for field in checks.Config._fields))
        return cls.__new__(cls)._adopt(function, params, saved)

    @classmethod
    def from_torch(cls, state_dict: Mapping[str, Any], num_heads: int) -> Self:
        """The layer of a ``torch.nn.MultiheadAttention``, from its state dict (values: tensors or NumPy arrays)."""
        function = f"{_NAME}.from_torch"
        config = checks.check_config(function, num_heads, None, None)
        return cls.__new__(cls)._adopt(function, torch_state.to_params(function, state_dict), config)

    def to_torch(self) -> dict[str, Any]:
        """The state dict of the ``torch.nn.MultiheadAttention`` that computes the same; needs PyTorch."""
        function = f"{_NAME}.to_torch"
        checks.check_params(function, self.params, self.grads, self.dtype)
        if self.num_kv_heads != self.num_heads or self.rope is not None or self.num_heads * self.d_head != self.d_model:
            rule = "have num_kv_heads == num_heads, no rope, and num_heads * d_head == d_model, for torch has no others"
            fail(ValueError, function, "the layer", rule, repr(self))
        return torch_state.from_params(function, self.params)

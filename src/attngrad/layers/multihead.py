"""The layer ``MultiHeadAttention``: its parameters, its passes, its files."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, Unpack

import numpy as np
import numpy.typing as npt

from attngrad.core.arrays import ArrayLike, NDArray, kind_of
from attngrad.core.checks import check_flag, check_like, fail
from attngrad.core.conversion import read_like
from attngrad.core.dtypes import ACCUMULATE
from attngrad.core.files import FilePath
from attngrad.core.operands import Gradients
from attngrad.core.options import OptionArguments
from attngrad.functional import jvp, second_order, vjp
from attngrad.layers import checkpoint, checks, torch_state
from attngrad.layers.linear import affine, affine_hvp, affine_jvp, affine_vjp, split
from attngrad.layers.projections import LETTERS, Gathered, LayerGradients, Projections, Saved

if TYPE_CHECKING:
    from attngrad.explain.trace import Trace

_NAME = "MultiHeadAttention"


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
        self.params = params
        self.grads = {name: np.zeros(p.shape, ACCUMULATE.get(p.dtype, p.dtype)) for name, p in params.items()}
        self.attention_gradients = None
        self._saved: Saved | None = None
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
        query: ArrayLike,
        key: ArrayLike | None = None,
        value: ArrayLike | None = None,
        **options: Unpack[OptionArguments],
    ) -> NDArray:
        """The output ``(..., T, d_model)``; key defaults to query, value to key; options are those of ``attention``.

        Inputs and weights are copied for backward, so that both may be written to afterwards (``x += layer(x)``, or
        an update of the parameters). Arrays among the options are not: leave them alone until backward. Only the last
        call is kept.
        """
        self._saved = None
        p = Projections(self.params, self._config, self._check(_NAME, options, query, key, value), copy=True)
        with np.errstate(all="ignore"):
            heads, pullback = vjp(*p.heads(), **options)
            out = p.merged(heads)
            y = p.round(affine(out, p.w["w_o"], p.w.get("b_o")))
        self._saved = Saved(p, out, pullback)
        return y

    def _check(
        self, function: str, options: Mapping[str, Any], query: Any, key: Any = None, value: Any = None
    ) -> checks.Call:
        """Check everything that comes from outside, the parameters too."""
        checks.check_params(function, self.params, self.grads, self.dtype)
        return checks.check_call(function, self.params, self._config, query, key, value, options)

    def _check_cotangent(self, function: str, name: str, dy: Any, p: Projections) -> NDArray:
        """``dy`` in the wide dtype, if it is like the output."""
        shape = (*p.x["query"].shape[:-1], p.w["w_o"].shape[1])
        wide = read_like(function, name, dy, self.dtype)
        found: NDArray = check_like(function, name, wide, shape, self.dtype, "the output")
        return found.astype(p.wide, copy=False)

    # --- reverse mode ------------------------------------------------------------------------------------------------

    def backward(self, dy: ArrayLike) -> Any:
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
        p, out, pullback = self._saved
        wide = self._check_cotangent(function, "dy", dy, p)
        checks.check_grads(function, p.w, self.grads)
        found = Gathered()
        with np.errstate(all="ignore"):
            # y = out w_o + b_o
            dout = found.add("o", affine_vjp(out, p.w["w_o"], wide))
            # out = merge(attention(q, k, v))
            gradients = pullback(p.round(split(dout, p.d_head)))
            for c, dheads in zip(LETTERS, gradients[:3], strict=True):
                # q = rope(split(x w_q + b_q))
                name = p.source[c]
                found.add(c, affine_vjp(p.x[name], p.w[f"w_{c}"], p.from_heads(c, dheads)), name)
            for name, gradient in self.grads.items():
                gradient += found.params[name]
            given = found.result(p, self.grads, gradients).inputs
        self.attention_gradients = gradients
        return given[0] if len(given) == 1 else given

    def zero_grad(self) -> None:
        """Set ``grads`` to zero, in place."""
        for gradient in self.grads.values():
            gradient[...] = 0.0

    # --- forward mode ------------------------------------------------------------------------------------------------

    def jvp(
        self,
        inputs: tuple[ArrayLike, ...],
        inputs_dot: tuple[ArrayLike | None, ...],
        params_dot: Mapping[str, ArrayLike] | None = None,
        *,
        bias_dot: ArrayLike | None = None,
        sinks_dot: ArrayLike | None = None,
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
        p, x_dot, w_dot = self._move(function, inputs, inputs_dot, params_dot, options)
        with np.errstate(all="ignore"):
            heads = p.heads(), p.heads_dot(x_dot, w_dot)
            out, out_dot = map(p.merged, jvp(*heads, bias_dot=bias_dot, sinks_dot=sinks_dot, **options))
            y = affine(out, p.w["w_o"], p.w.get("b_o"))
            y_dot = affine_jvp(out, p.w["w_o"], out_dot, w_dot.get("w_o"), w_dot.get("b_o"))
            return p.round(y), p.round(np.asarray(y_dot))

    # --- second order ------------------------------------------------------------------------------------------------

    def hvp(
        self,
        inputs: tuple[ArrayLike, ...],
        inputs_dot: tuple[ArrayLike | None, ...],
        dy: ArrayLike,
        dy_dot: ArrayLike | None = None,
        params_dot: Mapping[str, ArrayLike] | None = None,
        *,
        bias_dot: ArrayLike | None = None,
        sinks_dot: ArrayLike | None = None,
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
        p, x_dot, w_dot = self._move(function, inputs, inputs_dot, params_dot, options)
        w_o, w_o_dot = p.w["w_o"], w_dot.get("w_o")
        wide = self._check_cotangent(function, "dy", dy, p)
        wide_dot = None if dy_dot is None else self._check_cotangent(function, "dy_dot", dy_dot, p)
        with np.errstate(all="ignore"):
            dout = affine(wide, w_o.T)
            dout_dot = affine_jvp(wide, w_o.T, wide_dot, None if w_o_dot is None else w_o_dot.T)
            heads = p.heads(), p.heads_dot(x_dot, w_dot)
            douts = [None if d is None else p.round(split(d, p.d_head)) for d in (dout, dout_dot)]
            found = second_order(function, *heads, *douts, bias_dot=bias_dot, sinks_dot=sinks_dot, **options)
            out, out_dot = p.merged(found.out), p.merged(found.out_dot)
            grads, grads_dot = Gathered(), Gathered()
            grads.add("o", affine_vjp(out, w_o, wide))
            grads_dot.add("o", affine_hvp(out, w_o, wide, out_dot, w_o_dot, wide_dot))
            for c, dheads, dheads_dot in zip(LETTERS, found.grads[:3], found.grads_dot[:3], strict=True):
                name, weight = p.source[c], f"w_{c}"
                x, w, dq, dq_dot = p.x[name], p.w[weight], p.from_heads(c, dheads), p.from_heads(c, dheads_dot)
                grads.add(c, affine_vjp(x, w, dq), name)
                grads_dot.add(c, affine_hvp(x, w, dq, x_dot.get(name), w_dot.get(weight), dq_dot), name)
            return grads.result(p, self.params, found.grads), grads_dot.result(p, self.params, found.grads_dot)

    def _move(
        self, function: str, inputs: Any, inputs_dot: Any, params_dot: Any, options: Mapping[str, Any]
    ) -> tuple[Projections, dict[str, NDArray], dict[str, NDArray]]:
        """The projections, and the tangents of inputs and parameters by name, without those that are zero."""
        for name, given in (("inputs", inputs), ("inputs_dot", inputs_dot)):
            if not isinstance(given, (tuple, list)):
                fail(
                    TypeError, function, name, "be a tuple, one entry per input", kind_of(given), "For one input: (x,)."
                )
            if not 1 <= len(given) <= 3 or len(given) != len(inputs):
                rule = "have an entry for query, key (optional) and value (optional), inputs_dot as many as inputs"
                fail(ValueError, function, name, rule, f"{len(given)} entries")
        call = self._check(function, options, *inputs)
        x_dot = checks.check_input_tangents(function, call, inputs_dot)
        w_dot = checks.check_param_tangents(function, self.params, params_dot)
        p = Projections(self.params, self._config, call)
        return p, p.widen(x_dot), p.widen(w_dot)

    def trace(
        self,
        query: ArrayLike,
        dy: ArrayLike | None = None,
        *,
        key: ArrayLike | None = None,
        value: ArrayLike | None = None,
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
        from attngrad.explain.places import check_tokens

        function = f"{_NAME}.trace"
        call = self._check(function, options, query, key, value)
        p = Projections(self.params, self._config, call, dtype=np.float64)
        if dy is not None:
            dy = self._check_cotangent(function, "dy", dy, p)
        labels = check_tokens(function, tokens, p.x["query"].shape[-2], p.x[p.source["k"]].shape[-2])
        return trace_layer(p, dy, options, labels)

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

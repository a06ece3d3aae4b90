"""The layer, its optimisers and the small functions: ``do()`` is the whole call, but for rows on a layer: ``do(layer)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import attngrad
from attngrad import MultiHeadAttention, optim
from bad_inputs.arrays import Raising
from bad_inputs.row import Errors, Row

X = np.ones((2, 3, 8), np.float32)


def make(name: str, error: Errors, words: str, /, *sizes: Any, **config: Any) -> Row:
    return Row(f"layer of {name}", lambda: MultiHeadAttention(*sizes, **config), error, "^MultiHeadAttention: " + words)


WHOLE = "must be an integer; got "
CONSTRUCTOR = [
    make("d_model 8.0", TypeError, rf"d_model {WHOLE}8\.0", 8.0, 2),
    make("d_model '8'", TypeError, f"d_model {WHOLE}'8'", "8", 2),
    make("d_model True", TypeError, f"d_model {WHOLE}True", True, 1),
    make("d_model -8", ValueError, "d_model must be positive; got -8", -8, 2),
    make("d_model 0", ValueError, "d_model must be positive; got 0", 0, 2),
    make("d_model 10 by 3 heads", ValueError, "d_model must be divisible by num_heads, 3.*Pass d_head", 10, 3),
    make("d_model 2**40", ValueError, "d_model, .* must be sizes of a layer that fits into memory", 2**40, 1),
    make("d_model 2**70", ValueError, "d_model, .* must be sizes of a layer that fits into memory", 2**70, 1),
    make("d_head 2**70", ValueError, "d_model, .* must be sizes of a layer that fits into memory", 8, 2, d_head=2**70),
    make("no heads", ValueError, "num_heads must be positive; got 0", 8, 0),
    make("num_heads None", TypeError, f"num_heads {WHOLE}None", 8, None),
    make("num_kv_heads that do not divide", ValueError, "num_kv_heads must divide num_heads, 4; got 3", 8, 4, 3),
    make("num_kv_heads 0", ValueError, "num_kv_heads must be positive", 8, 4, 0),
    make("d_head 0", ValueError, "d_head must be positive", 8, 4, d_head=0),
    make("odd d_head with rope", ValueError, "d_head must be even where rope is given", 9, 3, rope=1e4),
    make("bias 1", TypeError, "bias must be True or False", 8, 2, bias=1),
    make("rope 0", ValueError, "rope must be a positive base", 8, 2, rope=0),
    make("rope nan", ValueError, "rope must be finite", 8, 2, rope=float("nan")),
    make("rope True", TypeError, "rope must be a real number", 8, 2, rope=True),
    make("dtype int", TypeError, "dtype must be float64, .*; got int64", 8, 2, dtype=int),
    make("dtype complex", TypeError, "dtype must be float64", 8, 2, dtype=complex),
    make("dtype big-endian", TypeError, "dtype must be float64, .*; got >f4", 8, 2, dtype=">f4"),
    make("dtype that is none", TypeError, "dtype must be float64, .*; got 'flot'", 8, 2, dtype="flot"),
    make("rng text", TypeError, "rng must be an integer; got 'a'", 8, 2, rng="a"),
    make("rng -1", ValueError, "rng must be a seed >= 0", 8, 2, rng=-1),
]


def on(name: str, error: Errors, words: str, do: Callable[[MultiHeadAttention], Any]) -> Row:
    return Row(f"layer: {name}", do, error, words)


def spoiled(kind: str, name: str, x: Any) -> Callable[[MultiHeadAttention], Any]:
    """Backward after a forward pass, with one array of params or grads replaced in between, or before."""

    def do(layer: MultiHeadAttention) -> Any:
        if kind == "params":
            layer.params[name] = x
            return layer(X)
        layer(X)
        layer.grads[name] = x
        return layer.backward(X)

    return do


def without(layer: MultiHeadAttention) -> Any:
    del layer.params["w_k"]
    return layer(X)


FROZEN = np.zeros((8, 8), np.float32)
FROZEN.flags.writeable = False
NOT_LIKE = r"must have the shape of params\['w_o'\], \(8, 8\)"
STATE = [
    on("backward before forward", RuntimeError, "there is no forward pass.*Call the layer first", lambda m: m.backward(X)),
    on("query of one axis", ValueError, "query must have at least 2 axes", lambda m: m(X[0, 0])),
    on("query of other features", ValueError, r"query must have 8 features \(axis -1\), like w_q", lambda m: m(X[..., :7])),
    on("key of another batch", ValueError, "key must have the leading axes of query", lambda m: m(X, X[:1])),
    on("value of other tokens", ValueError, r"value must have 3 tokens \(axis -2\), like key", lambda m: m(X, X, X[:, :2])),
    on("query of another dtype", TypeError, "query must have the dtype of the parameters, float32", lambda m: m(X.astype(float))),
    on("return_lse", ValueError, "return_lse must be False", lambda m: m(X, return_lse=True)),
    on("dy of another shape", ValueError, "dy must have the shape of the output", lambda m: (m(X), m.backward(X[:1]))),
    on("dy of another dtype", TypeError, "dy must have dtype float32", lambda m: (m(X), m.backward(X.astype(float)))),
    on("dy None", TypeError, r"dy must be a numpy\.ndarray; got None", lambda m: (m(X), m.backward(None))),
    on("hvp of a bare array", TypeError, "inputs must be a tuple", lambda m: m.hvp(X, (X,), X)),
    on("hvp with too few tangents", ValueError, "inputs_dot must have an entry", lambda m: m.hvp((X, X), (X,), X)),
    on("hvp without inputs", ValueError, "inputs must have an entry", lambda m: m.hvp((), (), X)),
    on("jvp of no parameter", ValueError, "params_dot must name parameters; got 'w'.*Did you mean", lambda m: m.jvp((X,), (X,), {"w": X})),
    on("jvp along a list", TypeError, "params_dot must be a mapping", lambda m: m.jvp((X,), (X,), [X])),
    on("params: one missing", ValueError, "params must have the names of grads", without),
    on("params: a list", TypeError, r"params\['w_q'\] must be an array; got list", spoiled("params", "w_q", [[1.0]])),
    on("params: another shape", ValueError, r"params\['w_q'\] must have the shape of the layer", spoiled("params", "w_q", X)),
    on("params: another dtype", TypeError, r"params\['w_q'\] must have dtype float32", spoiled("params", "w_q", np.zeros((8, 8)))),
    on("grads: read-only", ValueError, r"grads\['w_o'\] must be writable; got a read-only array", spoiled("grads", "w_o", FROZEN)),
    on("grads: another shape", ValueError, rf"grads\['w_o'\] {NOT_LIKE}", spoiled("grads", "w_o", X)),
    on("grads: None", TypeError, r"grads\['w_o'\] must be an array; got None", spoiled("grads", "w_o", None)),
    on("state dict: no mapping", TypeError, "state_dict must be a mapping", lambda m: m.from_torch([1], 2)),
    on("state dict: empty", ValueError, "state_dict must have the keys", lambda m: m.from_torch({}, 2)),
    on("state dict: a prefix", ValueError, "state_dict must be of one torch.nn.MultiheadAttention", lambda m: m.from_torch({"a.w": X}, 2)),
    on("state dict: lists", TypeError, "must be a torch.Tensor or a numpy.ndarray; got list", lambda m: m.from_torch({"in_proj_weight": [1], "out_proj.weight": [1]}, 2)),
    on("state dict: shapes that do not fit", ValueError, "in_proj_weight must have 2 axes and 24 rows", lambda m: m.from_torch({"in_proj_weight": X[0], "out_proj.weight": np.zeros((8, 8), np.float32)}, 2)),
    on("state dict: integers", TypeError, "the parameters must be float64", lambda m: m.from_torch({"in_proj_weight": torch.zeros(24, 8, dtype=torch.int64), "out_proj.weight": torch.zeros(8, 8, dtype=torch.int64)}, 2)),
    on("trace with bad tokens", TypeError, "tokens must be a list of 3 strings", lambda m: m.trace(X, tokens="a b c")),
]  # fmt: skip


def call(name: str, error: Errors, words: str, f: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Row:
    return Row(name, lambda: f(*arguments, **keywords), error, words)


def candidate(q: Any, k: Any, v: Any, dout: Any) -> Any:
    raise AssertionError("not to be called")


W = {"w": np.ones(3)}
lengths, drop, jacobian = attngrad.segments_from_lengths, attngrad.dropout_mask, attngrad.softmax_jacobian
audit, formula, threads = attngrad.audit, attngrad.audit_formula, attngrad.set_num_threads
NAN = float("nan")
SMALL = [
    call("lengths: None", TypeError, "segments_from_lengths: lengths must be integers; got None", lengths, None),
    call("lengths: text", TypeError, "lengths must be integers; got '12'", lengths, "12"),
    call("lengths: floats", TypeError, "lengths must be integers", lengths, [1.5]),
    call("lengths: booleans", TypeError, "lengths must be integers; got dtype bool", lengths, [True]),
    call("lengths: ragged", ValueError, "lengths must be one flat list", lengths, [[1], [2, 3]]),
    call("lengths: two axes", ValueError, "lengths must have 1 axis", lengths, [[1, 2]]),
    call("lengths: negative", ValueError, "lengths must be >= 0; got -1", lengths, [2, -1]),
    call("lengths: masked", TypeError, "lengths must be integers; got MaskedArray", lengths, np.ma.masked_array([3, 2])),
    call("lengths: 2**62", ValueError, r"lengths must add up to fewer than 2\*\*31 tokens", lengths, [2**62]),
    call("lengths: a sum beyond 64 bits", ValueError, r"lengths must add up to .*; got 18446744073709551616", lengths, [2**63 - 1, 2**63 - 1, 2]),
    call("lengths: a sum that wraps to a small number", ValueError, "lengths must add up to", lengths, [2**62] * 4 + [3]),
    call("lengths: beyond 64 bits", TypeError, "lengths must be integers; got dtype object", lengths, [2**64]),
    call("lengths: an __array__ that raises", RuntimeError, "it is not to be asked", lengths, Raising(X)),
    call("dropout_mask: rate 1", ValueError, r"dropout_mask: rate must be in \[0, 1\)", drop, (2, 3), 1, 0),
    call("dropout_mask: rate nan", ValueError, "rate must be finite", drop, (2, 3), NAN, 0),
    call("dropout_mask: seed None", (TypeError, ValueError), "seed must be", drop, (2, 3), 0.5, None),
    call("dropout_mask: one axis", ValueError, "shape must be .*heads, queries, keys", drop, (3,), 0.5, 0),
    call("dropout_mask: a number", TypeError, "shape must be a sequence of integers", drop, 3, 0.5, 0),
    call("dropout_mask: text", TypeError, "shape must be a sequence of integers", drop, "ab", 0.5, 0),
    call("dropout_mask: negative", ValueError, "no axis negative", drop, (2, -3), 0.5, 0),
    call("dropout_mask: floats", TypeError, "shape must be a sequence of integers", drop, (2.0, 3), 0.5, 0),
    call("dropout_mask: 2**80 entries", ValueError, "shape must be one that an array can have", drop, (2**40, 2**40), 0.5, 0),
    call("dropout_mask: 2**80 entries but none", ValueError, "shape must be one that an array can have", drop, (0, 2**40, 2**40), 0.5, 0),
    call("dropout_mask: an axis beyond 64 bits", ValueError, "shape must be one that an array can have", drop, (2**100, 1), 0.5, 0),
    call("dropout_mask: 70 axes", ValueError, "shape must be one that an array can have", drop, (1,) * 70, 0.5, 0),
    call("dropout_mask: more than memory", MemoryError, "Unable to allocate", drop, (2**50, 1), 0.5, 0),
    call("softmax_jacobian: booleans", TypeError, "scores must have dtype", jacobian, np.ones(3, bool)),
    call("softmax_jacobian: a ragged list", ValueError, "softmax_jacobian: scores must be a rectangular array", jacobian, [[1.0], []]),
    call("softmax_jacobian: a number", ValueError, "scores must have at least 1 axis", jacobian, np.ones(())),
    call("softmax_jacobian: masked", TypeError, r"scores must be a plain numpy\.ndarray", jacobian, np.ma.ones(3)),
    call("reference.softmax_jacobian: integers", TypeError, "scores must have a real or complex floating dtype", attngrad.reference.softmax_jacobian, np.ones(3, int)),
    call("threads: 0", ValueError, "set_num_threads: n must be from 1 to 4096", threads, 0),
    call("threads: 2**40", ValueError, "n must be from 1 to 4096", threads, 2**40),
    call("threads: 1.0", TypeError, "n must be an integer", threads, 1.0),
    call("threads: None", TypeError, "n must be an integer", threads, None),
    call("jacobian: wrt another name", ValueError, "wrt must be one of q, k, v, bias, sinks", attngrad.jacobian, X, X, X, wrt="w"),
    call("jacobian: wrt no name", TypeError, "wrt must be a string", attngrad.jacobian, X, X, X, wrt=1),
    call("jacobian: wrt what was not given", ValueError, "bias was not given. Pass bias=", attngrad.jacobian, X, X, X, wrt="bias"),
    call("pullback: wrt another name", ValueError, "pullback: wrt must be one of q, k, v, bias, sinks", attngrad.vjp(X, X, X)[1], X, wrt=("q", "w")),
    call("pullback: wrt no name", TypeError, "wrt must be a string", attngrad.vjp(X, X, X)[1], X, wrt=(1,)),
    call("pullback: wrt nothing", TypeError, r"wrt must be a name, or several in a tuple; got \(\)\. None means all", attngrad.vjp(X, X, X)[1], X, wrt=()),
    call("pullback: wrt an array", TypeError, "wrt must be a name, or several", attngrad.vjp(X, X, X)[1], X, wrt=np.array(["q", "k"])),
    call("pullback: wrt a number", TypeError, "wrt must be a name, or several", attngrad.vjp(X, X, X)[1], X, wrt=1),
    call("pullback: wrt what was not given", ValueError, "bias was not given. Pass bias=", attngrad.vjp(X, X, X)[1], X, wrt="bias"),
    call("jvp: primals no tuple", TypeError, r"primals must be a tuple \(q, k, v\)", attngrad.jvp, X, (X, X, X)),
    call("jvp: two primals", ValueError, r"primals must be a tuple .*got 2 values", attngrad.jvp, (X, X), (X, X, X)),
    call("jvp: two tangents", ValueError, r"tangents must be .*got 2 values", attngrad.jvp, (X, X, X), (X, X)),
    call("hvp: return_lse", ValueError, "return_lse must be False", attngrad.hvp, (X, X, X), (X, X, X), X, return_lse=True),
    call("hvp: no cotangent", TypeError, "dout must be an array where dlse is not given", attngrad.hvp, (X, X, X), (X, X, X), None),
    call("trace: labels too few", ValueError, "tokens must have 3 labels of queries", attngrad.trace, X, X, X, tokens=["a"]),
    call("trace: labels that are numbers", TypeError, "tokens must be a list of 3 strings", attngrad.trace, X, X, X, tokens=[1, 2, 3]),
    call("trace from JSON: None", ValueError, "Trace.from_json: text must be a trace", attngrad.Trace.from_json, None),
    call("trace from JSON: no JSON", ValueError, "text must be a trace", attngrad.Trace.from_json, "{"),
    call("trace from JSON: a list", ValueError, "text must be a trace", attngrad.Trace.from_json, "[]"),
    call("trace from JSON: another format", ValueError, "text must be a trace", attngrad.Trace.from_json, '{"format": "x", "version": 1}'),
    call("trace from JSON: nested without end", ValueError, "text must be a trace", attngrad.Trace.from_json, "[" * 100_000),
    call("trace from JSON: a number of 5000 digits", ValueError, "text must be a trace", attngrad.Trace.from_json, "1" * 5000),
    call("audit: no function", TypeError, "audit: candidate must be callable", audit, 3),
    call("audit: another level", ValueError, "level must be 'attention' or 'layer'", audit, candidate, level="x"),
    call("audit: another effort", ValueError, "effort must be one of", audit, candidate, effort="much"),
    call("audit: dtype int", ValueError, "dtype must be float64", audit, candidate, dtype=int),
    call("audit: dtype that is none", TypeError, "dtype must be a dtype", audit, candidate, dtype="flot"),
    call("audit: seed -1", ValueError, "seed must be an integer >= 0", audit, candidate, seed=-1),
    call("audit: unknown option", ValueError, "options must have only the names", audit, candidate, options={"x": 1}),
    call("audit: options no mapping", TypeError, "options must be a mapping or None", audit, candidate, options=[1]),
    call("audit: unknown feature", ValueError, "supports must have only", audit, candidate, supports=["x"]),
    call("audit: supports a number", TypeError, "supports must be", audit, candidate, supports=3),
    call("audit: time limit text", TypeError, "time_limit must be a real number", audit, candidate, time_limit="1"),
    call("audit: time limit 0", ValueError, "time_limit must be positive", audit, candidate, time_limit=0),
    call("audit: time limit nan", ValueError, "time_limit must be finite", audit, candidate, time_limit=NAN),
    call("formula: None", TypeError, "audit_formula: text must be a str", formula, None),
    call("formula: scale 0", ValueError, "scale must be finite and positive", formula, "dQ = dS K", scale=0.0),
    call("formula: seed -1", ValueError, "seed must be at least 0", formula, "dQ = dS K", seed=-1),
    call("SGD: no mapping", TypeError, "SGD: params must be a mapping", optim.SGD, [1], lr=0.1),
    call("SGD: lists", TypeError, r"params\['w'\] must be a numpy\.ndarray", optim.SGD, {"w": [1.0]}, lr=0.1),
    call("SGD: integers", TypeError, r"params\['w'\] must have dtype", optim.SGD, {"w": np.ones(3, int)}, lr=0.1),
    call("SGD: read-only", ValueError, r"params\['w_o'\] must be writable", optim.SGD, {"w_o": FROZEN}, lr=0.1),
    call("SGD: lr negative", ValueError, "lr must be >= 0", optim.SGD, W, lr=-1),
    call("SGD: lr nan", ValueError, "lr must be finite", optim.SGD, W, lr=NAN),
    call("Adam: betas of 1", ValueError, r"betas must be in \[0, 1\)", optim.Adam, W, betas=(0.9, 1.0)),
    call("Adam: one beta", TypeError, "betas must be a pair", optim.Adam, W, betas=0.9),
    call("Adam: eps negative", ValueError, "eps must be >= 0", optim.Adam, W, eps=-1),
    call("step: gradients missing", ValueError, "SGD.step: grads must have the names of params", optim.SGD(W, 0.1).step, {}),
    call("step: gradients of another shape", ValueError, r"grads\['w'\] must have the shape", optim.SGD(W, 0.1).step, {"w": np.ones(2)}),
    call("step: gradients of another dtype", TypeError, r"grads\['w'\] must have the dtype", optim.SGD(W, 0.1).step, {"w": FROZEN}),
    call("clip: max_norm 0", ValueError, "max_norm must be positive", optim.clip_by_global_norm, W, 0.0),
    call("clip: max_norm nan", ValueError, "max_norm must be finite", optim.clip_by_global_norm, W, NAN),
    call("clip: read-only", ValueError, "must be writable", optim.clip_by_global_norm, {"w": FROZEN}, 1.0),
    call("LossScaler: scale 0", ValueError, "scale must be in", optim.LossScaler, 0.0),
    call("LossScaler: no optimiser", TypeError, "optimizer must be an optimiser", optim.LossScaler().step, 3, W),
]  # fmt: skip

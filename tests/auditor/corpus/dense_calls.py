"""What each candidate is off by: one small call per kind, compared with dense autograd in float64."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from .candidates import load

# What a case is made of. large: factor on q; mask: seen (True = attend), hidden or additive; keyword: its argument;
# implicit: causal without an argument; scale: given; offset: of the causal mask; tiled: query head h has key head
# h % Hk; window: of so many keys before; order, tangent: 1 or 2, up to which derivative.
ORDINARY = {
    "B": 2, "Hq": 2, "Hk": 2, "T": 6, "S": 9, "D": 4, "E": 5, "causal": False, "mask": None, "keyword": None,
    "implicit": False, "scale": None, "offset": None, "tiled": False, "large": 1.0, "dtype": "float64", "order": 1,
    "tangent": 0, "seed": None, "calls": 1, "softcap": None, "window": None,
}  # fmt: skip


def make_case(entry: dict[str, Any], changes: dict[str, Any]) -> SimpleNamespace:
    c = SimpleNamespace(**(ORDINARY | changes))
    layout = entry.get("layout", "BHTD")
    c.B = 1 if layout in ("HTD", "TD") else c.B
    c.Hq = c.Hk = 1 if layout in ("BTD", "TD") else c.Hk
    c.Hq = changes.get("Hq", c.Hq)
    c.E = c.D if "E" not in changes and entry["name"] == "TritonStyleAttention" else c.E
    rng = np.random.default_rng(20)
    shapes = {"q": (c.Hq, c.T, c.D), "k": (c.Hk, c.S, c.D), "v": (c.Hk, c.S, c.E), "do": (c.Hq, c.T, c.E)}
    c.x = {n: rng.standard_normal((c.B, *shape)) for n, shape in shapes.items()}
    c.w = {n: rng.standard_normal(c.x[n].shape) for n in "qkv"}  # directions
    c.x["q"] *= c.large
    c.seen = rng.random((c.T, c.S)) < 0.6 if c.mask else None
    if c.mask:
        c.seen[1] = False
    return c


# --- the truth: BHTD, float64 ---------------------------------------------------------------------


def dense(c: SimpleNamespace, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    group = c.Hq // c.Hk
    if c.tiled:
        k, v = k.tile(1, group, 1, 1), v.tile(1, group, 1, 1)
    else:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    t, s = q.shape[-2], k.shape[-2]
    seen = torch.ones(t, s, dtype=torch.bool) if c.seen is None else torch.as_tensor(c.seen)
    if c.causal:
        seen = seen & torch.ones(t, s, dtype=torch.bool).tril(s - t if c.offset is None else c.offset)
    if c.window is not None:
        seen = seen & torch.ones(t, s, dtype=torch.bool).tril(s - t).triu(s - t - c.window)
    z = q @ k.mT * (c.scale or q.shape[-1] ** -0.5)
    z = (z if c.softcap is None else c.softcap * torch.tanh(z / c.softcap)).masked_fill(~seen, -1e300)
    return (z.softmax(-1) * seen) @ v


def truth(c: SimpleNamespace) -> dict[str, Any]:
    """By torch's autograd. <dO, J w> = <J^T dO, w>: reverse over forward is the same number as reverse over reverse."""
    results = derivatives(SimpleNamespace(**(vars(c) | {"dtype": "float64", "order": 2, "tangent": 0})), dense_of(c))
    results["reverse over forward"] = results["second"]
    if c.tangent:
        start, w = (tuple(torch.tensor(d[n]) for n in "qkv") for d in (c.x, c.w))
        results["tangent"] = torch.func.jvp(dense_of(c), start, w)[1]
    return results


def dense_of(c: SimpleNamespace) -> Any:
    return lambda q, k, v: dense(c, q, k, v)


def layouts(layout: str, to: bool, x: Any) -> Any:
    """From BHTD to a layout and back; works on arrays of any framework."""
    if layout == "BTHD":
        return x.swapaxes(1, 2)
    if layout in ("BTD", "HTD", "TD"):
        axes = {"BTD": (1,), "HTD": (0,), "TD": (0, 1)}[layout]
        for axis in axes:
            x = x[(slice(None),) * axes[0] + (0,)] if to else x[(slice(None),) * axis + (None,)]
    return x


def derivatives(c: SimpleNamespace, f: Any, layout: str = "BHTD") -> dict[str, Any]:
    """out, gradients, and up to ``order`` and ``tangent`` the second ones, of a torch function by torch's autograd."""
    dtype = getattr(torch, c.dtype)
    start = {n: torch.tensor(c.x[n], dtype=dtype, requires_grad=True) for n in c.x}
    x = {n: layouts(layout, True, t * 1.0) for n, t in start.items()}
    leaves = [start[n] for n in "qkv"]
    results = {}
    out = layouts(layout, False, f(x["q"], x["k"], x["v"]))
    grads = torch.autograd.grad((out * start["do"]).sum(), leaves, create_graph=c.order > 1)
    results |= {"out": out, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
    if c.order > 1:
        h = sum((g * torch.tensor(c.w[n], dtype=dtype)).sum() for n, g in zip("qkv", grads, strict=True))
        try:
            results |= {"second": gradient_or_zero(h, leaves)}
        except RuntimeError as error:  # a second order that raises is not wrong
            if "once_differentiable" not in str(error):
                raise
    if c.tangent:
        with torch.autograd.forward_ad.dual_level():
            duals = [torch.autograd.forward_ad.make_dual(start[n], torch.tensor(c.w[n], dtype=dtype)) for n in "qkv"]
            dual = layouts(layout, False, f(*(layouts(layout, True, d) for d in duals)))
            tangent = torch.autograd.forward_ad.unpack_dual(dual).tangent
            results["tangent"] = tangent
            if c.tangent > 1:
                results["reverse over forward"] = gradient_or_zero((tangent * start["do"]).sum(), leaves)
    return results


def gradient_or_zero(scalar: torch.Tensor, leaves: list[torch.Tensor]) -> torch.Tensor:
    """What a user gets who adds the scalar to a loss and calls backward: where there is no graph, nothing."""
    for leaf in leaves:
        leaf.grad = None
    if scalar.requires_grad:
        scalar.backward(retain_graph=True)  # not autograd.grad: it does not visit once_differentiable's error node
    return torch.cat([(torch.zeros_like(t) if t.grad is None else t.grad).flatten() for t in leaves])


def distance(found: dict[str, Any], expected: dict[str, Any]) -> float:
    errors = [0.0]
    for name in found:
        a, b = (np.asarray(x.detach() if torch.is_tensor(x) else x, np.float64) for x in (found[name], expected[name]))
        assert a.shape == b.shape, (name, a.shape, b.shape)
        error = np.abs(a - b).max() / max(1.0, np.abs(b).max())
        errors.append(error if np.isfinite(error) else np.inf)
    return max(errors)


# --- one call per kind ----------------------------------------------------------------------------


def keywords(c: SimpleNamespace) -> dict[str, Any]:
    if c.mask:
        mask = {"seen": c.seen, "hidden": ~c.seen, "additive": np.where(c.seen, 0.0, -np.inf)} if c.mask else {}
        return {c.keyword or "mask": mask[c.mask]}
    if c.scale is not None:
        return {c.keyword or "scale": c.scale}
    return {c.keyword or "causal": True} if c.causal and not c.implicit else {}


def call_gradients(entry: dict[str, Any], f: Any, c: SimpleNamespace) -> dict[str, Any]:
    """Functions and pairs that return gradients themselves."""
    layout = entry.get("layout", "BHTD")
    as_array = torch.tensor if entry["framework"] == "torch" else np.array
    q, k, v, do = (as_array(layouts(layout, True, c.x[n])) for n in ("q", "k", "v", "do"))
    extra = keywords(c) if c.seed is None else {"dropout": 0.5, "seed": c.seed}
    if entry["kind"] == "object":
        it = f()
        result = it.forward(q, k, v, **extra), it.backward(do)
    elif entry["kind"] == "pair":
        out, cache = f[0](q, k, v, **extra)
        result = out, f[1](do, cache)
    else:
        result = f(do, q, k, v, **extra) if entry["kind"] == "grads-dout-first" else f(q, k, v, do, **extra)
    found = {}
    if isinstance(result, dict) and "out" in result:
        found["out"], result = result["out"], {n: x for n, x in result.items() if n != "out"}
    if len(result) == 2:
        found["out"], result = result
    found |= dict(zip(("dq", "dk", "dv"), result.values() if isinstance(result, dict) else result, strict=True))
    return {n: layouts(layout, False, x) for n, x in found.items()}


def error_of_gradients(entry: dict[str, Any], f: Any, c: SimpleNamespace) -> float:
    if c.seed is not None:  # the same seed twice
        return distance(call_gradients(entry, f, c), call_gradients(entry, f, c))
    expected = truth(c)
    with np.errstate(all="ignore"):
        return max(distance(call_gradients(entry, f, c), expected) for _ in range(c.calls))


def error_of_torch(entry: dict[str, Any], f: Any, c: SimpleNamespace) -> float:
    call = f.apply if isinstance(f, type) else f
    extra = tuple(torch.as_tensor(x) if isinstance(x, np.ndarray) else x for x in keywords(c).values())
    layout = entry.get("layout", "BHTD")
    found = derivatives(c, lambda q, k, v: call(q, k, v, *extra), layout)
    return distance(found, truth(c))


def error_of_jax(entry: dict[str, Any], f: Any, c: SimpleNamespace) -> float:
    layout, extra = entry.get("layout", "BHTD"), tuple(keywords(c).values())
    with jax.enable_x64(True):
        x = {n: jnp.asarray(a) for n, a in c.x.items()}
        start, w = tuple(x[n] for n in "qkv"), tuple(jnp.asarray(c.w[n]) for n in "qkv")

        def out(*qkv: Any) -> Any:
            return layouts(layout, False, f(*(layouts(layout, True, a) for a in qkv), *extra))

        def loss(qkv: Any) -> Any:
            return (out(*qkv) * x["do"]).sum()

        def along(qkv: Any) -> Any:
            return sum((g * d).sum() for g, d in zip(jax.grad(loss)(qkv), w, strict=True))

        def tangent(qkv: Any) -> Any:
            return jax.jvp(out, qkv, w)[1]

        found = {"out": out(*start), **dict(zip(("dq", "dk", "dv"), jax.grad(loss)(start), strict=True))}
        flat = lambda parts: jnp.concatenate([p.ravel() for p in parts])  # noqa: E731
        if c.order > 1:
            found["second"] = flat(jax.grad(along)(start))
        if c.tangent:
            found["tangent"] = tangent(start)
        if c.tangent > 1:
            found["reverse over forward"] = flat(jax.grad(lambda qkv: (tangent(qkv) * x["do"]).sum())(start))
        found = {n: np.asarray(a) for n, a in found.items()}
    return distance(found, truth(c))


def error_of_packed(entry: dict[str, Any], f: Any, c: SimpleNamespace) -> float:
    rng = np.random.default_rng(21)
    x = torch.tensor(rng.standard_normal((7, 3, 2, 4)), requires_grad=True)
    do = torch.tensor(rng.standard_normal((7, 2, 4)))
    expected = torch.nn.functional.scaled_dot_product_attention(*(x[:, i].transpose(0, 1) for i in range(3)))
    results = []
    for out in (f.apply(x), expected.transpose(0, 1)):
        results.append({"out": out, "dqkv": torch.autograd.grad((out * do).sum(), x)[0]})
    return distance(*results)


def error_of_varlen(entry: dict[str, Any], f: Any, c: SimpleNamespace) -> float:
    rng = np.random.default_rng(22)
    lengths = torch.tensor([0, 3, 8, 9], dtype=torch.int32), torch.tensor([0, 5, 9, 15], dtype=torch.int32)
    q, k, v = (torch.tensor(rng.standard_normal((n, 2, 4)), requires_grad=True) for n in (9, 15, 15))
    do, parts = torch.tensor(rng.standard_normal((9, 2, 4))), []
    for i in range(3):
        (a, b), (s, t) = lengths[0][i : i + 2].tolist(), lengths[1][i : i + 2].tolist()
        heads = [x.transpose(0, 1) for x in (q[a:b], k[s:t], v[s:t])]
        parts.append(torch.nn.functional.scaled_dot_product_attention(*heads).transpose(0, 1))
    results = []
    for out in (f(q, k, v, *lengths, 5, 6), torch.cat(parts)):
        results.append(dict(zip("oqkv", (out, *torch.autograd.grad((out * do).sum(), (q, k, v))), strict=True)))
    return distance(*results)


# --- layers: dense autograd over the same weights, each (in, out) -------------------------------------


def dense_layer(x: Any, w: dict[str, Any], do: Any, heads: int = 1, memory: Any = None, causal: bool = False) -> Any:
    """y and the gradients of x, of memory and of every weight; biases are called bq, bk, bv, bo."""
    leaf = {n: torch.tensor(np.array(a, np.float64), requires_grad=True) for n, a in {"x": x, **w}.items()}
    if memory is not None:
        leaf["memory"] = torch.tensor(memory, requires_grad=True)

    def project(n: str, a: torch.Tensor) -> torch.Tensor:
        return a @ leaf[n] + leaf.get("b" + n, 0.0)

    def split(a: torch.Tensor) -> torch.Tensor:
        return a.unflatten(-1, (heads, -1)).transpose(-2, -3)

    source = leaf.get("memory", leaf["x"])
    q, k, v = split(project("q", leaf["x"])), split(project("k", source)), split(project("v", source))
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(-2, -3).flatten(-2)
    y = project("o", y) if "o" in leaf else y
    grads = torch.autograd.grad((y * torch.as_tensor(do)).sum(), list(leaf.values()))
    return {"y": y, **dict(zip(leaf, grads, strict=True))}


def weights_of(name: str, layer: Any) -> tuple[dict[str, Any], Any, int]:
    """The weights as dense_layer has them, a function that reads their gradients after backward, and the heads."""
    if name.startswith("SelfAttention"):
        w = {"q": layer.Wq, "k": layer.Wk, "v": layer.Wv}
        return w, lambda returned: {"q": layer.dWq, "k": layer.dWk, "v": layer.dWv, "x": returned}, 1
    if name.startswith("MultiHead"):
        parts = {"q": layer.q_proj, "k": layer.k_proj, "v": layer.v_proj, "o": layer.out_proj}
        w = {n: p.weight.T for n, p in parts.items()} | {"b" + n: p.bias for n, p in parts.items()}

        def read(returned: Any) -> dict[str, Any]:
            grads = {n: p.grad_weight.T for n, p in parts.items()} | {"b" + n: p.grad_bias for n, p in parts.items()}
            return grads | {"x": returned}

        return w, read, layer.n_heads
    if name.startswith("Packed"):
        w = dict(zip("qkv", np.split(layer.wqkv.value, 3, 1), strict=True)) | {"o": layer.wo.value}

        def read(returned: Any) -> dict[str, Any]:
            grads = dict(zip("qkv", np.split(layer.wqkv.grad, 3, 1), strict=True))
            return grads | {"o": layer.wo.grad, "x": returned}

        return w, read, layer.heads
    if hasattr(layer, "params"):
        w = {n[1]: a for n, a in layer.params.items()}
        return w, lambda returned: {n[1]: a for n, a in layer.grads.items()} | {"x": returned}, layer.num_heads
    if hasattr(layer, "wq"):  # tinyformer
        parts = {"q": layer.wq, "k": layer.wk, "v": layer.wv}
        return (
            {n: p.data for n, p in parts.items()},
            lambda returned: {n: p.grad for n, p in parts.items()} | {"x": returned},
            1,
        )
    return dict(layer.w), lambda returned: {**returned[1], "x": returned[0]}, 1


def error_of_layer(entry: dict[str, Any], layer: Any, c: SimpleNamespace) -> float:
    rng = np.random.default_rng(23)
    w, read, heads = weights_of(entry["name"], layer)
    shape = (6,) if entry.get("layout") == "TD" else (3, 6)
    x, do = rng.standard_normal((*shape, len(w["q"]))), rng.standard_normal((*shape, w["q"].shape[1]))
    expected = dense_layer(x, w, do, heads)
    y = layer.forward(x)
    return distance({"y": y, **read(layer.backward(do))}, expected)


def error_of_layer_pair(entry: dict[str, Any], pair: Any, c: SimpleNamespace) -> float:
    rng = np.random.default_rng(24)
    x, do = rng.standard_normal((2, 3, 5, 8))
    params = dict(zip(("w_q", "w_k", "w_v", "w_o"), rng.standard_normal((4, 8, 8)), strict=True))
    y, cache = pair[0](x, params, **entry["options"])
    dx, grads = pair[1](do, cache)
    found = {"y": y, "x": dx, **{n[-1]: g for n, g in grads.items()}}
    return distance(found, dense_layer(x, {n[-1]: a for n, a in params.items()}, do, entry["options"]["n_head"]))


def error_of_layer_steps(entry: dict[str, Any], pair: Any, c: SimpleNamespace) -> float:
    rng = np.random.default_rng(27)
    x, do = rng.standard_normal((2, 3, 5, 8))
    w = dict(zip("qkv", rng.standard_normal((3, 8, 8)), strict=True))
    y, cache = pair[0](x, *w.values(), *entry["options"].values())
    found = {"y": y, **dict(zip("xqkv", pair[1](do, cache), strict=True))}
    return distance(found, dense_layer(x, w, do, *entry["options"].values()))


def error_of_layer_cross(entry: dict[str, Any], cls: Any, c: SimpleNamespace) -> float:
    rng = np.random.default_rng(25)
    x, memory, do = (rng.standard_normal(shape) for shape in ((3, 5, 8), (3, 7, 8), (3, 5, 6)))
    w = dict(zip("qkv", rng.standard_normal((3, 8, 6)), strict=True))
    layer = cls(*w.values())
    y = layer.forward(x, memory)
    found = dict(zip(("x", "memory", "q", "k", "v"), layer.backward(do), strict=True))
    return distance({"y": y, **found}, dense_layer(x, w, do, memory=memory))


def error_of_module(entry: dict[str, Any], module: Any, c: SimpleNamespace) -> float:
    rng, module = np.random.default_rng(26), module.double()
    if entry["name"] == "Head":
        p = {n[0]: getattr(module, n).weight for n in ("query", "key", "value")}
        heads, take = 1, lambda grads: {n: g.T for n, g in grads.items()}
        w = take({n: t.detach() for n, t in p.items()})
    else:
        p = {
            "qkv": module.c_attn.weight,
            "bqkv": module.c_attn.bias,
            "o": module.c_proj.weight,
            "bo": module.c_proj.bias,
        }

        def take(t: dict[str, Any]) -> dict[str, Any]:
            three = {n: a.T for n, a in zip("qkv", t["qkv"].chunk(3), strict=True)}
            biases = dict(zip(("bq", "bk", "bv"), t["bqkv"].chunk(3), strict=True))
            return three | biases | {"o": t["o"].T, "bo": t["bo"]}

        heads, w = module.n_head, take({n: t.detach() for n, t in p.items()})
    w = {n: t.numpy() for n, t in w.items()}
    x = torch.tensor(rng.standard_normal((2, 6, len(w["q"]))), requires_grad=True)
    y = module(x)
    do = torch.tensor(rng.standard_normal(y.shape))
    grads = torch.autograd.grad((y * do).sum(), [x, *p.values()])
    found = {"y": y, "x": grads[0], **take(dict(zip(p, grads[1:], strict=True)))}
    return distance(found, dense_layer(x.detach().numpy(), w, do, heads, causal=True))


def error_of_fused_module(entry: dict[str, Any], module: Any, c: SimpleNamespace) -> float:
    rng, module = np.random.default_rng(28), module.double()

    def take(qkv: torch.Tensor, o: torch.Tensor) -> dict[str, Any]:
        three = qkv.reshape(module.heads, 3, -1, qkv.shape[1]).unbind(1)
        return {n: a.reshape(-1, qkv.shape[1]).T for n, a in zip("qkv", three, strict=True)} | {"o": o.T}

    x = torch.tensor(rng.standard_normal((2, 6, module.proj.weight.shape[0])), requires_grad=True)
    y = module(x)
    do = torch.tensor(rng.standard_normal(y.shape))
    dx, *grads = torch.autograd.grad((y * do).sum(), [x, module.qkv.weight, module.proj.weight])
    w = {n: a.detach().numpy() for n, a in take(module.qkv.weight, module.proj.weight).items()}
    return distance({"y": y, "x": dx, **take(*grads)}, dense_layer(x.detach().numpy(), w, do, module.heads))


PARTS: dict[str, Any] = {
    "GPTAttention": lambda m: (*m.c_attn.weight.chunk(3), m.c_proj.weight),
    "ViTAttention": lambda m: (*m.to_qkv.weight.chunk(3), m.to_out[0].weight),
    "GroupedAttention": lambda m: (m.wq.weight, m.wk.weight, m.wv.weight, m.wo.weight),
    "TimeFirstAttention": lambda m: (*m.in_proj_weight.chunk(3), m.out_proj.weight),
    "ListedAttention": lambda m: tuple(part.weight for part in m.linears),
}
"""The weights of query, key, value and output of a module, (out, in)."""


def error_of_module_parts(entry: dict[str, Any], module: Any, c: SimpleNamespace) -> float:
    if isinstance(module, type):
        module = module(SimpleNamespace(n_embd=16, n_head=2, block_size=8, dropout=0.0, bias=False))
    module, name = module.double(), entry["name"]
    for part, p in module.named_parameters():
        if part.endswith("bias"):
            p.data.zero_()
    heads = next(getattr(module, n) for n in ("n_head", "heads", "n_heads", "num_heads", "h") if hasattr(module, n))
    c = SimpleNamespace(**(vars(c) | {"Hq": heads, "Hk": getattr(module, "n_kv_heads", heads)}))
    c.causal = "causal" in entry.get("options", {})
    wq, wk, wv, wo = PARTS[name](module)
    x = torch.tensor(np.random.default_rng(29).standard_normal((2, 6, wq.shape[1])), requires_grad=True)
    q, k, v = ((x @ w.T).unflatten(-1, (n, -1)).transpose(1, 2) for w, n in ((wq, c.Hq), (wk, c.Hk), (wv, c.Hk)))
    expected = dense(c, q, k, v).transpose(1, 2).flatten(2) @ wo.T
    if name == "TimeFirstAttention":
        y = module(*(x.transpose(0, 1),) * 3).transpose(0, 1)
    else:
        y = module(x, x, x) if name == "ListedAttention" else module(x)
    do = torch.tensor(np.random.default_rng(30).standard_normal(y.shape))
    results = [{"y": t, "x": torch.autograd.grad(t, x, do, retain_graph=True)[0]} for t in (y, expected)]
    return distance(*results)


def error_of_varlen_packed(entry: dict[str, Any], f: Any, c: SimpleNamespace) -> float:
    rng, cu = np.random.default_rng(31), [0, 3, 8, 9]
    x = torch.tensor(rng.standard_normal((9, 3, 2, 4)), requires_grad=True)
    do, parts = torch.tensor(rng.standard_normal((9, 2, 4))), []
    for a, b in itertools.pairwise(cu):
        heads = [x[a:b, i].transpose(0, 1) for i in range(3)]
        parts.append(torch.nn.functional.scaled_dot_product_attention(*heads).transpose(0, 1))
    outs = (f(x, torch.tensor(cu)), torch.cat(parts))
    return distance(*({"out": o, "dqkv": torch.autograd.grad(o, x, do)[0]} for o in outs))


def error_of_eager(entry: dict[str, Any], f: Any, c: SimpleNamespace) -> float:
    found = derivatives(c, lambda q, k, v: f(None, q, k, v, None)[0].transpose(1, 2))
    return distance(found, truth(c))


def error_of_loops(entry: dict[str, Any], pair: Any, c: SimpleNamespace) -> float:
    c = make_case(entry, {"S": 6, "E": 4, "causal": True})
    beside = np.concatenate([c.x[n].swapaxes(1, 2).reshape(2, 6, -1) for n in "qkv"], -1)
    out, cache = pair[0](beside, 2)
    found = [out, *np.split(pair[1](c.x["do"].swapaxes(1, 2).reshape(2, 6, -1), cache), 3, -1)]
    heads = [x.reshape(2, 6, 2, 4).swapaxes(1, 2) for x in found]
    return distance(dict(zip(("out", "dq", "dk", "dv"), heads, strict=True)), truth(c))


def error_of_hvp(entry: dict[str, Any], f: Any, c: SimpleNamespace) -> float:
    found = f(*(c.x[n] for n in ("q", "k", "v", "do")), *(c.w[n] for n in "qkv"))
    return distance({"second": np.concatenate([x.ravel() for x in found])}, truth(c))


ERRORS = {
    "grads": error_of_gradients, "grads-dout-first": error_of_gradients, "pair": error_of_gradients,
    "object": error_of_gradients, "torch": error_of_torch, "jax": error_of_jax, "packed": error_of_packed,
    "varlen": error_of_varlen, "layer": error_of_layer, "layer-pair": error_of_layer_pair,
    "layer-cross": error_of_layer_cross, "module": error_of_module, "layer-steps": error_of_layer_steps,
    "module-fused": error_of_fused_module, "module-parts": error_of_module_parts, "eager": error_of_eager,
    "varlen-packed": error_of_varlen_packed, "loops": error_of_loops, "hvp": error_of_hvp,
}  # fmt: skip


def error(entry: dict[str, Any], changes: dict[str, Any]) -> float:
    return ERRORS[entry["kind"]](entry, load(entry), make_case(entry, changes))

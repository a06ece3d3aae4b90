"""How a candidate is called: a function of attention, a function of the layer, or a layer as an object."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from attngrad.auditor import objects
from attngrad.auditor.cases import Caller, Case
from attngrad.auditor.plans import INPUTS, Dims
from attngrad.core.arrays import NDArray
from attngrad.core.options import OPTION_NAMES

QKV = ("q", "k", "v", "dout")


class Parameters(NamedTuple):
    """The parameters that must be given by position; those that can be by keyword; whether any can (``**``)."""

    required: tuple[str, ...] = QKV
    keywords: frozenset[str] = frozenset()
    everything: bool = False
    names: tuple[str, ...] = ()
    """All of them; with ``**``, those of the options."""


def parameters_of(candidate: Any) -> Parameters:
    """The parameters of a candidate; where it has no signature that could be read, (q, k, v, dout)."""
    try:
        found = inspect.signature(candidate).parameters.values()
    except (TypeError, ValueError):
        return Parameters()
    kinds = inspect.Parameter
    required: tuple[str, ...] = ()
    keywords, everything = set(), False
    for p in found:
        if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD) and p.default is kinds.empty:
            required += (p.name,)
        elif p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY):
            keywords.add(p.name)
        elif p.kind is kinds.VAR_POSITIONAL and not required:
            required = QKV
        elif p.kind is kinds.VAR_KEYWORD:
            everything = True
    names = tuple(OPTION_NAMES) if everything else tuple(p.name for p in found)
    return Parameters(required, frozenset(keywords), everything, names)


def fresh(x: NDArray) -> NDArray:
    """A writable copy with the same strides in kind: zero strides and axis order are part of the case."""
    if x.size and 0 in x.strides:
        shape = tuple(1 if s == 0 else n for n, s in zip(x.shape, x.strides, strict=True))
        small = np.array(x[tuple(slice(0, n) for n in shape)])
        strides = tuple(0 if s == 0 else t for s, t in zip(x.strides, small.strides, strict=True))
        return np.lib.stride_tricks.as_strided(small, x.shape, strides)
    return np.array(x, order="K")


def taken(options: Mapping[str, Any], names: frozenset[str], everything: bool) -> dict[str, Any]:
    """The options that a candidate takes, their arrays as copies of its own."""

    def own(x: Any) -> Any:
        return fresh(x) if isinstance(x, np.ndarray) else tuple(map(own, x)) if isinstance(x, tuple) else x

    return {name: own(x) for name, x in options.items() if everything or name in names}


def arrays_in(options: Mapping[str, Any]) -> dict[str, NDArray]:
    """The arrays among the options, those of a pair as ``segments[0]``."""
    found = {name: x for name, x in options.items() if isinstance(x, np.ndarray)}
    pairs = ((name, x) for name, x in options.items() if isinstance(x, tuple))
    return found | {f"{name}[{i}]": y for name, x in pairs for i, y in enumerate(x) if isinstance(y, np.ndarray)}


_NAMES = {
    "q": ("q", "query", "queries"),
    "k": ("k", "key", "keys"),
    "v": ("v", "value", "values"),
    "dout": ("dout", "do", "d_out", "grad_out", "grad_output", "dy", "g", "cotangent"),
    "q_dot": ("q_dot", "qdot", "dot_q"),
    "k_dot": ("k_dot", "kdot", "dot_k"),
    "v_dot": ("v_dot", "vdot", "dot_v"),
    "dout_dot": ("dout_dot", "do_dot"),
}
_ALIASES = {alias: name for name, aliases in _NAMES.items() for alias in aliases}
_TANGENTS = ("q_dot", "k_dot", "v_dot")
_PAIRS = {"primals": QKV[:3], "tangents": _TANGENTS}
_ORDERS = (QKV[:3], QKV, (*QKV[:3], *_TANGENTS), (*QKV, *_TANGENTS), (*QKV, *_TANGENTS, "dout_dot"))
_BY_COUNT = {len(names): names for names in _ORDERS}
LAYER_ARGUMENTS = (*INPUTS["layer"], "num_heads")


class BadCandidate(TypeError):  # noqa: N818
    """The candidate cannot be called in any way that the auditor knows."""


@dataclass(frozen=True)
class Target:
    """A candidate, as it is called and as a report shows the call."""

    prepare: Caller
    level: str
    arguments: tuple[str, ...]
    """The arrays that it is given."""
    code: str
    """The call, with places for {options}, {heads}, {kv_heads} and {model}."""
    keywords: tuple[str, ...] = ()
    """The names that it takes."""
    tangents: bool = False
    plain_output: bool = False
    """Whether the layer has no w_o."""
    adapt: Callable[[Dims], Dims | None] | None = None
    """The sizes that it takes in place of these; None where it takes none."""


def target_of(candidate: Any, level: str, supports: frozenset[str]) -> Target:
    """How to call ``candidate``; BadCandidate where there is no way."""
    if level == "attention":
        return _attention(candidate)
    return _object(candidate) if objects.is_layer_object(candidate) else _layer(candidate, supports)


def _attention(candidate: Any) -> Target:
    """``candidate(q, k, v[, dout][, tangents], **options)``, by its signature."""
    required, keywords, everything, names = parameters_of(candidate)
    # Options may be required parameters too: def f(q, k, v, dout, causal).
    arrays = [name for name in required if name not in OPTION_NAMES]
    by_keyword = keywords | {name for name in required if name in OPTION_NAMES}
    known = [_ALIASES.get(name.lower()) for name in arrays]
    if not _PAIRS.keys().isdisjoint(required):
        wanted: tuple[str, ...] = tuple(arrays)
    elif None not in known and len(set(known)) == len(known) and {"q", "k", "v"} <= set(known):
        wanted = tuple(name for name in known if name)
    elif len(arrays) in _BY_COUNT:
        wanted = _BY_COUNT[len(arrays)]
    else:
        raise BadCandidate(
            "audit: candidate must take (q, k, v, dout), or (q, k, v) for a forward alone; "
            f"it takes ({', '.join(required)})."
        )

    def prepare(case: Case) -> tuple[Callable[[], Any], dict[str, NDArray]]:
        own = {name: fresh(x) for name, x in case.arrays.items()}
        values = [
            tuple(own[x] for x in _PAIRS[name]) if name in _PAIRS else own[_ALIASES.get(name.lower(), name)]
            for name in wanted
        ]
        options = taken(case.options, by_keyword, everything)
        options |= {name: own[name] for name in ("bias_dot", "sinks_dot") if name in keywords and name in own}
        return lambda: candidate(*values, **options), own | arrays_in(options)

    shown = ", ".join(f"({', '.join(_PAIRS[x])})" if x in _PAIRS else x for x in wanted)
    return Target(
        prepare,
        "attention",
        tuple(y for x in wanted for y in _PAIRS.get(x, (x,))),
        f"results = candidate({shown}{{options}})",
        names,
        tangents=any(name.endswith("_dot") or name == "tangents" for name in wanted),
    )


def _layer(candidate: Any, supports: frozenset[str]) -> Target:
    """``candidate(query, key, value, w_q, w_k, w_v, w_o, dy, num_heads, **options)``."""
    required, keywords, everything, names = parameters_of(candidate)
    by_keyword = keywords | {name for name in required if name in (*OPTION_NAMES, "num_kv_heads")}
    arrays = tuple(name for name in required if name not in by_keyword)
    if len(arrays) != len(LAYER_ARGUMENTS) and arrays != QKV:
        raise BadCandidate(
            f"audit: a layer candidate must take ({', '.join(LAYER_ARGUMENTS)}); it takes ({', '.join(required)})."
        )

    def prepare(case: Case) -> tuple[Callable[[], Any], dict[str, NDArray]]:
        own = {name: fresh(case.arrays[name]) for name in LAYER_ARGUMENTS[:-1]}
        options = taken(case.options, by_keyword, everything)
        if "num_kv_heads" in by_keyword:
            options["num_kv_heads"] = case.dims.hk
        return lambda: candidate(*own.values(), case.dims.hq, **options), own | arrays_in(options)

    asks = "num_kv_heads" in names
    many = ", num_kv_heads={kv_heads}" if asks else ""
    code = f"results = candidate({', '.join(LAYER_ARGUMENTS[:-1])}, num_heads={{heads}}{many}{{options}})"
    adapt = None if asks or "gqa" in supports else _one_key_head_each
    return Target(prepare, "layer", LAYER_ARGUMENTS[:-1], code, names, adapt=adapt)


def _one_key_head_each(n: Dims) -> Dims | None:
    """No groups: a layer is told the number of key heads only where it asks for it, or claims to find it in w_k."""
    return None if "gqa" in n.features else n


def _object(candidate: Any) -> Target:
    """A class or object with ``forward`` and ``backward``."""
    plain = not objects.has_output_projection(candidate)
    given = tuple(name for name in LAYER_ARGUMENTS[:-1] if name != "w_o" or not plain)
    prepare, code, adapt = objects.object_caller(candidate), objects.call_as_code(candidate), objects.sizes(candidate)
    return Target(prepare, "layer", given, code, plain_output=plain, adapt=adapt)

"""How a candidate is called: a function of attention, a function of the layer, or a layer as an object."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from attngrad.auditor import calls, names
from attngrad.auditor.calls import QKV, BadCandidate, Parameters, parameters_of
from attngrad.auditor.candidate import named_results
from attngrad.auditor.cases import Caller, Case
from attngrad.auditor.layer_functions import LayerFunction
from attngrad.auditor.layers import as_array
from attngrad.auditor.layouts import LAYOUTS, MERGED, Layout, packed, seqlens
from attngrad.auditor.objects import LayerObject, is_layer_object
from attngrad.auditor.pairs import as_function, is_pair, takes_one_array
from attngrad.auditor.pipeline import RESULTS, Pipeline
from attngrad.auditor.plans import Dims
from attngrad.core.arrays import NDArray
from attngrad.core.options import OPTION_NAMES, OPTIONS


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


_TANGENTS = ("q_dot", "k_dot", "v_dot")
_PAIRS = {"primals": QKV[:3], "tangents": _TANGENTS}
_ORDERS = (QKV[:3], QKV, (*QKV[:3], *_TANGENTS), (*QKV, *_TANGENTS), (*QKV, *_TANGENTS, "dout_dot"))
_BY_COUNT = {len(order): order for order in _ORDERS}
_PACKED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_ASKED = (*_PACKED, "num_heads", "num_kv_heads", "stack_axis", "module")
_SAVED = ("out", "lse", "weights")


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
    recast: Callable[[Case], Case] = lambda case: case
    """The case that it is given in place of one: one input for all, or sequences end to end."""
    view: Callable[[Case], Case] = lambda case: case
    """A case with the arrays as it gets them, for the report."""
    layout: Layout = LAYOUTS["BHTD"]
    counts: bool = False
    """Whether a window is one number to it."""
    windowed: bool = False
    """Whether it has a window that is not asked for."""
    untried: tuple[str, ...] = ()
    """What is not tried of it."""


def level_of(candidate: Any) -> str:
    """Whether it is attention, or a layer: an object or a function with weights."""
    if is_layer_object(candidate):
        return "layer" if LayerObject(candidate, np.float64).has_weights else "attention"
    try:
        found = calls.parameters(candidate[0] if is_pair(candidate) else candidate, "layer")
    except (TypeError, ValueError):
        return "attention"
    if takes_one_array(candidate):
        return "attention"
    return "layer" if any((p.means or "").startswith("w_") or p.means == "parameters" for p in found) else "attention"


def own_options(candidate: Any, options: Any, sizes: Any) -> tuple[Any, Any]:
    """Options and sizes, with what was given by the candidate's own names: ``is_causal``, ``n_head``."""
    if not isinstance(options, Mapping) or not isinstance(sizes, (Mapping, type(None))):
        return options, sizes
    function = candidate[0] if is_pair(candidate) else getattr(candidate, "forward", candidate)
    taken_names = parameters_of(function).names
    found: dict[str, Any] = {}
    for name, x in options.items():
        own = name in taken_names and name not in OPTION_NAMES
        if own and names.known(name, "given") == "num_heads":
            sizes = {**(sizes or {}), "heads": x}
        else:
            found[(names.known(name, "options") if own else None) or name] = x
    return found, sizes


def target_of(
    candidate: Any,
    level: str,
    supports: frozenset[str],
    layout: Layout | None = None,
    dtype: Any = np.float64,
    convert: Callable[[Any], Any] | None = None,
) -> Target:
    """How to call ``candidate``, with arrays as ``convert`` makes them; BadCandidate where there is no way."""
    convert = convert or (lambda x: x)
    if level == "attention":
        return _attention(as_function(candidate), layout or LAYOUTS["BHTD"], convert)
    return (
        _object(candidate, dtype, convert)
        if is_layer_object(candidate)
        else _layer(candidate, supports, dtype, convert)
    )


def option_names(found: Parameters) -> dict[str, str]:
    """How a candidate spells the options that it takes, by their names here."""
    own = {*found.required, *found.keywords}
    spelled = {means: name for name in own if (means := names.known(name, "options")) is not None}
    return spelled | {name: name for name in own if name in OPTION_NAMES}


def option_value(name: str, spelled: str, value: Any) -> Any:
    """An option as its spelling has it: FlashAttention writes -1 for an open side of the window."""
    if name == "window" and spelled != "window" and isinstance(value, tuple):
        return tuple(-1 if x is None else x for x in value)
    return value


def _arrays_of(candidate: Any, found: Parameters, spelled: dict[str, str]) -> tuple[str, ...]:
    """The arrays that are its required parameters, by name."""
    own = set(spelled.values())
    required = [x for x in found.required if x not in own and names.known(x, "given") not in _ASKED]
    means = [calls.meaning(x, "attention") for x in required]
    if not _PAIRS.keys().isdisjoint(required):
        return tuple(required)
    if None not in means and len(set(means)) == len(means) and {"q", "k", "v"} <= set(means):
        return tuple(x for x in means if x)
    if len(required) in _BY_COUNT:
        return _BY_COUNT[len(required)]
    raise BadCandidate(
        "audit: candidate must take (q, k, v, dout), or (q, k, v) for a forward alone; "
        f"it takes ({', '.join(found.required)})."
    )


def _attention(candidate: Any, layout: Layout, convert: Callable[[Any], Any]) -> Target:
    """``candidate(q, k, v[, dout][, tangents], **options)``, by its signature, in a layout."""
    found = parameters_of(candidate)
    spelled = option_names(found)
    wanted = _arrays_of(candidate, found, spelled)
    given = {m: x for x in (*found.required, *found.keywords) if (m := names.known(x, "given")) is not None}
    layout = MERGED if layout.name == "BTD" and "num_heads" in given else layout
    tangents = any(name.endswith("_dot") or name == "tangents" for name in wanted)
    by_name = set(found.keywords)
    others = {*spelled.values(), *(x for m, x in given.items() if m in _ASKED)}

    def arguments(case: Case) -> tuple[dict[str, NDArray], dict[str, Any]]:
        def give(name: str, x: Any) -> Any:
            return layout.give(name, layout.by_group(name, x, case.dims))

        own = {name: fresh(give(name, x)) for name, x in case.arrays.items()}
        if saved := [name for name in _SAVED if name in wanted]:
            exact = Pipeline(case.given, np.longdouble)
            own |= {x: np.array(give(x, getattr(exact, x).astype(case.arrays["q"].dtype))) for x in saved}
        options = {name: option_value(name, spelled.get(name, name), give(name, x)) for name, x in case.options.items()}
        options |= {
            name: _default(name, case.dims)
            for name in spelled
            if spelled[name] in found.without_default and name not in options
        }
        keywords = {spelled.get(n, n): x for n, x in taken(options, frozenset(spelled), found.everything).items()}
        keywords |= {name: own[name] for name in ("bias_dot", "sinks_dot") if name in by_name and name in own}
        return own, keywords | {given[n]: x for n, x in _lengths(case, layout).items() if n in given}

    def prepare(case: Case) -> tuple[Callable[[], Any], dict[str, NDArray]]:
        own, keywords = arguments(case)
        values = [tuple(own[x] for x in _PAIRS[name]) if name in _PAIRS else own[name] for name in wanted]

        def action() -> Any:
            more = {name: convert(x) for name, x in keywords.items()}
            left = [convert(x) for x in values]
            by_place = [more.pop(x, None) if x in others else left.pop(0) for x in found.required]
            return read_in(layout, candidate(*by_place, *left, **more), case, tangents)

        return action, own | arrays_in(keywords)

    def view(case: Case) -> Case:
        own, keywords = arguments(case)
        return replace(
            case,
            arrays=own
            | {x: keywords[given[x]] for x in _PACKED if x in given and isinstance(keywords.get(given[x]), np.ndarray)},
        )

    own_window = _parameter(candidate, spelled.get("window", ""))
    window = None if own_window is None else own_window.default
    by_sequence = layout.name == "packed" and (layout.stack is None or "cu_seqlens_q" in given)

    def recast(case: Case) -> Case:
        if tangents and "dout_dot" not in wanted:  # it holds dout fixed
            still = {x: np.zeros_like(y) for x, y in case.arrays.items() if x == "dout_dot"}
            case = replace(case, arrays={**case.arrays, **still})
        return packed(case) if by_sequence else case

    shown = ", ".join(f"({', '.join(_PAIRS[x])})" if x in _PAIRS else x for x in wanted)
    if layout.stack is not None:
        joined = f"np.stack((q, k, v), {layout.stack})" if layout.stack >= 0 else "np.concatenate((q, k, v), -1)"
        shown = shown.replace("q, k, v", joined)
    shown += "".join(
        f", {own}={{{name}}}" if name == "num_heads" else f", {own}={name}"
        for name, own in given.items()
        if name in (*_PACKED[:2], "num_heads")
    )
    shown = shown.replace("{num_heads}", "{heads}")
    return Target(
        prepare,
        "attention",
        (*(y for x in wanted for y in _PAIRS.get(x, (x,))), *(x for x in (*_PACKED, "stack_axis") if x in given)),
        f"results = candidate({shown}{{options}})",
        (*found.names, *spelled),
        tangents=tangents,
        adapt=None if layout.name == "BHTD" else layout.adapt,
        recast=recast,
        counts=isinstance(window, int) or (own_window is not None and _may_be_a_number(own_window)),
        windowed=own_window is not None and (window is own_window.empty or bool(window)),
        view=view,
        layout=layout,
    )


def _parameter(candidate: Any, name: str) -> inspect.Parameter | None:
    try:
        return inspect.signature(candidate).parameters.get(name)
    except (TypeError, ValueError):
        return None


def _may_be_a_number(p: inspect.Parameter) -> bool:
    """Whether an annotation says so, or nothing says otherwise."""
    return "int" in str(p.annotation) if p.annotation is not p.empty else p.default is p.empty


def _default(name: str, n: Dims) -> Any:
    """What an option is that must be given and is not asked for."""
    return 1.0 / np.sqrt(n.d) if name == "scale" else OPTIONS[name].default


def _lengths(case: Case, layout: Layout) -> dict[str, Any]:
    """What a candidate may ask for beside the arrays: the number of heads, where sequences begin, its module."""
    n = case.dims
    found: dict[str, Any] = {"num_heads": n.hq, "num_kv_heads": n.hk}
    found["module"] = SimpleNamespace(training=False, num_key_value_groups=n.hq // n.hk, is_causal=False, layer_idx=0)
    if layout.stack is not None:
        found["stack_axis"] = layout.stack
    if case.by_sequence:
        ids = case.options["segments"]
        parts = 1 + max(int(x.max(initial=0)) for x in ids)
        for name, x in zip("qk", ids, strict=True):
            found[f"cu_seqlens_{name}"], found[f"max_seqlen_{name}"] = seqlens(x, parts)
    return found


def read_in(layout: Layout, value: Any, case: Case, tangents: bool) -> Any:
    """What a candidate of attention returned, by the names and in the shapes of the auditor."""
    if value is None:
        return None
    try:
        named = named_results(value, case, "attention", tangents)
    except ValueError:  # which is told where the value is read
        return value
    found: dict[str, Any] = {}
    for name, x in named.items():
        means = f"d{name}" if name in QKV[:3] else name if name in RESULTS else names.known(name, "results") or name
        array = as_array(x)
        found[means] = x if array is None else layout.by_group(means, layout.read(means, array, case), case.dims, True)
    return found


def _layer(candidate: Any, supports: frozenset[str], dtype: Any, convert: Callable[[Any], Any]) -> Target:
    """``candidate(query, key, value, w_q, w_k, w_v, w_o, dy, num_heads, **options)``, or what it takes of these."""
    layer = LayerFunction(candidate, dtype, convert)
    adapt = layer.convention.adapt
    if "num_kv_heads" not in layer.takes and "gqa" not in supports:
        adapt = lambda n: None if "gqa" in n.features else layer.convention.adapt(n)  # noqa: E731
    return Target(
        layer.prepare,
        "layer",
        layer.convention.arguments,
        layer.code(),
        layer.keywords,
        plain_output=layer.convention.plain_output,
        adapt=adapt,
        recast=layer.convention.recast,
        view=layer.convention.view,
    )


def _object(candidate: Any, dtype: Any, convert: Callable[[Any], Any]) -> Target:
    """A class or object with ``forward`` and ``backward``."""
    layer = LayerObject(candidate, dtype, convert)
    has = layer.convention
    return Target(
        layer.caller(), "layer", has.arguments, layer.code(), plain_output=has.plain_output, adapt=layer.adapt,
        recast=has.recast, view=has.view, untried=("biases and their gradients (they are set to zero)",) * layer.biased,
    )  # fmt: skip

"""Candidates of PyTorch and JAX: which they are, those that people import by name, and the arrays that others want."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from types import CodeType, MappingProxyType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from attngrad.auditor import names
from attngrad.auditor.calls import meaning, parameters_of
from attngrad.auditor.objects import LayerObject, is_layer_object, is_module
from attngrad.auditor.pairs import is_pair, separated, takes_one_array
from attngrad.auditor.report import AuditReport
from attngrad.core.checks import fail
from attngrad.core.files import read_toml

FRAMEWORKS = ("numpy", "torch", "jax")
_OF_TORCH = ("torch.autograd.function", "torch.nn.modules.module")
"""Where the classes Function and Module are defined."""
_BESIDE = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "module", "num_heads", "num_kv_heads")
"""What a function may want beside its arrays."""


class Adapter(NamedTuple):
    """How a function that people import is called."""

    root: str
    framework: str
    layout: str
    options: dict[str, str]
    fixed: Mapping[str, Any] = MappingProxyType({})
    dtype: str | None = None
    device: str | None = None
    top_left: bool = False
    packs: str = ""
    whole: str = ""


def adapter_of(candidate: Any) -> Adapter | None:
    """The adapter of a function, by its name and its package."""
    found = read_toml("attngrad.auditor", "adapters.toml").get(getattr(candidate, "__name__", ""))
    here = str(getattr(candidate, "__module__", "")).split(".")[0]
    return Adapter(**found) if found is not None and found["root"] == here else None


def framework_of(candidate: Any) -> str:
    """What a candidate computes with, by its kind and by the modules that its code names."""
    adapter = adapter_of(candidate)
    if adapter is not None:
        return adapter.framework
    if function_class(candidate) is not None:
        return "torch"
    of_type = type(candidate).__module__.split(".")[0]
    if of_type.startswith("jax") or of_type == "torch":
        return "jax" if of_type.startswith("jax") else "torch"
    if inspect.isclass(candidate) and any(k.__module__.split(".")[0] == "torch" for k in candidate.__mro__):
        return "torch"
    used, words = _seen(candidate)
    if "torch" in used and not words & {"from_numpy", "as_tensor", "tensor"}:
        return "torch"
    return "jax" if used & {"jax", "jaxlib"} and not words & {"asarray", "array"} else "numpy"


def _seen(candidate: Any) -> tuple[set[str], set[str]]:
    """The packages that its code names, and every name in it."""
    used: set[str] = set()
    words: set[str] = set()
    for function in _functions(candidate):
        _look(function, used, words, 3)
    return used, words


def names_attribute(candidate: Any, name: str) -> bool:
    """Whether its code, or that of a function beside it, has this attribute or global name."""
    return name in _seen(candidate)[1]


def imported_beside(candidate: Any) -> str | None:
    """The framework that the module of a candidate imports: "torch" or "jax", which its code need not name."""
    found = {_root(x) for f in _functions(candidate) for x in getattr(f, "__globals__", {}).values()}
    return "torch" if "torch" in found else "jax" if "jax" in found else None


def _root(x: Any) -> str:
    """The package of a module, or of what is imported from one."""
    try:
        return (x.__name__ if isinstance(x, ModuleType) else str(getattr(x, "__module__", ""))).split(".")[0]
    except Exception:  # a proxy of nothing, as web frameworks have them
        return ""


def _functions(candidate: Any) -> list[Any]:
    if is_pair(candidate):
        return list(candidate)
    if is_layer_object(candidate):
        kind = candidate if inspect.isclass(candidate) else type(candidate)
        return [
            getattr(x, "__func__", x)
            for k in kind.__mro__[:-1]
            for x in vars(k).values()
            if callable(x) or hasattr(x, "__func__")
        ]
    return [inspect.unwrap(candidate)]


def _look(function: Any, used: set[str], words: set[str], depth: int) -> None:
    """The packages that a function's code names, and the names themselves, functions beside it included."""
    code, there = getattr(function, "__code__", None), _names_around(function)
    codes = [code] if code is not None else []
    while codes:
        now = codes.pop()
        codes += [c for c in now.co_consts if isinstance(c, CodeType)]
        words.update(now.co_names)
        for name in (*now.co_names, *now.co_freevars):
            x = there.get(name)
            kinds = (x if inspect.isclass(x) else type(x)).__mro__
            if any(kind.__module__ in _OF_TORCH for kind in kinds):
                used.add("torch")
            elif name in now.co_freevars:  # a function that is closed over may be of anything
                continue
            elif (root := _root(x)) in ("torch", "jax", "jaxlib"):
                used.add(root)
            elif depth and inspect.isfunction(x) and x.__module__ == function.__module__ and x is not function:
                _look(x, used, words, depth - 1)


def _names_around(function: Any) -> dict[str, Any]:
    """What the names in a function's code stand for: globals, and what it closes over."""
    free = getattr(getattr(function, "__code__", None), "co_freevars", ())
    found = dict(getattr(function, "__globals__", {}))
    for name, cell in zip(free, getattr(function, "__closure__", None) or (), strict=False):
        with contextlib.suppress(ValueError):  # an empty cell
            found[name] = cell.cell_contents
    return found


def _by_autograd(candidate: Any) -> bool:
    """Whether it is a function of q, k and v alone, whose gradients are its framework's business."""
    if is_pair(candidate) or is_layer_object(candidate):
        return False
    found = parameters_of(candidate)
    arrays = [x for x in found.required if names.known(x, "options") is None and names.known(x, "given") not in _BESIDE]
    return (
        len(arrays) == 3
        or (takes_one_array(candidate) and len(arrays) == 1)
        or (len(found.required) == 4 and adapter_of(candidate) is not None)
    )


def function_class(candidate: Any) -> Any:
    """The ``torch.autograd.Function`` that a candidate is, or is the ``apply`` of; None for any other."""
    bound = getattr(candidate, "__self__", None) if getattr(candidate, "__name__", "") == "apply" else None
    kind = candidate if inspect.isclass(candidate) else bound
    there = inspect.isclass(kind) and any(k.__module__ == "torch.autograd.function" for k in kind.__mro__)
    return kind if there else None


def differentiable(candidate: Any, framework: str | None, device: Any, **keywords: Any) -> AuditReport | None:
    """The report of a function of PyTorch or JAX, by its own differentiation; None for any other candidate."""
    if framework not in (None, *FRAMEWORKS):
        fail(ValueError, "audit", "framework", f"be one of {', '.join(FRAMEWORKS)}", repr(framework))
    framework = framework or framework_of(candidate)
    if device is not None and framework != "torch":
        fail(ValueError, "audit", "device", "be left out for a candidate that is not of PyTorch", repr(device))
    if framework == "numpy" or keywords["level"] == "layer":
        return None
    if (function := function_class(candidate)) is not None:
        keywords["name"] = keywords["name"] or function.__qualname__
        candidate = applied(function)
    elif is_module(candidate):
        if LayerObject(candidate, np.float64).has_weights:
            return None
        made: Any = candidate() if inspect.isclass(candidate) else candidate
        candidate = made.forward
    elif adapter_of(candidate) is None and not _by_autograd(candidate):
        return None
    if adapter_of(candidate) is None and takes_one_array(candidate):
        candidate = separated(candidate)
    keywords.pop("level")
    keywords = {name: x for name, x in keywords.items() if x is not None or name == "dtype"}
    more = {"device": device} if framework == "torch" else {}
    differentiate = import_module(f"attngrad.auditor.{framework}_candidate").differentiate
    report: AuditReport = differentiate(candidate, **keywords, **more)
    return report


@cache
def applied(function: Any) -> Any:
    """The ``apply`` of a ``torch.autograd.Function``, with the parameters of its forward."""
    found = list(inspect.signature(function.forward).parameters.values())
    found = found[1:] if found and found[0].name == "ctx" else found

    def fn(*arrays: Any, **options: Any) -> Any:
        bound = signature.bind(*arrays, **options)
        bound.apply_defaults()
        return function.apply(*bound.args)

    kinds = inspect.Parameter
    defaults = {"causal": False, "dropout": 0.0}
    found = [
        p.replace(default=defaults.get(str(meaning(p.name, "attention"))))
        if i > 2 and p.default is kinds.empty and p.kind is not kinds.VAR_POSITIONAL and meant(p.name) != "window"
        else p
        for i, p in enumerate(found)
    ]
    signature = inspect.Signature(found)
    fn.__signature__ = signature  # type: ignore[attr-defined]
    return fn


def converter(candidate: Any, framework: str | None, device: Any) -> Callable[[Any], Any] | None:
    """What makes the arrays that a candidate takes which computes its gradients by itself."""
    if (framework or framework_of(candidate)) != "torch":
        return None
    from attngrad.auditor.torch_candidate import place, tensor

    return partial(tensor, device=place(device))


def prepared(fn: Any, keywords: dict[str, Any]) -> Any:
    """``fn`` with options by our names, and what its adapter says of layout and dtype in ``keywords``."""
    adapter = adapter_of(fn)
    if adapter is not None:
        keywords["layout"] = keywords.get("layout") or adapter.layout
        keywords["dtype"] = keywords.get("dtype") or adapter.dtype
        keywords.setdefault("name", fn.__name__)
        options = keywords.get("options")
        if adapter.top_left and options and options.get("causal") and options.get("offset") is None:
            keywords["options"] = {**options, "offset": 0}
        return _adapted(fn)
    try:
        found = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return fn
    if next(map(meant, found), "") == "module":
        fn = _arrays_first(fn)
        found = inspect.signature(fn).parameters
    spelled = {
        m: n for n in list(found)[3:] if (m := names.known(n, "options")) is not None and m != n and m not in found
    }
    return _respelled(fn, tuple(spelled.items())) if spelled else fn


def meant(name: str) -> str | None:
    """What a parameter of attention means."""
    return meaning(name, "attention")


@cache
def _arrays_first(fn: Any) -> Any:
    """A function that takes q, k and v after something else, as one that takes them first."""
    own = {meant(name): p for name, p in inspect.signature(fn).parameters.items()}
    arrays = [own[name] for name in ("q", "k", "v")]

    def called(*given: Any, **options: Any) -> Any:
        return fn(**{p.name: x for p, x in zip(arrays, given, strict=True)}, **options)

    kinds = inspect.Parameter
    rest = [p for p in inspect.signature(fn).parameters.values() if p not in arrays]
    rest = [p.replace(kind=kinds.KEYWORD_ONLY) if p.kind is kinds.POSITIONAL_OR_KEYWORD else p for p in rest]
    called.__signature__ = inspect.Signature([*arrays, *rest])  # type: ignore[attr-defined]
    called.__qualname__ = getattr(fn, "__qualname__", type(fn).__name__)
    called.__wrapped__ = fn  # type: ignore[attr-defined]
    return called


@cache
def _respelled(fn: Any, spelled: tuple[tuple[str, str], ...]) -> Any:
    own = dict(spelled)
    back = {n: m for m, n in spelled}

    def called(*arrays: Any, **options: Any) -> Any:
        return fn(*arrays, **{own.get(n, n): _value(n, own.get(n, n), x) for n, x in options.items()})

    found = inspect.signature(fn).parameters.values()
    called.__signature__ = inspect.Signature([p.replace(name=back.get(p.name, p.name)) for p in found])  # type: ignore[attr-defined]
    called.spelled = own  # type: ignore[attr-defined]
    called.__qualname__ = getattr(fn, "__qualname__", type(fn).__name__)
    return called


def _value(name: str, spelled: str, value: Any) -> Any:
    """An option as its spelling has it: FlashAttention writes -1 for an open side of the window."""
    if name == "window" and spelled != "window" and isinstance(value, tuple):
        return tuple(-1 if x is None else x for x in value)
    return value


@cache
def _adapted(fn: Any) -> Any:
    """A function that people import, with q, k and v apart and options by our names."""
    adapter = adapter_of(fn)
    assert adapter is not None  # noqa: S101

    def called(q: Any, k: Any, v: Any, **options: Any) -> Any:
        given = {adapter.options.get(n, n): _value(n, adapter.options.get(n, n), x) for n, x in options.items()}
        if (
            adapter.options.get("mask") == adapter.options.get("bias") is not None
            and {"mask", "bias"} <= options.keys()
        ):
            mask, bias = options["mask"], options["bias"]
            given[adapter.options["mask"]] = bias.masked_fill(~mask, float("-inf"))
        if "score_mod" in given:
            given["score_mod"] = _causal(k.shape[-2] - q.shape[-2]) if given["score_mod"] else None
        if adapter.whole in given:
            shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
            given[adapter.whole] = given[adapter.whole].expand(shape)
        arrays = (q, k, v)
        if adapter.packs:
            stack = import_module(adapter.framework).stack
            arrays = (stack(arrays, 2),) if adapter.packs == "qkv" else (q, stack((k, v), 2))  # type: ignore[assignment]
        return fn(*arrays, **given, **adapter.fixed)

    kinds = inspect.Parameter
    own = [kinds(name, kinds.POSITIONAL_OR_KEYWORD) for name in ("q", "k", "v")]
    lengths = _BESIDE[:4] if adapter.layout == "packed" else ()
    own += [kinds(name, kinds.KEYWORD_ONLY, default=None) for name in (*lengths, *adapter.options)]
    called.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    called.spelled = None if adapter.packs or adapter.whole else adapter.options  # type: ignore[attr-defined]
    called.__qualname__ = fn.__name__
    return called


def _causal(offset: int) -> Any:
    """The causal mask as a score modifier of FlexAttention."""

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        import torch

        return torch.where(j <= i + offset, score, -float("inf"))

    return score_mod

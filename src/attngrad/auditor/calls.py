"""Calling functions by the names of their parameters, whatever these are called; a backward after its forward."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from types import CodeType, SimpleNamespace
from typing import Any, NamedTuple

from attngrad.auditor import names
from attngrad.core.options import OPTION_NAMES

QKV = ("q", "k", "v", "dout")
LAYER_NAMES = {"q": "query", "k": "key", "v": "value", "dout": "dy", "out": "y"}


class BadCandidate(TypeError):  # noqa: N818
    """The candidate cannot be called in any way that the auditor knows."""


class Parameters(NamedTuple):
    """The parameters that must be given by position; those that can be by keyword; whether any can (``**``)."""

    required: tuple[str, ...] = QKV
    keywords: frozenset[str] = frozenset()
    everything: bool = False
    names: tuple[str, ...] = ()
    """All of them; with ``**``, those of the options."""
    without_default: frozenset[str] = frozenset()
    """Those that must be given, by position or by keyword."""


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
    needed = frozenset(p.name for p in found if p.default is kinds.empty)
    return Parameters(required, frozenset(keywords), everything, names, needed)


class Context(SimpleNamespace):
    """What a forward may save for its backward, as ``torch.autograd.Function`` has it."""

    def save_for_backward(self, *saved: Any) -> None:
        """Keep these as ``saved_tensors``."""
        self.saved_tensors = saved


class Parameter(NamedTuple):
    """A parameter, and what it means (None where the auditor does not know)."""

    name: str
    means: str | None
    required: bool
    keyword: bool
    """Whether it can be given by keyword only."""


def parameters(function: Any, level: str) -> list[Parameter]:
    """The parameters of a function of attention or of the layer."""
    kinds = inspect.Parameter
    return [
        Parameter(p.name, meaning(p.name, level), p.default is kinds.empty, p.kind is kinds.KEYWORD_ONLY)
        for p in inspect.signature(function).parameters.values()
        if p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
    ]


def meaning(name: str, level: str) -> str | None:
    """What a parameter means."""
    if level == "layer":
        if (found := names.weight(name)) is not None:
            return found
        found = names.known(name, "arrays", "given", "options")
        return LAYER_NAMES.get(found or "", found)
    found = names.known(name, "arrays", "given", "options")
    return None if found == "x" else found


Source = str | slice
"""Where an argument comes from: what is given by this name, or what a forward returned beside its output."""


def sources(
    function: Any, given: Collection[str], level: str, unknown: tuple[str, ...], rest: int = 0
) -> tuple[list[Source], dict[str, Source]]:
    """The arguments of a call: those by position, those by keyword.

    A name that says nothing means what the forward calls so (``own``). Other required parameters are those of
    ``unknown``, in this order, which nothing else stands for; then they take what a forward has returned beside its
    output (``rest`` of them).
    """
    found = [
        p._replace(means=own(p.name)) if p.means not in given and own(p.name) in given else p
        for p in parameters(function, level)
    ]
    meant = {p.means for p in found if p.means in given}
    places = [name for name in unknown if name not in meant]
    unmet = sum(p.required and p.means not in given for p in found) - len(places)
    taken = 0
    positional: list[Source] = []
    keywords: dict[str, Source] = {}
    by_keyword = False
    for p in found:
        source: Source
        if p.means is not None and p.means in given:
            source = p.means
        elif not p.required:
            by_keyword = True
            continue
        elif places:
            source = places.pop(0)
        elif taken < rest:
            source = slice(None) if unmet == 1 and rest > 1 else slice(taken, taken + 1)
            taken += 1
        else:
            raise TypeError(f"{getattr(function, '__name__', 'it')} wants {p.name!r}, which the auditor cannot give")
        if p.keyword or by_keyword:
            keywords[p.name] = source
        else:
            positional.append(source)
    return positional, keywords


def own(name: str) -> str:
    """The key of what a forward calls by this name, an argument or what it returns: its backward may call it so too."""
    return f"forward's {name}"


def call(
    function: Any,
    given: Mapping[str, Any],
    level: str,
    unknown: tuple[str, ...],
    rest: Sequence[Any] = (),
    more: Mapping[str, Any] | None = None,
) -> Any:
    """Call ``function`` with what its parameters mean, and ``more`` as keywords."""

    def value(source: Source) -> Any:
        if isinstance(source, str):
            return given[source]
        return rest[source][0] if source.stop is not None else tuple(rest)

    positional, keywords = sources(function, given.keys(), level, unknown, len(rest))
    return function(*map(value, positional), **{name: value(x) for name, x in keywords.items()}, **(more or {}))


def first_names(function: Any, given: Collection[str], level: str) -> tuple[str, ...]:
    """What parameters of a forward are whose names say nothing: one is the input, three are q, k and v."""
    if level == "attention":
        return ("q", "k", "v")
    return tuple(name for name in ("x", "memory") if name in given) or ("query", "key", "value")


def split(returned: Any, out: str) -> tuple[dict[str, Any], list[Any]]:
    """What a forward returned: its results by name, and what else it hands to its backward."""
    if isinstance(returned, Mapping):
        kind = "layer_results" if out == "y" else "results"
        named = {means: x for name, x in returned.items() if (means := names.known(str(name), kind)) is not None}
        return named, [returned.get("cache", returned)]
    if isinstance(returned, (tuple, list)) and returned and not hasattr(returned, "_asdict"):
        return {out: returned[0]}, list(returned[1:])
    return {out: returned}, []


def both(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    given: dict[str, Any],
    level: str,
    results: dict[str, Any],
) -> Any:
    """Run forward, then backward with what it saved; the forward's results go to ``results``, the rest comes back."""
    with_context = any(names.squashed(p.name) == "ctx" for p in parameters(forward, level))
    saved: dict[str, Any] = {"cache": Context()} if with_context else {}
    first = first_names(forward, given, level)
    returned = call(forward, given | saved, level, first)
    named, rest = split(returned, "y" if level == "layer" else "out")
    taken = zip(parameters(forward, level), sources(forward, {*given, *saved}, level, first)[0], strict=False)
    shared = {own(p.name): given[str(x)] for p, x in taken if x in given}
    code = getattr(forward, "__code__", None)  # of a method too
    if code is not None and len(found := _returned_names(code)) == 1 + len(rest):
        shared |= {own(name): x for name, x in zip(found[1:], rest, strict=True)}
    results |= named
    if rest and not with_context:
        saved = {"cache": rest[0] if len(rest) == 1 else tuple(rest)}
    if isinstance(saved.get("cache"), Mapping):
        meant = ((meaning(str(name), level), x) for name, x in saved["cache"].items())
        saved |= {name: x for name, x in meant if name not in (None, "cache")}
    unknown = ("dy" if level == "layer" else "dout", *(["cache"] if saved and len(rest) <= 1 else []))
    return call(backward, {**shared, **named, **saved, **given}, level, unknown, rest)


@lru_cache(maxsize=64)
def _returned_names(code: CodeType) -> tuple[str, ...]:
    """The variables that a function returns as a tuple at its end; none where its source cannot be read."""
    try:
        last = ast.parse(textwrap.dedent(inspect.getsource(code))).body[0].body[-1]  # type: ignore[attr-defined]
    except (OSError, TypeError, SyntaxError, AttributeError):
        return ()
    value = last.value if isinstance(last, ast.Return) else None
    return tuple(x.id if isinstance(x, ast.Name) else "" for x in value.elts) if isinstance(value, ast.Tuple) else ()

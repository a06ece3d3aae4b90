"""``trace``: every intermediate of attention and its derivatives, by name, with its formula and what must hold."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Unpack

import numpy as np

from attngrad import reference
from attngrad.core.arrays import NDArray, kind_of
from attngrad.core.checks import fail
from attngrad.core.options import (
    Operands,
    OptionArguments,
    Options,
    Tangents,
    bind,
    bind_tangents,
    check_cotangents,
    refuse_lse,
)
from attngrad.explain import invariants
from attngrad.explain.entries import Explanation
from attngrad.explain.invariants import Invariant
from attngrad.explain.places import Place, locate
from attngrad.explain.rules import RULES, Rule, resolve
from attngrad.explain.terms import Cells, expand
from attngrad.reference.dense import fill_zeros, visibility, zeros_if_none

if TYPE_CHECKING:
    from os import PathLike

    from rich.console import Console

Tokens = tuple[tuple[str, ...], tuple[str, ...]]


class Step(np.ndarray):
    """An array of a trace, which knows where it comes from; what is computed from it is a plain array.

    ``name`` is its name, ``formula`` what makes it, ``inputs`` the names in that, ``number`` the number of the formula
    in docs/notation.md (empty for what is given), ``stage`` the pass it belongs to: forward, backward, tangent, second.
    """

    name: str = ""
    formula: str = ""
    number: str = ""
    stage: str = ""
    inputs: tuple[str, ...] = ()

    @property
    def value(self) -> NDArray:
        """The numbers, as a plain array."""
        return self.view(np.ndarray)

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return array[()] if return_scalar else np.asarray(array)

    def __getitem__(self, index: Any) -> Any:
        return self.view(np.ndarray)[index]

    def __repr__(self) -> str:
        return f"{self.name} = {self.formula}\n{self.value!r}" if self.name else repr(self.value)


def make_step(rule: Rule, value: NDArray, names: Mapping[str, Any]) -> Step:
    """``value`` as the read-only step of ``rule``."""
    step = np.array(value, order="C").view(Step)
    step.name, step.formula, step.number, step.stage = rule.name, rule.formula, rule.number, rule.stage
    words = re.findall(r"[A-Za-z]\w*", rule.formula if rule.entry else "")
    step.inputs = tuple(dict.fromkeys(w for w in words if w in names and w != rule.name))
    step.flags.writeable = False
    return step


class Trace(Mapping[str, Step]):
    """Every intermediate by name: ``trace["dS"]`` is an array with its ``formula`` and ``inputs``.

    ``invariants`` are what must hold, each checked, and ``holds`` whether all do; ``explain`` expands one entry into
    its sum; ``finite_difference`` checks one against the forward pass. Renderings: ``print`` (terminal), ``to_latex``,
    ``to_json`` (and ``Trace.from_json``), ``to_html`` (a page), ``save`` (any of them, by the suffix of the file).

    >>> import numpy as np
    >>> t = trace(*np.eye(4)[:, None].repeat(2, 1), causal=True)
    >>> t["dS"].formula, t["dS"].inputs, t.holds
    ('A o (dA - delta)', ('A', 'dA', 'delta'), True)
    """

    def __init__(
        self,
        operands: Operands,
        options: Options,
        values: Mapping[str, NDArray],
        rules: Mapping[str, Rule],
        tokens: Tokens | None = None,
        checked: Sequence[Invariant] | None = None,
    ) -> None:
        self.operands, self.options, self.tokens = operands, options, tokens
        self.rules = {name: rule for name, rule in rules.items() if name in values}
        self._steps = {name: make_step(rule, values[name], values) for name, rule in self.rules.items()}
        self.visible: NDArray = np.broadcast_to(visibility(operands, options), operands.scores_shape)
        self.invariants = tuple(invariants.check(self) if checked is None else checked)

    # --- a mapping of names to steps ---------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Step:
        try:
            return self._steps[name]
        except KeyError:
            raise KeyError(self._unknown(name)) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def _unknown(self, name: object) -> str:
        known = {rule.name: rule for rule in RULES}
        if name in known:
            stage = known[str(name)].stage
            give = {"backward": "dout", "tangent": "tangents", "second": "dout and tangents"}.get(stage, "the option")
            return f"trace: {name} is not in this trace. Give {give} to trace()."
        near = [step for step in self._steps if step.lower() == str(name).lower()]
        near = near or difflib.get_close_matches(str(name), self._steps, n=1, cutoff=0.6)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return f"trace: there is no step {name!r}.{hint} Names are {', '.join(self._steps)}."

    @property
    def holds(self) -> bool:
        """Whether every invariant holds."""
        return all(i.holds for i in self.invariants)

    @property
    def group(self) -> int:
        """How many query heads read one key head."""
        return self.operands.group

    def __repr__(self) -> str:
        marks = sum(i.holds for i in self.invariants)
        return f"Trace({', '.join(self._steps)}; {marks} of {len(self.invariants)} invariants hold)"

    def summary(self, switches: bool = True) -> str:
        """Sizes and options in one line; without ``switches``, none that the page can switch."""
        x, o = self.operands, self.options
        t, s = x.scores_shape[-2:]
        leading = math.prod(x.scores_shape[:-3])
        parts = [f"batch {leading}"] if len(x.scores_shape) > 3 else []
        keys = x.heads // x.group
        parts += (
            [_count(x.heads, "head")] if x.group == 1 else [_count(x.heads, "query head"), _count(keys, "key head")]
        )
        parts += [_count(t, "query", "queries"), _count(s, "key"), f"D {x.q.shape[-1]}", f"E {x.v.shape[-1]}"]
        parts += [f"scale {o.scale:.4g}"] if switches else []
        parts += ["causal"] if o.causal and switches else []
        parts += [f"window {o.window}"] if o.window else []
        parts += [n for n in ("mask", "bias", "sinks", "segments") if getattr(x, n) is not None]
        parts += [f"softcap {o.softcap:g}"] if o.softcap is not None and switches else []
        parts += [f"dropout {o.dropout:g}"] if o.dropout else []
        return ", ".join(parts)

    # --- one entry ---------------------------------------------------------------------------------------------------

    def explain(
        self, name: str, row: int, column: int | None = None, *, head: int = 0, batch: Place = 0
    ) -> Explanation:
        """The sum behind one entry, term by term.

        Steps of one number a query (L, delta) take a row only; sigma and its gradients take the head as the row. For K,
        V and their gradients ``head`` is the key head. ``batch`` is an index into the leading axes, flat or a tuple.

        >>> x = np.eye(2)
        >>> print(trace(x, x, 2 * x, scale=1.0).explain("O", 0, 1))
        O[0, 1] = sum_j A[0,j] V[j,1] = 0.537883
          + A[0,0] * V[0,1]     0.7311 *    0.0000  =   0.000000
          + A[0,1] * V[1,1]     0.2689 *    2.0000  =   0.537883
        """
        env, index = locate("trace.explain", self, name, row, column, head, batch)
        cap = reference.SoftCap(self.options.softcap)
        functions = {
            text: lambda z, f=f: float(f(np.float64(z)))
            for text, f in (("cap", cap.value), ("cap'", cap.first), ("cap''", cap.second))
        }
        cells = Cells({n: step.value for n, step in self.items()}, self.visible, functions, self.group)
        return expand(cells, self.rules[name], env, float(self[name][index]), self.options.scale)

    def finite_difference(
        self,
        name: str,
        row: int,
        column: int | None = None,
        *,
        head: int = 0,
        batch: Place = 0,
        step: float = 1e-5,
    ) -> float:
        """One entry of a derivative by central differences, (f(x + step) - f(x - step)) / (2 step).

        For dQ, dS and the like f is the loss <dO, O> + <dL, L>; for those with _dot it is the step itself, moved along
        the tangents.

        >>> x = np.eye(2)
        >>> t = trace(x, x, x, dout=x)
        >>> bool(abs(t.finite_difference("dK", 1, 0) - t["dK"][1, 0]) < 1e-9)
        True
        """
        from attngrad.explain.differences import difference

        _, index = locate("trace.finite_difference", self, name, row, column, head, batch)
        return difference(self, name, index, step)

    # --- renderings --------------------------------------------------------------------------------------------------

    def print(self, console: Console | None = None, *, head: int = 0, batch: int = 0) -> None:
        """Print the trace of one head in the terminal, with signed heat; in colour where the terminal has it."""
        from attngrad.explain import terminal

        terminal.render(self, console, head=head, batch=batch)

    def to_latex(self, *, head: int = 0, batch: int = 0) -> str:
        """A LaTeX document with the formulas and matrices of one head; needs amsmath only."""
        from attngrad.explain import latex

        return latex.document(self, head=head, batch=batch)

    def to_json(self) -> str:
        """All steps, bit for bit, as JSON; ``Trace.from_json`` reads it back."""
        from attngrad.explain import serial

        return serial.dump(self)

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """The trace that ``to_json`` wrote."""
        from attngrad.explain import serial

        return serial.load(text)

    def to_html(self, *, head: int = 0, batch: int = 0, title: str = "") -> str:
        """One self-contained page that works the pass through, and lets its reader change and break it."""
        from attngrad.explain import html

        return html.page(self, head=head, batch=batch, title=title)

    def _repr_html_(self) -> str:
        from attngrad.explain import notebook

        return notebook.render(self)

    def save(self, path: str | PathLike[str], *, head: int = 0, batch: int = 0) -> None:
        """Write .html, .tex, .json or .txt, all or nothing."""
        from attngrad.explain import files

        files.save(self, path, head=head, batch=batch)


def _count(n: int, one: str, many: str = "") -> str:
    return f"{n} {one}" if n == 1 else f"{n} {many or one + 's'}"


# --- making one ------------------------------------------------------------------------------------------------------


def trace(
    q: NDArray,
    k: NDArray,
    v: NDArray,
    dout: NDArray | None = None,
    *,
    tangents: Sequence[NDArray | None] | None = None,
    dlse: NDArray | None = None,
    dout_dot: NDArray | None = None,
    dlse_dot: NDArray | None = None,
    tokens: Sequence[str] | tuple[Sequence[str], Sequence[str]] | None = None,
    **options: Unpack[OptionArguments],
) -> Trace:
    """Every intermediate of attention and, given dout or tangents, of its derivatives; computed in float64.

    The forward pass always; the backward pass (VJP) with dout or dlse; the JVP with tangents; the HVP with both.

    Args:
        q, k, v: ``(..., Hq, T, D)``, ``(..., Hk, S, D)``, ``(..., Hk, S, E)``, as in ``attention``.
        dout: the loss gradient at out, ``(..., Hq, T, E)``; dlse that at lse, ``(..., Hq, T)``.
        tangents: (q_dot, k_dot, v_dot), or also bias_dot and sinks_dot; None for zero.
        dout_dot, dlse_dot: the directions of dout and dlse.
        tokens: one label a token, or (labels of queries, labels of keys).
        options: all those of ``attention`` but return_lse.

    >>> x = np.random.default_rng(0).standard_normal((3, 2))
    >>> t = trace(x, x, x, dout=x, causal=True)
    >>> t["dS"].formula, t["dS"].inputs, t["dS"].shape
    ('A o (dA - delta)', ('A', 'dA', 'delta'), (3, 3))
    >>> t.holds
    True
    """
    name = "trace"
    x, o, return_lse = bind(name, q, k, v, options)
    refuse_lse(name, return_lse)
    dout, dlse = check_cotangents(name, x, dout, dlse)
    dout_dot, dlse_dot = check_cotangents(name, x, dout_dot, dlse_dot, "_dot")
    t = None if tangents is None else _tangents(name, x, tangents)
    if dout is None and dlse is None:
        for argument, given in (("dout_dot", dout_dot), ("dlse_dot", dlse_dot)):
            if given is not None:
                raise ValueError(
                    f"{name}: {argument} was given without {argument[:-4]}. Pass {argument[:-4]}= as well."
                )
    x = widen(x)
    t = None if t is None else Tangents(*(_wide(a) for a in t))
    values, flags = compute(x, o, _wide(dout), _wide(dlse), _wide(dout_dot), _wide(dlse_dot), t)
    return Trace(x, o, values, resolve(RULES, flags), check_tokens(name, tokens, *x.scores_shape[-2:]))


def _wide(x: Any) -> Any:
    return None if x is None else np.array(x, np.float64)


def widen(x: Operands) -> Operands:
    """The operands in float64, copied, so that the trace stays what it was."""
    segments = None if x.segments is None else (np.array(x.segments[0]), np.array(x.segments[1]))
    mask = None if x.mask is None else np.array(x.mask)
    offset = x.offset if isinstance(x.offset, int) else np.array(x.offset)
    wide = {name: _wide(getattr(x, name)) for name in Tangents._fields}
    return Operands(mask=mask, segments=segments, offset=offset, **wide)


def _tangents(function: str, x: Operands, tangents: object) -> Tangents:
    if isinstance(tangents, (tuple, list)) and len(tangents) in (4, 5):
        full = (*tangents, None)[:5]
        return bind_tangents(function, x, tuple(full[:3]), full[3], full[4])
    return bind_tangents(function, x, tangents, None, None)


def check_tokens(function: str, tokens: Any, t: int, s: int) -> Tokens | None:
    """The labels of t queries and s keys, from one list for both or a pair of lists."""
    if tokens is None:
        return None
    if isinstance(tokens, str) or not isinstance(tokens, Sequence):
        _bad_tokens(function, t, s, kind_of(tokens))
    pair = tokens if len(tokens) == 2 and not any(isinstance(a, str) for a in tokens) else (tokens, tokens)
    for labels, n in zip(pair, (t, s), strict=True):
        if not isinstance(labels, Sequence) or not all(isinstance(label, str) for label in labels):
            _bad_tokens(function, t, s, "labels that are no strings")
        if len(labels) != n:
            fail(
                ValueError, function, "tokens", f"have {t} labels of queries and {s} of keys", f"{len(labels)} for {n}"
            )
    return tuple(pair[0]), tuple(pair[1])


def _bad_tokens(function: str, t: int, s: int, got: str) -> NoReturn:
    rule = f"be a list of {t} strings" if t == s else f"be a pair of lists, {t} and {s} strings"
    fail(TypeError, function, "tokens", rule, got, "A text is split into tokens with text.split().")


def compute(
    x: Operands, o: Options, dout: Any, dlse: Any, dout_dot: Any, dlse_dot: Any, t: Tangents | None
) -> tuple[dict[str, NDArray], set[str]]:
    """Every intermediate by its mathematical name, and the flags that choose among the rules."""
    with np.errstate(all="ignore"):
        f = reference.forward(x, o)
        values = {"Q": x.q, "K": x.k, "V": x.v, "bias": x.bias, "sigma": x.sinks, "M": f.keep, "sink": f.sink}
        values |= {"Z": f.z, "S": f.scores, "L": f.lse, "A": f.weights, "O": f.out}
        backward = dout is not None or dlse is not None
        if backward:
            dout = zeros_if_none(dout, f.out)
            b = reference.backward(x, o, f, dout, dlse)
            values |= {"dO": dout, "dL": dlse, "dA": b.dweights, "delta": b.delta, "dS": b.dscores, "dZ": b.dz}
            values |= dict(zip(("dQ", "dK", "dV", "dbias", "dsigma"), b.grads, strict=True))
        if t is not None:
            t = fill_zeros(x, t)
            ft = reference.forward_tangent(x, o, f, t)
            values |= dict(zip(("Q_dot", "K_dot", "V_dot", "bias_dot", "sigma_dot"), t, strict=True))
            values |= dict(zip(("Z_dot", "S_dot", "L_dot", "A_dot", "O_dot"), ft, strict=True))
        if backward and t is not None:
            dout_dot = zeros_if_none(dout_dot, dout)
            bt = reference.backward_tangent(x, o, f, b, ft, t, dout, dout_dot, dlse_dot)
            values |= {"dO_dot": dout_dot, "dL_dot": dlse_dot}
            values |= dict(zip(("dA_dot", "delta_dot", "dS_dot", "dZ_dot"), bt[:4], strict=True))
            values |= dict(zip(("dQ_dot", "dK_dot", "dV_dot", "dbias_dot", "dsigma_dot"), bt.grads_dot, strict=True))
    given = {
        "cap": o.softcap,
        "bias": x.bias,
        "sinks": x.sinks,
        "keep": f.keep,
        "dlse": dlse,
        "dlse_dot": dlse_dot,
        "bias_dot": None if t is None else t.bias,
        "sinks_dot": None if t is None else t.sinks,
    }
    flags = {name for name, value in given.items() if value is not None}
    flags |= {"group"} if x.group > 1 else set()
    flags |= {"hidden"} if not bool(np.all(f.visible)) else set()
    return {name: value for name, value in values.items() if value is not None}, flags

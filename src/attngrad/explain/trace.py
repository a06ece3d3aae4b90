"""``trace``: every intermediate of attention and its derivatives, by name, with its formula and what must hold."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from attngrad.core.arrays import ArrayLike, NDArray
from attngrad.core.binding import bind, bind_tangents, check_cotangents, refuse_lse
from attngrad.core.operands import Operands, Tangents
from attngrad.core.options import OPTIONS, Kind, OptionArguments, Options
from attngrad.explain import invariants
from attngrad.explain.entries import Explanation
from attngrad.explain.invariants import Invariant
from attngrad.explain.places import Place, Tokens, check_tokens, locate
from attngrad.explain.rules import RULES, Rule, resolve
from attngrad.explain.terms import Cells, expand
from attngrad.explain.values import Step, compute, make_step, to_float64, widen
from attngrad.reference.dense import visibility

if TYPE_CHECKING:
    from os import PathLike

    from rich.console import Console

_SWITCHES = ("scale", "causal", "softcap")
"""Options that the page can switch."""


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

    if not TYPE_CHECKING:  # to a type checker, what is no attribute is an error

        def __getattr__(self, name: str) -> Any:
            """An error that says how a step is asked for."""
            hint = ""
            if not name.startswith("_"):  # as _steps does, in a copy that is being made
                known = {step.lower(): step for step in (*(rule.name for rule in RULES), *self._steps)}
                step = name if name in self._steps else known.get(name.lower(), "")
                hint = f'. Use trace["{step}"].' if step in self._steps else f". {self._unknown(step)}" if step else ""
            raise AttributeError(f"'Trace' object has no attribute {name!r}{hint}", name=name, obj=self)

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
        for row in OPTIONS.values():
            value = getattr(x if row.is_array else o, row.name)
            if value is None or (not row.is_array and value == row.default) or (row.name in _SWITCHES and not switches):
                continue
            if row.kind is Kind.NUMBER:
                parts.append(f"{row.name} {value:{'.4g' if row.resolved else 'g'}}")
            elif row.kind not in (Kind.OFFSET, Kind.SEED):
                parts.append(f"{row.name} {value}" if row.kind is Kind.PAIR else row.name)
        return ", ".join(parts)

    # --- one entry ---------------------------------------------------------------------------------------------------

    def explain(
        self, name: str, row: int, column: int | None = None, *, head: int = 0, batch: Place = 0
    ) -> Explanation:
        """The sum behind one entry, term by term.

        Steps of one number per query (L, delta) take a row only; sigma and its gradients take the head as the row. For
        K, V and their gradients ``head`` is the key head. ``batch`` is an index into the leading axes, flat or a tuple.

        >>> x = np.eye(2)
        >>> print(trace(x, x, 2 * x, scale=1.0).explain("O", 0, 1))
        O[0, 1] = sum_j A[0,j] V[j,1] = 0.537883
          + A[0,0] * V[0,1]     0.7311 *    0.0000  =   0.000000
          + A[0,1] * V[1,1]     0.2689 *    2.0000  =   0.537883
        """
        env, index = locate("trace.explain", self, name, row, column, head, batch)
        return expand(Cells(self), self.rules[name], env, float(self[name][index]), self.options.scale)

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
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    dout: ArrayLike | None = None,
    *,
    tangents: Sequence[ArrayLike | None] | None = None,
    dlse: ArrayLike | None = None,
    dout_dot: ArrayLike | None = None,
    dlse_dot: ArrayLike | None = None,
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
        tokens: one label per token, or (labels of queries, labels of keys).
        options: all those of ``attention`` but return_lse.

    >>> x = np.random.default_rng(0).standard_normal((3, 2))
    >>> t = trace(x, x, x, dout=x, causal=True)
    >>> t["dS"].formula, t["dS"].inputs, t["dS"].shape
    ('A o (dA - delta)', ('A', 'dA', 'delta'), (3, 3))
    >>> t.holds
    True
    """
    name = "trace"
    x, o, return_lse = bind(name, q, k, v, options, convert=True)
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
    t = None if t is None else Tangents(*(to_float64(a) for a in t))
    values, flags = compute(x, o, to_float64(dout), to_float64(dlse), to_float64(dout_dot), to_float64(dlse_dot), t)
    return Trace(x, o, values, resolve(RULES, flags), check_tokens(name, tokens, *x.scores_shape[-2:]))


def _tangents(function: str, x: Operands, tangents: object) -> Tangents:
    if isinstance(tangents, (tuple, list)) and len(tangents) in (4, 5):
        full = (*tangents, None)[:5]
        return bind_tangents(function, x, tuple(full[:3]), full[3], full[4])
    return bind_tangents(function, x, tangents, None, None)

"""The sum behind one number: an entry formula of ``rules``, evaluated term by term."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from attngrad.core.arrays import NDArray
from attngrad.explain.entries import Explanation, Product, Term, parse, readable
from attngrad.explain.rules import KEY_SIDE, Rule, is_flat
from attngrad.reference.modifiers import modifiers

if TYPE_CHECKING:
    from attngrad.explain.trace import Trace

ZERO_WHERE_HIDDEN = frozenset({"S", "A", "dS", "dZ", "S_dot", "A_dot", "dS_dot", "dZ_dot", "dbias"})
"""Steps whose hidden entries are set, not computed: S to -inf, the others to 0."""


class Cells:
    """Entries of the steps of a trace, by letters: ``number("dS", "ij", {"b": 0, "h": 0, "i": 0, "j": 2})``."""

    def __init__(self, trace: Trace) -> None:
        values, cap, self.group = (
            {name: step.value for name, step in trace.items()},
            modifiers(trace.options),
            trace.group,
        )
        self.functions: dict[str, Callable[[Any], Any]] = {
            "cap": cap.value,
            "cap'": cap.first,
            "cap''": cap.second,
            "exp": _exp,
        }
        scores = values["Z"].shape
        self.heads = scores[-3] if len(scores) > 2 else 1
        self.batch = scores[:-3]
        self.visible = trace.visible.reshape(math.prod(self.batch), self.heads, *scores[-2:])
        spread = {name: np.broadcast_to(values[name], scores) for name in ("bias", "bias_dot") if name in values}
        self.values: dict[str, NDArray] = values | spread

    def number(self, name: str, letters: str, env: Mapping[str, int]) -> tuple[float, int | None]:
        """The entry and, for steps with heads, the head it is of."""
        x = self.values[name]
        if letters in ("h", ""):
            return float(x[env["h"]]), env["h"]
        if is_flat(name):
            index = tuple(env[c] for c in letters)
            batched = x.reshape(-1, *x.shape[-2:])[env["b"]] if name.removeprefix("d")[0] in "XY" else x
            return float(batched[index]), None
        heads = self._heads_of(name)
        width = x.shape[-1]
        head = env["n"] // width if "n" in letters else env["h"] // (self.group if name in KEY_SIDE else 1)
        index = tuple(env[c] % width if c == "n" else env[c] for c in letters)
        cell = x.reshape(math.prod(self.batch), heads, *x.shape[-len(letters) :])[(env["b"], head, *index)]
        return float(cell), head

    def _heads_of(self, name: str) -> int:
        return self.heads // self.group if name in KEY_SIDE else self.heads

    def extent(self, letter: str, products: Sequence[tuple[str, str, str]]) -> int:
        """How many values a letter of a sum takes."""
        if letter == "b":
            return math.prod(self.batch)
        for _, name, letters in products:
            if letter in letters:
                x = self.values[name]
                flat = is_flat(name)
                n = int(x.shape[letters.index(letter) - len(letters)])
                return n if letter != "n" or flat else n * self._heads_of(name)
        raise ValueError(f"rules: no factor has the letter {letter!r}.")

    def hidden(self, name: str, letters: str, env: Mapping[str, int]) -> bool:
        """Whether the factor is zero because its query may not see its key."""
        return letters == "ij" and name in ZERO_WHERE_HIDDEN and not self.sees(env)

    def sees(self, env: Mapping[str, int]) -> bool:
        """Whether query i may see key j."""
        return bool(self.visible[env["b"], env["h"], env["i"], env["j"]])

    def fully_masked(self, env: Mapping[str, int]) -> bool:
        """Whether query i may see nothing."""
        return not self.visible[env["b"], env["h"], env["i"]].any()


def expand(cells: Cells, rule: Rule, env: dict[str, int], value: float, scale: float) -> Explanation:
    """The sum behind the entry of ``rule`` at ``env``, whose value in the trace is ``value``."""
    index = ", ".join(str(env[c]) for c in rule.letters)
    shown = readable(rule, env)
    blank = Explanation(rule.name, index, rule.formula, shown, "", 1.0, (), value, value)
    if not rule.entry:
        return blank._replace(note="given")
    if rule.letters == "ij" and rule.name in ZERO_WHERE_HIDDEN - {"dbias"} and not cells.sees(env):
        return blank._replace(note=f"query {env['i']} may not see key {env['j']}")
    if rule.name in ("dA", "dA_dot") and cells.fully_masked(env):
        return blank._replace(note=f"query {env['i']} sees nothing")
    outer, products = parse(rule.entry)
    terms, dropped = [], 0
    several = _sums_over_heads(cells, rule, products)
    for product in products:
        for place in _places(cells, rule, product, env, several):
            if any(cells.hidden(name, letters, place) for _, name, letters in product.factors):
                dropped += 1
                continue
            batched = "b" in product.over
            terms.append((product.sign, [_factor(cells, f, place, several, batched) for f in product.factors]))
    factor = scale if outer == "scale" else 1.0
    if outer == "log":
        exponents = [numbers[0][2] for _, numbers in terms]
        factor = max(exponents, default=0.0)
        factor = factor if math.isfinite(factor) else 0.0
        terms = [
            (sign, [(f"{label[:-1]} - m)", _exp(exponent - factor), exponent)])
            for sign, [(label, _, exponent)] in terms
        ]
    found = tuple(
        Term(sign, tuple((label, number) for label, number, _ in numbers), sign * math.prod(n for _, n, _ in numbers))
        for sign, numbers in terms
    )
    values = [t.value for t in found]
    total = math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
    if outer == "scale":
        total *= factor
    elif outer == "log":
        total = factor + math.log(total) if total > 0 else -math.inf
    elif outer == "exp":
        total = _exp(total)
    note = f"{dropped} masked term{'s, all 0' if dropped > 1 else ', which is 0'}, left out" if dropped else ""
    return Explanation(rule.name, index, rule.formula, shown, outer, factor, found, total, value, note)


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def _factor(
    cells: Cells, factor: tuple[str, str, str], env: Mapping[str, int], several: bool, batched: bool
) -> tuple[str, float, float]:
    """Label, number and, for a function, its argument."""
    function, name, letters = factor
    argument, head = cells.number(name, letters, env)
    places = [str(env[c]) for c in letters if c not in "nh"]
    if "n" in letters:
        column = env["n"] if head is None else env["n"] % cells.values[name].shape[-1]
        places.insert(letters.index("n"), str(column))
    where = [f"h{head}"] if head is not None and (several or "n" in letters or letters == "h") else []
    if batched:
        where.insert(0, f"b{env['b']}")
    inside = "; ".join(part for part in (" ".join(where), ",".join(places)) if part)
    label = f"{name}[{inside}]"
    if not function:
        return label, argument, argument
    return f"{function}({label})", float(cells.functions[function](np.float64(argument))), argument


def _sums_over_heads(cells: Cells, rule: Rule, products: Sequence[Product]) -> bool:
    """Whether a step of a key head gathers from the query heads of its group, or from all heads."""
    if rule.name in ("dbias", "dbias_dot"):
        return cells.heads > 1
    gathers = any(name not in KEY_SIDE and not is_flat(name) for p in products for _, name, _ in p.factors)
    return rule.name in KEY_SIDE and cells.group > 1 and gathers


def _places(cells: Cells, rule: Rule, product: Product, env: dict[str, int], several: bool) -> list[dict[str, int]]:
    """Every assignment of letters that a product is summed over."""
    if product.over == "*":  # dbias: everything that its entry was broadcast to
        return _broadcast_places(cells, rule, env)
    heads = [env["h"]]
    if several:
        first = env["h"] // cells.group * cells.group
        heads = list(range(first, first + cells.group))
    ranges = [range(cells.extent(c, product.factors)) for c in product.over]
    return [
        {**env, "h": h, **dict(zip(product.over, places, strict=True))}
        for h in heads
        for places in itertools.product(*ranges)
    ]


def _broadcast_places(cells: Cells, rule: Rule, env: dict[str, int]) -> list[dict[str, int]]:
    shape = cells.values[rule.name].shape
    scores = cells.values["Z"].shape
    full = (1,) * (len(scores) - len(shape)) + shape
    leading = np.unravel_index(env["b"], cells.batch) if cells.batch else ()
    at = (*(int(n) for n in leading), *((env["h"],) if len(scores) > 2 else ()), env["i"], env["j"])
    found = []
    for place in itertools.product(*(range(m) if n == 1 else (a,) for n, m, a in zip(full, scores, at, strict=True))):
        batch = int(np.ravel_multi_index(place[: len(cells.batch)], cells.batch)) if cells.batch else 0
        head = place[-3] if len(scores) > 2 else 0
        found.append({**env, "b": batch, "h": head, "i": place[-2], "j": place[-1]})
    return found

"""What a formula is once it is read: a small tree, and its one way to be printed.

Indices stand on symbols only: ``A_i`` is row i of A, ``A_ij`` an entry. ``@`` is the matrix product, ``*`` and ``/`` go
entry by entry; a number times a matrix may be either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from attngrad.formulas.symbols import KNOWN, SCALAR


@dataclass(frozen=True, slots=True)
class Base:
    """Where in the text it stood, and how many operations stand one upon the other; neither takes part in equality."""

    position: int = field(default=0, compare=False, kw_only=True)
    height: int = field(init=False, default=0, compare=False, repr=False)

    def __post_init__(self) -> None:
        below = (x.height for x in (getattr(self, name, None) for name in ("of", "left", "right")) if x is not None)
        object.__setattr__(self, "height", 1 + max(below, default=0))


@dataclass(frozen=True, slots=True)
class Number(Base):
    """A number, not negative."""

    value: float


@dataclass(frozen=True, slots=True)
class Symbol(Base):
    """A name of the list, under its one spelling, with indices if it has any."""

    name: str
    indices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Negate(Base):
    """-x."""

    of: Expression


@dataclass(frozen=True, slots=True)
class Transpose(Base):
    """x^T."""

    of: Expression


@dataclass(frozen=True, slots=True)
class Power(Base):
    """x to a literal power, for numbers x."""

    of: Expression
    exponent: float


@dataclass(frozen=True, slots=True)
class Binary(Base):
    """left op right, op one of + - * / @."""

    op: str
    left: Expression
    right: Expression


@dataclass(frozen=True, slots=True)
class Call(Base):
    """A function of the list."""

    function: str
    of: Expression


@dataclass(frozen=True, slots=True)
class Sum(Base):
    """The sum over all values of an index."""

    index: str
    of: Expression


Expression = Number | Symbol | Negate | Transpose | Power | Binary | Call | Sum


@dataclass(frozen=True, slots=True)
class Equation(Base):
    """Sides that are said to be equal, two or more; ``stated`` is the shape that is printed behind them, if any."""

    sides: tuple[Expression, ...]
    stated: tuple[str, str] | None = field(default=None, compare=False)


def children(x: Expression) -> tuple[Expression, ...]:
    """The parts of x."""
    if isinstance(x, Binary):
        return (x.left, x.right)
    return () if isinstance(x, Number | Symbol) else (x.of,)


def walk(x: Expression) -> Iterator[Expression]:
    """x and everything in it, outermost first."""
    yield x
    for child in children(x):
        yield from walk(child)


def rebuilt(x: Expression, change: Callable[[Expression], Expression]) -> Expression:
    """x with ``change`` applied to each of its parts, and not to x itself."""
    if isinstance(x, Binary):
        return replace(x, left=change(x.left), right=change(x.right))
    return x if isinstance(x, Number | Symbol) else replace(x, of=change(x.of))


def renamed(x: Expression, letters: dict[str, str]) -> Expression:
    """x with other letters for its indices."""
    if isinstance(x, Symbol):
        return replace(x, indices=tuple(letters.get(i, i) for i in x.indices))
    if isinstance(x, Sum):
        x = replace(x, index=letters.get(x.index, x.index))
    return rebuilt(x, lambda child: renamed(child, letters))


def names(*sides: Expression) -> set[str]:
    """The names that occur."""
    return {x.name for side in sides for x in walk(side) if isinstance(x, Symbol)}


def free_indices(x: Expression) -> set[str]:
    """The indices that no sum binds."""
    if isinstance(x, Symbol):
        return set(x.indices) - {":"}
    below = {i for child in children(x) for i in free_indices(child)}
    return below - {x.index} if isinstance(x, Sum) else below


def is_number(x: Expression) -> bool:
    """Whether x is a number by its form alone, so that its product with a matrix goes entry by entry."""
    if isinstance(x, Symbol):
        dims = KNOWN[x.name]
        return dims == SCALAR or (len(x.indices) == len(dims) and ":" not in x.indices)
    if isinstance(x, Call):
        return x.function in {"sum", "mean", "trace"} or (x.function in {"sqrt", "exp", "log"} and is_number(x.of))
    if isinstance(x, Binary):
        return is_number(x.left) and is_number(x.right)
    return isinstance(x, Number) or all(is_number(c) for c in children(x))


# --- printing --------------------------------------------------------------------------------------------------------

_ADDITIVE, _SUM, _PRODUCT, _UNARY, _POSTFIX, _ATOM = range(6)


def _level(x: Expression) -> int:
    if isinstance(x, Binary):
        return _ADDITIVE if x.op in "+-" else _PRODUCT
    if isinstance(x, Sum):
        return _SUM
    if isinstance(x, Negate):
        return _UNARY
    return _POSTFIX if isinstance(x, Transpose | Power) else _ATOM


def number_text(value: float) -> str:
    """A number in the fewest digits that read back the same."""
    return str(int(value)) if value.is_integer() and value < 1e15 else repr(value)


def symbol_text(x: Symbol) -> str:
    """A name with its indices: A_ij, e_i, dA_ij/dS_ik."""
    if not x.indices:
        return x.name
    if x.name == "J" and len(x.indices) == 3:
        i, j, k = x.indices
        return f"dA_{i}{j}/dS_{i}{k}"
    if "/" in x.name:
        of, at = x.name.split("/")
        return f"{of}_{''.join(x.indices[:2])}/{at}_{''.join(x.indices[2:])}"
    return f"{x.name}_{{{''.join(x.indices)}}}" if ":" in x.indices else f"{x.name}_{''.join(x.indices)}"


def _mixed(x: Binary) -> bool:
    """Whether two kinds of matrix product meet: from the left A * B @ C is (A * B) @ C, and parentheses say so."""
    left = x.left
    if not isinstance(left, Binary) or {x.op, left.op} != {"@", "*"}:
        return False
    return not any(map(is_number, (left.left, left.right, x.right)))


def pieces(x: Expression, least: int = _ADDITIVE) -> Iterator[tuple[str, Expression | None]]:
    """The text in pieces, each with the part of the tree whose shape belongs under it, if any does."""
    if _level(x) < least:
        yield "(", None
        yield from pieces(x)
        yield ")", None
    elif isinstance(x, Number):
        yield number_text(x.value), None
    elif isinstance(x, Symbol):
        yield symbol_text(x), x
    elif isinstance(x, Negate):
        yield "-", None
        yield from pieces(x.of, _UNARY)
    elif isinstance(x, Transpose) and isinstance(x.of, Symbol):
        yield f"{symbol_text(x.of)}.T", x
    elif isinstance(x, Transpose):
        yield from pieces(x.of, _POSTFIX)
        yield ".T", x
    elif isinstance(x, Power):
        yield from pieces(x.of, _POSTFIX)
        sign = "-" if x.exponent < 0 else ""
        yield f"**{sign}{number_text(abs(x.exponent))}", None
    elif isinstance(x, Binary):
        own = _level(x)
        yield from pieces(x.left, _UNARY if _mixed(x) else own)
        yield f" {x.op} ", None
        yield from pieces(x.right, own + 1 if own == _ADDITIVE else _UNARY)
    elif isinstance(x, Call):
        yield f"{x.function}(", x
        yield from pieces(x.of)
        yield ")", None
    else:
        yield f"sum_{x.index} ", x
        yield from pieces(x.of, _SUM)


def show(x: Expression | Equation | tuple[Equation, ...]) -> str:
    """The formula as plain text; reading it back gives the same tree.

    >>> show(Binary("@", Transpose(Symbol("dS")), Symbol("Q")))
    'dS.T @ Q'
    """
    if isinstance(x, tuple):
        return ", ".join(show(equation) for equation in x)
    if isinstance(x, Equation):
        return " = ".join(show(side) for side in x.sides)
    return "".join(text for text, _ in pieces(x))

r"""Tokens into a tree: a Pratt parser for plain text and LaTeX alike.

From loose to tight: ``+ -``; the signs ``\odot``, ``\circ`` and ``o``; ``* / @ \cdot`` and factors side by side, from
the left as in NumPy; a sign; ``.T``, ``^T`` and powers. Side by side and ``\cdot`` are the matrix product, as the
documents have it. Nothing is looked up but in ``symbols``, and nothing is run.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from attngrad.formulas import symbols
from attngrad.formulas.code import Code
from attngrad.formulas.latex import STOPS
from attngrad.formulas.readings import Reading
from attngrad.formulas.tokens import Token
from attngrad.formulas.tree import (
    Binary,
    Call,
    Equation,
    Expression,
    Negate,
    Number,
    Power,
    Sum,
    Transpose,
    free_indices,
    is_number,
)

MAX_DEPTH = 60
"""Of nesting, and of the tree; the documents need 12."""

MAX_EQUATIONS = 16
"""Of one text; each is judged alone."""

MAX_EXPONENT = 8.0

_ADDITIVE, _HADAMARD, _PRODUCT = 1, 2, 3

# What each infix sign means: how tightly it binds, and the operation.
_INFIX = {
    "+": (_ADDITIVE, "+"),
    "-": (_ADDITIVE, "-"),
    r"\odot": (_HADAMARD, "*"),
    r"\circ": (_HADAMARD, "*"),
    "o": (_HADAMARD, "*"),
    "*": (_PRODUCT, "*"),
    "/": (_PRODUCT, "/"),
    "@": (_PRODUCT, "@"),
    r"\cdot": (_PRODUCT, "@"),
    r"\times": (_PRODUCT, "@"),
}

_CLOSING = {"(": ")", "[": "]", "{": "}"}
_EQUALS = {"=", r"\equiv", ":=", r"\coloneqq", r"\triangleq"}
_UPDATES = {"+=", r"\leftarrow", r"\gets"}
_TRANSPOSE = {"T", "t", r"\top", r"\intercal"}


class Parser(Code):
    """One text, read once from left to right."""

    def __init__(self, text: str, reading: Reading | None = None) -> None:
        super().__init__(text, reading)
        self.depth = 0

    # --- equations ---------------------------------------------------------------------------------------------------

    def formula(self) -> tuple[Equation, ...]:
        """Equations with commas, semicolons or line breaks between them."""
        found: list[Equation] = []
        self.skip_environment()
        while self.here.kind != "end":
            if len(found) == MAX_EQUATIONS:
                raise self.fault(f"a text must have at most {MAX_EQUATIONS} equations.", self.here)
            found.append(self.equation())
            if self.here.kind != "end" and not self.separator():
                raise self.unexpected("an operator, or the end")
        if not found:
            raise self.fault("the formula must have something in it; got none.", self.here)
        return tuple(found)

    def separator(self) -> bool:
        """Pass over what may stand between two equations, or behind the last."""
        start = self.i
        while self.here.text in {",", ";", ".", r"\\"} or self.skip_environment():
            self.i += self.here.text in {",", ";", ".", r"\\"}
        return self.i > start

    def equation(self) -> Equation:
        """Two sides or more, with '=' between them."""
        start = self.here
        sides = [self.side()]
        stated = self.stated_shape()
        if self.here.text in _UPDATES:
            sides.append(self.update(sides[0]))
        while self.at_equals():
            sides.append(self.side())
            stated = self.stated_shape() or stated
        if len(sides) < 2:
            message = "a formula must say that two things are equal, as in dV = A.T @ dO; found no '='."
            raise self.fault(message, self.here)
        return Equation(tuple(sides), stated, position=start.position)

    def side(self) -> Expression:
        """A side; a vector alone is a column, as L and delta are."""
        return self.as_column(x) if self.is_vector(x := self.expression()) else x

    def update(self, target: Expression) -> Expression:
        r"""x += y and x \leftarrow x + y: x is y, summed over the indices that x has not."""
        arrow = self.take()
        y = self.side()
        if arrow.text != "+=" and isinstance(y, Binary) and y.op == "+" and y.left == target:
            y = y.right
        for index in sorted(free_indices(y) - free_indices(target)):
            y = self.low(Sum(index, y, position=arrow.position))
        return y

    def at_equals(self) -> bool:
        """Pass over '='; a line break before it continues the chain."""
        ahead = self.i + (self.here.text == r"\\")
        if self.tokens[ahead].text not in _EQUALS:
            return False
        self.i = ahead + 1
        return True

    # --- expressions -------------------------------------------------------------------------------------------------

    def expression(self, least: int = _ADDITIVE) -> Expression:
        """An expression whose operators all bind at least as tightly as ``least``."""
        left = self.signed()
        while True:
            token = self.here
            if self.starts_factor(token):
                tightness, op, width = _PRODUCT, "@", 0
            elif token.text in _INFIX and (token.text != "o" or self.is_ring()):
                (tightness, op), width = _INFIX[token.text], 1
            else:
                break
            if tightness < least:
                break
            self.i += width
            # Operators of one tightness go from the left; a factor needs no loop of its own.
            right = self.signed() if tightness == _PRODUCT else self.expression(tightness + 1)
            if op == "@" and (is_number(left) or is_number(right)):
                op = "*"
            left = self.low(Binary(op, left, right, position=token.position))
        return left

    def signed(self) -> Expression:
        """A factor, with signs before it."""
        token = self.here
        if token.text == "+":
            self.i += 1
            return self.deeper(self.signed)
        if token.text == "-":
            self.i += 1
            return Negate(self.deeper(self.signed), position=token.position)
        return self.factor()

    def factor(self) -> Expression:
        """A primary with transposes and powers behind it."""
        x = self.deeper(self.primary)
        while True:
            token = self.here
            if token.text == "." and self.ahead().text in {"T", "mT"}:
                self.i += 2
                x = self.low(self.turned(x, token))
            elif token.text == "." and self.ahead().kind == "name":
                x = self.low(self.method(x))
            elif token.text == "[" and self.ahead().text in {":", "...", "None"}:
                x = self.low(self.new_axis(x))
            elif token.text in {"^", "**"}:
                self.i += 1
                x = self.low(self.superscript(x, token))
            else:
                return x

    def superscript(self, x: Expression, token: Token) -> Expression:
        """What follows ^ or **: a transpose or a literal power."""
        if self.script_is(_TRANSPOSE):
            return self.turned(x, token)
        exponent = self.literal()
        if exponent is None or not abs(exponent) <= MAX_EXPONENT:
            raise self.fault(f"only T, or a number up to {MAX_EXPONENT:g}, may stand up here.", self.here)
        return Power(x, exponent, position=token.position)

    def turned(self, x: Expression, token: Token) -> Expression:
        """x^T; a name that is the other way round in this reading is turned back."""
        if isinstance(x, Transpose) and self.is_turned(x.of):
            return x.of
        return Transpose(x, position=token.position)

    def literal(self) -> float | None:
        """A signed number or fraction, in braces or parentheses or bare; None where there is none."""
        closing = _CLOSING.get(self.here.text)
        self.i += closing is not None
        sign = -1.0 if self.here.text == "-" else 1.0
        self.i += self.here.text == "-"
        if self.here.kind != "number":
            return None
        value = sign * self.number()
        if self.here.text == "/" and closing and self.tokens[self.i + 1].kind == "number":
            self.i += 1
            value /= self.number() or math.nan
        if closing is not None:
            self.expect(closing)
        return value

    def number(self) -> float:
        """A number, finite in float64."""
        token = self.take()
        value = float(token.text)
        if not math.isfinite(value):
            raise self.fault("a number must be finite in float64.", token)
        return value

    # --- primaries ---------------------------------------------------------------------------------------------------

    def starts_factor(self, token: Token) -> bool:
        """Whether a factor begins here, so that it stands side by side with the one before."""
        if token.kind == "name":
            return token.text != "o" or not self.is_ring()
        is_operand = token.kind == "command" and token.text not in STOPS
        return token.kind in {"number", "module"} or token.text in _CLOSING or is_operand

    def is_ring(self) -> bool:
        """Whether the o that comes next is the sign of a product; o_i is a row of O."""
        return self.ahead().text not in {"_", "^"}

    def primary(self) -> Expression:
        """What a factor begins with: a number, a name, a command or parentheses."""
        token = self.here
        if token.kind == "number":
            return Number(self.number(), position=token.position)
        if token.text in _CLOSING:
            self.i += 1
            inner = self.expression()
            self.expect(_CLOSING[token.text])
            return inner
        if token.kind == "name":
            return self.oriented(self.named(self.take()))
        if token.kind == "module":
            return self.library_call()
        if token.kind == "command":
            return self.oriented(self.command())
        raise self.unexpected("a name, a number or '('")

    def named(self, token: Token) -> Expression:
        """A name: a function, a symbol with its indices, a derivative, a sum."""
        word = token.text
        if self.is_fraction_of_differentials(word):
            return self.differentials(token)
        if word == "sum" and self.here.text == "_":
            return self.sum_over(token)
        if word == "d" and self.passes("sigma", "softmax", r"\sigma"):
            return self.argument("dsoftmax", token)
        if word == "d" and self.at_upright_letter():
            return self.gradient(token)
        if self.here.text == "(" and word in self.CALLS:
            return self.call(word, token)
        if word == "e" and self.passes("^"):
            return Call("exp", self.script_expression(), position=token.position)
        function = symbols.function(word)
        if function == "softmax" and self.passes("_"):  # softmax_{row}
            self.subscript()
        if function is not None:
            return self.argument(function, token)
        return self.symbol(word, token)

    def argument(self, function: str, token: Token) -> Expression:
        """The argument of a function: in parentheses, with an axis as NumPy has it, or the next factor."""
        opening = self.here
        if opening.text not in _CLOSING:
            if not self.starts_factor(opening):
                raise self.unexpected(f"'(' after {function}")
            return Call(function, self.factor(), position=token.position)
        self.i += 1
        inner = self.expression()
        if self.here.text == "," and self.ahead().text in self.KEYWORDS:
            return self.reduced(function, inner, self.keywords(), token)
        if self.here.text == ",":
            hint = " Write rowsum or colsum for a sum along an axis." if function in {"sum", "mean"} else ""
            raise self.fault(f"{function} takes one argument.{hint}", self.here)
        self.expect(_CLOSING[opening.text])
        return Call(function, inner, position=token.position)

    def sum_over(self, token: Token) -> Expression:
        r"""sum_i or \sum_{i=1}^{n}, over the product that follows."""
        self.expect("_")
        index = self.sum_index()
        body = self.expression(_HADAMARD)
        return Sum(index, body, position=token.position)

    def symbol(self, word: str, token: Token) -> Expression:
        """A symbol, or a run of them side by side as in QK^T: then the first, and the rest is put back."""
        if symbols.canonical(word) is None and word not in {"W", "dW", "D", "G"}:
            parts = symbols.split(word)
            if parts is None or len(parts) < 2:
                raise self.fault(f"unknown name {word!r}. {symbols.suggestion(word)}", token)
            places = [token.position + len("".join(parts[:i])) for i in range(len(parts))]
            self.put_back(*(Token("name", p, at) for p, at in zip(parts[1:], places[1:], strict=True)))
            word = parts[0]
        found = self.symbol_of(word, token)
        self.drop_parameters(found.name)
        return found

    # --- bounds ------------------------------------------------------------------------------------------------------

    def deeper(self, part: Callable[[], Expression]) -> Expression:
        """``part()``, one level down; the levels are few, so that no text can exhaust the stack."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.fault(f"the formula must be nested at most {MAX_DEPTH} deep.", self.here)
        x = part()
        self.depth -= 1
        return x

    def low(self, x: Expression) -> Expression:
        """x, unless it is too high for those who walk it: a chain of a hundred terms is, without any nesting."""
        if x.height > MAX_DEPTH:
            raise self.fault(f"the formula must have at most {MAX_DEPTH} operations one upon the other.", self.here)
        return x


def parse(text: str, reading: Reading | None = None) -> tuple[Equation, ...]:
    r"""The equations of a text, plain text or LaTeX.

    >>> from attngrad.formulas.tree import show
    >>> show(parse(r"\frac{\partial L}{\partial Q} = \frac{1}{\sqrt{d_k}} \frac{\partial L}{\partial S} \cdot K"))
    'dQ = 1 / sqrt(d_k) * dS @ K'
    """
    return Parser(text, reading).formula()

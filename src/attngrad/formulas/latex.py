r"""The part of the parser that knows LaTeX: commands, fractions, derivatives.

``\frac{\partial L}{\partial S}`` is dS, and so is ``dL/dS`` in plain text. ``\text{softmax}``, ``\mathrm{softmax}`` and
``softmax`` are one word.
"""

from __future__ import annotations

from collections.abc import Callable

from attngrad.formulas import symbols
from attngrad.formulas.scripts import ALPHABETS, LOSS_ALPHABETS, Scripts
from attngrad.formulas.tokens import Token
from attngrad.formulas.tree import Binary, Call, Expression, Symbol, Transpose

_FRACTIONS = {r"\frac", r"\dfrac", r"\tfrac"}
_MARKS = {
    r"\tilde": "tilde",
    r"\widetilde": "tilde",
    r"\bar": "bar",
    r"\overline": "bar",
    r"\dot": "dot",
    **dict.fromkeys((r"\hat", r"\widehat", r"\check"), "hat"),
}
STOPS = {
    *(r"\\", r"\in", r"\equiv", r"\end", r"\begin", r"\odot", r"\circ", r"\cdot", r"\}", r"\times"),
    *(r"\rangle", r"\leftarrow", r"\gets", r"\coloneqq", r"\triangleq"),
}
_SCALED_PRODUCT = Binary("/", Binary("@", Symbol("Q"), Transpose(Symbol("K"))), Call("sqrt", Symbol("d_k")))


class Latex(Scripts):
    """Commands and derivatives; ``Parser`` has the operators."""

    # Those of ``Parser``.
    expression: Callable[..., Expression]
    factor: Callable[[], Expression]
    named: Callable[[Token], Expression]
    sum_over: Callable[[Token], Expression]

    def command(self) -> Expression:
        """A factor that begins with a command."""
        token = self.take()
        if token.text in _FRACTIONS:
            return self.fraction(token)
        if token.text == r"\partial":
            of = self.quantity()
            self.expect("/")
            return self.derivative(of, self.differential(), token)
        if token.text == r"\sum":
            return self.sum_over(token)
        if token.text in _MARKS:
            return self.marked(_MARKS[token.text], token)
        if token.text == r"\langle":
            return self.inner_product(token)
        if token.text in LOSS_ALPHABETS and self.ahead().text in symbols.LOSSES:
            raise self.fault("the loss has no value here, only derivatives; write L for the log-sum-exp.", token)
        if token.text == r"\nabla":
            return self.nabla(token)
        if token.text in ALPHABETS and self.script_is({"1"}):  # \mathbf{1}, \mathbf{1}_n
            return self.one_or_indicator(token)
        if token.text in ALPHABETS:
            word = self.braced_word()
            if word == "d":  # \mathrm{d}Q
                return self.gradient(token)
            return self.named(Token("name", word, token.position))
        word = token.text[1:]
        if symbols.canonical(word) or symbols.function(word) or word in {"Attn", "softmax"}:
            return self.named(Token("name", word, token.position))
        raise self.fault(f"{token.text} is no part of the language here. {symbols.suggestion(word)}", token)

    def marked(self, mark: str, token: Token) -> Expression:
        r"""\dot{Q} is a tangent, and so is \tilde{Q}; \bar{Q} a gradient; \hat{A}, and a mere mark, the name."""
        of = self.braced(self.plain_symbol) if self.here.text == "{" else self.plain_symbol()
        meaning = self.reading.of(mark) if mark in {"tilde", "bar"} else {"dot": "tangent"}.get(mark, "mark")
        name = {"tangent": f"{of.name}_dot", "adjoint": f"d{of.name}", "mark": of.name}[meaning]
        return self.known(name, of.indices, token) if of.indices else self.scripted(name, token)

    def inner_product(self, token: Token) -> Expression:
        r"""\langle x, y \rangle, the sum of x * y."""
        left = self.expression()
        self.expect(",")
        product = Binary("*", left, self.expression(), position=token.position)
        self.expect(r"\rangle")
        if self.passes("_"):  # of Frobenius
            self.subscript()
        return Call("sum", product, position=token.position)

    def one_or_indicator(self, token: Token) -> Expression:
        r"""Behind \mathbf{1}: the column of ones; \mathbb{1}_{i=j} and \mathbb{1}[i=j] are the identity's entries."""
        start = self.i
        self.passes("_")
        opening, i, equals, j, closing = (self.ahead(k) for k in range(5))
        if (opening.text, equals.text, closing.text) in {("{", "=", "}"), ("[", "=", "]")}:
            self.i += 5
            return self.known("I", self.letters([i.text, j.text], token), token)
        if self.i > start:
            self.subscript()
        return Symbol("ones", position=token.position)

    def at_upright_letter(self) -> bool:
        r"""Whether \mathbf{Q} comes next: behind a d it is what the gradient is taken at."""
        return self.here.text in ALPHABETS and symbols.canonical(self.ahead(2).text) is not None

    def gradient(self, token: Token) -> Expression:
        r"""What follows an upright d: \mathrm{d}\mathbf{Q} is dQ."""
        of = self.plain_symbol()
        return self.known(f"d{of.name}", of.indices, token)

    def fraction(self, token: Token) -> Expression:
        r"""\frac{a}{b}: a derivative where differentials stand in it, else a quotient."""
        if self.here.text == "{" and self.at_differential():
            of = self.braced(self.differential)
            return self.derivative(of, self.braced(self.differential), token)
        if self.here.text == "{" and self.ahead().text in {f"d{x}" for x in symbols.LOSSES}:
            self.braced(self.take)
            return self.derivative("L", self.braced(self.plain_differential), token)
        above = self.script_expression()
        return Binary("/", above, self.script_expression(), position=token.position)

    def script_expression(self) -> Expression:
        """{an expression}, or one factor."""
        return self.braced(self.expression) if self.here.text == "{" else self.factor()

    def nabla(self, token: Token) -> Expression:
        r"""\nabla_Q L, which is dQ; \nabla_{W_Q} L."""
        self.expect("_")
        at = self.braced(self.plain_symbol) if self.here.text == "{" else self.plain_symbol()
        self.loss()
        return self.known(f"d{at.name}", at.indices, token)

    def at_differential(self) -> bool:
        r"""Whether \partial x, \mathrm{d}x or d \mathcal{L} stands in the braces that come next."""
        first, second, third = (self.ahead(k).text for k in (1, 2, 3))
        if first == "d":
            return second in LOSS_ALPHABETS or second.removeprefix("\\") in symbols.LOSSES
        return first == r"\partial" or (first in ALPHABETS and (second, third) == ("{", "d"))

    def differential(self) -> str | Symbol:
        r"""\partial x, \mathrm{d}x, d x or dx."""
        if self.here.kind == "name" and self.here.text != "d":
            return self.plain_differential()
        if self.here.text in ALPHABETS and self.ahead(2).text == "d":
            self.take()
            self.braced_word()
        elif not self.passes("d"):
            self.expect(r"\partial")
        return self.quantity()

    def quantity(self) -> str | Symbol:
        """What is differentiated, or at what: "L" for the loss, else a symbol; the scaled product is S."""
        token = self.here
        is_letter = token.text in LOSS_ALPHABETS and self.ahead(2).text in symbols.LOSSES
        if is_letter or token.text.removeprefix("\\") in symbols.LOSSES:
            return self.loss()
        if token.text in {"(", "[", "{"} or token.text in _FRACTIONS:
            inner = self.factor()
            if inner == _SCALED_PRODUCT:
                return Symbol("S", position=token.position)
            raise self.fault("only a name, or Q K^T / sqrt(d_k), may be differentiated at.", token)
        return self.plain_symbol()

    def derivative(self, of: str | Symbol, at: str | Symbol, token: Token) -> Expression:
        """The symbol that a derivative is: dS, a row's Jacobian J_i, or a tensor dZ/dQ."""
        if isinstance(at, str):
            raise self.fault("the loss must stand above the line.", token)
        if isinstance(of, str):
            return self.known(f"d{at.name}", at.indices, token)
        if (of.name, at.name) in {("A", "S"), ("A", "Z")} and of.indices[:1] == at.indices[:1] != ():
            if len(of.indices) == len(at.indices):
                return Symbol("J", (*of.indices, *at.indices[1:]), position=token.position)
        elif len(of.indices) == len(at.indices) in {0, 2} and f"d{of.name}/d{at.name}" in symbols.KNOWN:
            return Symbol(f"d{of.name}/d{at.name}", of.indices + at.indices, position=token.position)
        raise self.fault(f"the derivative of {of.name} at {at.name}, in this form, is not of the list.", token)

    def is_fraction_of_differentials(self, word: str) -> bool:
        """Whether dA_i/dS_i stands here in plain text, without spaces; ``word`` has just been read."""
        j = self.i
        if self.tokens[j].text == "_":
            j = min(j + 2, len(self.tokens) - 2)
        slash, below = self.tokens[j], self.tokens[min(j + 1, len(self.tokens) - 1)]
        return (
            slash.text == "/"
            and below.position == slash.position + 1
            and not self.text[slash.position - 1].isspace()
            and word[:1] == below.text[:1] == "d"
            and (word[1:] in symbols.LOSSES or symbols.canonical(word[1:]) is not None)
            and (symbols.canonical(below.text[1:]) is not None or below.text == "dW")
        )

    def differentials(self, token: Token) -> Expression:
        """dL/dS, dA_i/dS_i, in plain text."""
        word = token.text[1:]
        of = "L" if word in symbols.LOSSES else self.symbol_of(word, token)
        self.expect("/")
        return self.derivative(of, self.plain_differential(), token)

    def plain_differential(self) -> Symbol:
        """The S of dS, in plain text."""
        token = self.take()
        return self.symbol_of(token.text.removeprefix("d"), token)

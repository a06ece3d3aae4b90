r"""The part of the parser that knows code: the calls and methods of NumPy, PyTorch and JAX, and einsum.

``np.sum(x, axis=-1, keepdims=True)`` is rowsum(x). Without ``keepdims`` it is a vector, and beside a matrix a vector
is a row, as it is in NumPy: the commonest slip is found by its shape.
"""

from __future__ import annotations

from attngrad.formulas import symbols
from attngrad.formulas.latex import Latex
from attngrad.formulas.tokens import Token
from attngrad.formulas.tree import Binary, Call, Expression, Symbol, Transpose

_PRODUCTS = {
    **dict.fromkeys(("matmul", "dot", "mm", "bmm"), "@"),
    **dict.fromkeys(("multiply", "mul"), "*"),
}
_INNER = {"inner", "vdot"}
_REDUCTIONS = {"sum": "sum", "mean": "mean", "max": "max", "amax": "max"}
_ALONG_ROWS, _ALONG_COLUMNS = {-1, 1}, {-2, 0}
_TURNS = {"transpose", "swapaxes", "t", "permute"}
_LSE = {"logsumexp", "LSE"}


class Code(Latex):
    """Calls; ``Parser`` has the operators."""

    CALLS = frozenset({*_PRODUCTS, *_INNER, *_LSE, "outer", "einsum", "transpose"})
    KEYWORDS = frozenset({"axis", "dim", "keepdims", "keepdim"})

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.vectors: list[Expression] = []

    # --- vectors -----------------------------------------------------------------------------------------------------

    def is_vector(self, x: Expression) -> bool:
        """Whether x has one axis, as a sum without keepdims has."""
        return any(x is y for y in self.vectors)

    def vector(self, column: Expression, token: Token) -> Expression:
        """A column as a vector of one axis: a row beside matrices."""
        found = Transpose(column, position=token.position)
        self.vectors.append(found)
        return found

    def as_column(self, x: Expression) -> Expression:
        """x[:, None] of a vector; L and delta are columns, and A_i is a row, as it is."""
        if self.is_vector(x) and isinstance(x, Transpose):
            return x.of
        if isinstance(x, Symbol) and len(x.indices) == 1:
            return Transpose(x, position=x.position)
        if (isinstance(x, Symbol) and symbols.KNOWN[x.name][1:] == (symbols.ONE,)) or isinstance(x, Transpose):
            return x
        raise self.fault("a new axis belongs behind a vector, as in np.sum(x, axis=-1)[:, None].", self.here)

    def new_axis(self, x: Expression) -> Expression:
        """x[:, None], x[..., None] or x[None, :]."""
        opening = self.take()
        inside = []
        while not self.passes("]"):
            if self.here.kind == "end":
                raise self.unexpected("']'")
            inside.append(self.take().text)
        if inside in ([":", ",", "None"], ["...", ",", "None"], [":", ",", "np.", "newaxis"]):
            return self.as_column(x)
        if inside == ["None", ",", ":"]:
            column = self.as_column(x)
            return column.of if isinstance(column, Transpose) else Transpose(column, position=opening.position)
        raise self.fault("only [:, None], [..., None] and [None, :] may stand behind a name.", opening)

    # --- calls -------------------------------------------------------------------------------------------------------

    def library_call(self) -> Expression:
        """np.f(x), torch.f(x), F.f(x): an axis may stand without its name."""
        module, token = self.take(), self.take()
        word = token.text
        if self.here.text != "(" or token.kind != "name":
            raise self.fault(f"{module.text}{word} is no part of the language.", module)
        if word in self.CALLS:
            return self.call(word, token)
        if word not in _REDUCTIONS and symbols.function(word) is None:
            raise self.fault(f"{module.text}{word} is no part of the language. {symbols.suggestion(word)}", module)
        self.take()
        x = self.expression()
        return self.reduced(word, x, self.keywords(positional=True), token)

    def call(self, word: str, token: Token) -> Expression:
        """A call of ``CALLS``, whose parenthesis comes next."""
        self.expect("(")
        if word == "einsum":
            return self.einsum(token)
        x = self.expression()
        if word in _LSE:
            return self.reduced(word, x, self.keywords(positional=True), token)
        if word == "transpose":
            self.keywords(positional=True)
            return self.flipped(x)
        self.expect(",")
        y = self.expression()
        self.expect(")")
        return self.product(word, x, y, token)

    def product(self, word: str, x: Expression, y: Expression, token: Token) -> Expression:
        """matmul(x, y) and the like."""
        if word == "outer":
            rows = [a if not self.is_turned(a) else Transpose(a) for a in (x, y)]
            return Binary("@", self.flipped(rows[0]), rows[1], position=token.position)
        product = Binary(_PRODUCTS.get(word, "*"), x, y, position=token.position)
        return Call("sum", product, position=token.position) if word in _INNER else product

    def method(self, x: Expression) -> Expression:
        """x.sum(-1), x.transpose(-2, -1), x.shape[-1]: what stands behind the dot."""
        dot, token = self.take(), self.take()
        word = token.text
        if word in {"shape", "size"} and self.here.text in {"[", "("}:
            return self.size_of(x, dot)
        if self.here.text != "(":
            raise self.fault(f"'.{word}' is no part of the language; only .T is, and calls as .sum(-1).", dot)
        self.take()
        if word in _TURNS:
            self.put_back(Token("symbol", ",", dot.position))
            self.keywords(positional=True)
            return self.flipped(x)
        if word in _PRODUCTS:
            y = self.expression()
            self.expect(")")
            return self.product(word, x, y, token)
        if word == "unsqueeze":
            self.put_back(Token("symbol", ",", dot.position))
            self.keywords(positional=True)
            return self.as_column(x)
        if word in _REDUCTIONS or word in _LSE or symbols.function(word) is not None:
            if self.here.text != ")":
                self.put_back(Token("symbol", ",", dot.position))
            return self.reduced(word, x, self.keywords(positional=True), token)
        raise self.fault(f"'.{word}' is no part of the language. {symbols.suggestion(word)}", dot)

    def keywords(self, positional: bool = False) -> dict[str, int | bool]:
        """What follows the first argument, to the closing parenthesis: axis=-1, keepdims=True, or an axis alone."""
        found: dict[str, int | bool] = {}
        while self.passes(","):
            token = self.here
            if token.text in self.KEYWORDS:
                self.take()
                self.expect("=")
            elif not positional:
                raise self.unexpected("axis=, dim= or keepdims=")
            if token.text.startswith("keep"):
                found["keep"] = self.passes("True") or not self.passes("False")
                continue
            sign = -1 if self.passes("-") else 1
            number = self.take()
            if not number.text.isdecimal() or len(number.text) > 1:
                raise self.fault("an axis must be -1 or 1, for the sum along rows, or -2 or 0.", number)
            found["axis"] = sign * int(number.text)
        self.expect(")")
        return found

    def reduced(self, word: str, x: Expression, keywords: dict[str, int | bool], token: Token) -> Expression:
        """A function along an axis: a column or row where the axis is kept, else a vector."""
        name = _REDUCTIONS.get(word, symbols.function(word) or word)
        place = token.position
        axis = keywords.get("axis")
        if axis is not None and axis not in _ALONG_ROWS | _ALONG_COLUMNS:
            raise self.fault("an axis must be -1 or 1, for the sum along rows, or -2 or 0.", token)
        if name in _LSE:
            return self.reduced("log", self.reduced("sum", Call("exp", x, position=place),
                                {"keep": True, "axis": -1 if axis is None else axis}, token), {}, token)  # fmt: skip
        if name == "softmax" and axis in _ALONG_COLUMNS:
            return Transpose(Call(name, self.flipped(x), position=place), position=place)
        if name not in {"sum", "mean", "max"} or axis is None:
            if name == "max":
                raise self.fault("max needs an axis, as in S.max(-1, keepdims=True).", token)
            return Call(name, x, position=place)
        if axis in _ALONG_ROWS:
            rows = Call(f"row{name}", x, position=place)
            return rows if keywords.get("keep") else self.vector(rows, token)
        if name == "max":
            raise self.fault("max is taken along rows here: axis=-1.", token)
        return Call(f"col{name}", x, position=place)

    def size_of(self, x: Expression, dot: Token) -> Expression:
        """q.shape[-1] and q.size(-1), a size by its name."""
        closing = {"[": "]", "(": ")"}[self.take().text]
        sign = "-" if self.passes("-") else ""
        axis = {"-1": 1, "1": 1, "-2": 0, "0": 0}.get(sign + self.take().text)
        self.expect(closing)
        dims = symbols.KNOWN[x.name] if isinstance(x, Symbol) and not x.indices else ()
        if axis is None or len(dims) != 2 or dims[axis] not in symbols.KNOWN:
            raise self.fault("only the sizes of a named matrix are known, as q.shape[-1].", dot)
        return Symbol(dims[axis], position=dot.position)

    # --- einsum ------------------------------------------------------------------------------------------------------

    def einsum(self, token: Token) -> Expression:
        """An einsum such as "ij,jk->ik", of one operand or two, with batches in all or none of them."""
        pattern = self.take()
        if pattern.kind != "einsum":
            raise self.fault('einsum needs its pattern first, with an arrow, as in einsum("ij,jk->ik", A, V).', pattern)
        left, _, out = pattern.text.strip("\"'").replace(" ", "").replace("...", "").partition("->")
        operands = []
        while self.passes(","):
            operands.append(self.expression())
        self.expect(")")
        terms = _without_batch([*left.split(","), out])
        *inputs, out = terms
        readable = len(inputs) == len(operands) <= 2 and all(1 <= len(set(x)) == len(x) <= 2 for x in inputs)
        if not readable or not set(out) <= set("".join(inputs)) or len(set(out)) != len(out) or "." in "".join(terms):
            raise self.fault(
                "einsum is read for one matrix or two, each letter once in each, and its batches.", pattern
            )
        if len(operands) == 1:
            return self.summed(self.matrix(operands[0], inputs[0], inputs[0]), inputs[0], out, token)
        return self.contracted(operands, inputs, out, token)

    def contracted(self, operands: list[Expression], inputs: list[str], out: str, token: Token) -> Expression:
        """Two operands: a matrix product where they share one letter that goes, else a product entry by entry."""
        first, second = inputs
        letters = "".join(dict.fromkeys(first + second))
        shared = [c for c in first if c in second and c not in out]
        if len(letters) == 3 and len(shared) == 1 and len(out) == 2:
            c = shared[0]
            i, j = first.replace(c, ""), second.replace(c, "")
            x, y = self.matrix(operands[0], first, i + c), self.matrix(operands[1], second, c + j)
            product: Expression = Binary("@", x, y, position=token.position)
            return product if out == i + j else self.flipped(product)
        if len(letters) > 2:
            raise self.fault("einsum is read where two letters stay, or one is summed over.", token)
        x, y = (self.matrix(a, own, letters) for a, own in zip(operands, inputs, strict=True))
        return self.summed(Binary("*", x, y, position=token.position), letters, out, token)

    def matrix(self, x: Expression, own: str, letters: str) -> Expression:
        """x, whose axes have these letters, with its axes in another order; a vector as a column or row."""
        if len(own) == 1:
            column = self.as_column(x)
            return column if letters[0] == own else self.flipped(column)
        return x if own == letters else self.flipped(x)

    def summed(self, x: Expression, letters: str, out: str, token: Token) -> Expression:
        """x with axes ``letters``, summed over those that ``out`` has not, in the order of ``out``."""
        if len(out) == 2 or len(letters) == 1:
            return x if out == letters else self.flipped(x)
        if not out:
            return Call("sum", x, position=token.position)
        if out == letters[0]:
            return self.vector(Call("rowsum", x, position=token.position), token)
        return Call("colsum", x, position=token.position)

    @staticmethod
    def flipped(x: Expression) -> Expression:
        """x^T, without two transposes in a row."""
        return x.of if isinstance(x, Transpose) else Transpose(x, position=x.position)


def _without_batch(terms: list[str]) -> list[str]:
    """The terms of a pattern without the letters of the batch and the heads, which stand in all of them."""
    while max(map(len, terms)) > 2:
        batch = next((c for c in terms[0] if all(c in term for term in terms)), None)
        if batch is None:
            break
        terms = [term.replace(batch, "") for term in terms]
    return terms

r"""The part of the parser that reads names with their scripts, and passes over what has no value.

``W^Q`` and ``W_Q`` are one name, ``d_k`` is a name, ``A_{i,j}`` and ``A_ij`` are entries; ``(\theta)`` behind a name is
dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from attngrad.formulas import symbols
from attngrad.formulas.tokens import Cursor, Token
from attngrad.formulas.tree import Expression, Symbol, Transpose

T = TypeVar("T")
ALPHABETS = {
    rf"\{name}"
    for name in (
        *("text", "textbf", "textit", "textrm", "mathrm", "mathbf", "mathit", "mathcal", "mathscr", "mathbb", "mbox"),
        *("operatorname", "boldsymbol", "bm", "mathsf"),
    )
}
LOSS_ALPHABETS = {r"\mathcal", r"\mathscr"}
_ENVIRONMENTS = {"align", "aligned", "equation", "split", "gather", "gathered"}
_WEIGHTS = {"W", "dW"}
_AMBIGUOUS = {"p", "D", "G"}
_ROW = "r"
"""The index of the row that a, s, p are where they are read as one row."""

_LETTER = re.compile(r"[a-z]'*|:")


class Scripts(Cursor):
    """Symbols and all that stands above, below and behind them."""

    def braced(self, part: Callable[[], T]) -> T:
        """``part()`` in braces."""
        self.expect("{")
        found = part()
        self.expect("}")
        return found

    def braced_word(self) -> str:
        r"""The word in \text{word}."""
        self.expect("{")
        token = self.take()
        if token.kind != "name":
            raise self.fault("expected a word in the braces.", token)
        self.expect("}")
        return token.text

    def plain_symbol(self) -> Symbol:
        r"""A symbol, by its next token and the scripts behind it; \mathbf{Q} is Q."""
        token = self.take()
        return self.symbol_of(self.braced_word() if token.text in ALPHABETS else token.text, token)

    def known(self, name: str, indices: tuple[str, ...], token: Token) -> Symbol:
        """A symbol whose name must be of the list, and have that many axes."""
        if name not in symbols.KNOWN:
            raise self.fault(f"unknown name {name!r}. {symbols.suggestion(name)}", token)
        while indices[-1:] == (":",):  # A_{i:} is A_i
            indices = indices[:-1]
        axes = 0 if symbols.KNOWN[name] == symbols.SCALAR else len(symbols.KNOWN[name])
        if len(indices) > axes:
            raise self.fault(f"{name} must have at most {axes} indices; got {len(indices)}.", token)
        if name in {"e", "p"} and len(indices) != 1:
            raise self.fault(f"{name} must have one index, as in {name}_i.", token)
        return Symbol(name, indices, position=token.position)

    def symbol_of(self, word: str, token: Token) -> Symbol:
        """The symbol that begins with ``word``, with the scripts that follow."""
        if word == "d" and self.here.text == "_":
            return self.size_or_gradient(token)
        if word in _WEIGHTS:
            return self.weight(word, token)
        name = self.reading.of(word) if word in _AMBIGUOUS else symbols.canonical(word)
        if name is None:
            raise self.fault(f"unknown name {word!r}. {symbols.suggestion(word)}", token)
        return self.scripted(name, token, word)

    def scripted(self, name: str, token: Token, word: str = "") -> Symbol:
        r"""A name with what stands below and above it: A_ij, A_dot, S_i^{(j)}, \delta_{ij}, a_j of one row a."""
        indices: tuple[str, ...] = ()
        while True:
            if self.here.text == "_" and not indices:
                self.take()
                script = self.subscript()
                if script == ["dot"]:
                    name = f"{name}_dot"
                else:
                    indices = self.letters(script, token)
            elif self.here.text == "_" and self.upper:
                self.take()
                indices += self.letters(self.subscript(), token)
            elif self.here.text == "^" and (above := self.upper_index()):
                self.upper = True
                indices += above if self.reading.of("upper") == "index" else ()
            else:
                break
        self.upper = False
        if name == "delta" and len(indices) == 2:
            name = self.reading.of("delta_ij")
        return self.known(name, self.of_one_row(word, name, indices), token)

    upper = False
    """Whether the symbol that is being read has an index above."""

    def upper_index(self) -> tuple[str, ...]:
        """Pass over ^{(i)}, ^(i), ^{i} or ^i, if that is next: a small letter, and not t."""
        ahead = [self.ahead(k).text for k in range(1, 6)]
        for opening, closing in ((["{", "("], [")", "}"]), (["("], [")"]), (["{"], ["}"]), ([], [])):
            k = len(opening)
            letter = ahead[k] if k < len(ahead) else ""
            is_letter = len(letter) == 1 and "a" <= letter <= "z" and letter not in "to"
            if is_letter and ahead[:k] == opening and ahead[k + 1 : 2 * k + 1] == closing:
                self.i += 2 * k + 2
                return (letter,)
        return ()

    def of_one_row(self, word: str, name: str, indices: tuple[str, ...]) -> tuple[str, ...]:
        """The indices where a, s, p may be one row, a_j its entry, and q, o the query and output of that row."""
        entries = word in {"a", "s", "p", "z", "da", "ds", "dp", "dz"} and name != "p"
        if (entries and len(indices) < 2) or (word in {"q", "o", "dq", "do"} and not indices):
            return ((_ROW,) if self.reading.of("lower") == "row" else ()) + indices
        if name in {"J", "L", "delta"} and not indices and self.reading.answers.get("lower") == "row":
            return (_ROW,)
        return indices

    def oriented(self, x: Expression) -> Expression:
        """x in the house's convention: A_i is a row there, and a weight (in, out)."""
        return Transpose(x, position=x.position) if self.is_turned(x) else x

    def is_turned(self, x: Expression) -> bool:
        """Whether x is a name that this reading has the other way round."""
        if not isinstance(x, Symbol):
            return False
        if x.name.lstrip("d").startswith("W_") and not x.indices:
            return self.reading.of("weights") == "out_in"
        rest = symbols.KNOWN[x.name][len(x.indices) :]
        is_row = bool(x.indices) and len(rest) == 1 and rest != (symbols.ONE,) and ":" not in x.indices
        return is_row and x.name not in symbols.SIZED and self.reading.of("vectors") == "columns"

    def size_or_gradient(self, token: Token) -> Symbol:
        """d_k, d_v, d_model; or d_Q L, which is dQ."""
        self.expect("_")
        script = "".join(self.subscript())
        if script in {"Q", "K", "V"}:
            self.loss()
            return Symbol(f"d{script}", position=token.position)
        script = {"h": "k", "head": "k"}.get(script, script)
        if script not in {"k", "v", "model"}:
            raise self.fault(f"unknown name 'd_{script}'. Sizes: d_k, d_v, d_model.", token)
        return Symbol(f"d_{script}", position=token.position)

    def loss(self) -> str:
        r"""Pass over the loss, whatever letter it has and however it is written, with its parameters."""
        token = self.take()
        word = self.braced_word() if token.text in ALPHABETS else token.text.removeprefix("\\")
        if word not in symbols.LOSSES:
            raise self.fault(f"expected the loss L; got {word!r}.", token)
        self.drop_theta()
        return "L"

    def weight(self, word: str, token: Token) -> Symbol:
        r"""W_Q, W^Q, and W^{Q^T}, which is its transpose."""
        if not self.passes("_", "^"):
            raise self.unexpected(f"Q, K or V as an index of {word}")
        braced = self.passes("{")
        which = self.take()
        if which.text not in {"Q", "K", "V"}:
            raise self.fault(f"{word} must have Q, K or V as its index.", which)
        transposed = self.passes("^") and self.script_is({"T", "t", r"\top"})
        if braced:
            self.expect("}")
        if transposed:
            if braced:
                self.put_back(Token("symbol", "^", which.position), Token("name", "T", which.position))
            else:
                self.i -= 2
        indices = self.letters(self.subscript(), token) if not transposed and self.passes("_") else ()
        return self.known(f"{word}_{which.text}", indices, token)

    def script_is(self, wanted: set[str]) -> bool:
        r"""Pass over one of these, bare or in braces, if it is next: T, {T}, \mathrm{T}, {\mathrm{T}}."""
        ahead = [self.ahead(k).text for k in range(6)]
        for width in (1, 3, 4, 6):
            inner = ahead[:width]
            if width in {3, 6} and (inner[0], inner[-1]) == ("{", "}"):
                inner = inner[1:-1]
            if len(inner) == 4 and inner[0] in ALPHABETS and (inner[1], inner[3]) == ("{", "}"):
                inner = inner[2:3]
            if len(inner) == 1 and inner[0] in wanted:
                self.i += width
                return True
        return False

    def subscript(self) -> list[str]:
        r"""The words below the line: ij, {i,j}, j', i:, model; \text is read through."""
        if not self.passes("{"):
            token = self.take()
            if token.kind != "name":
                raise self.fault("an index must be a letter.", token)
            return [token.text + self.primes()]
        words: list[str] = []
        while not self.passes("}"):
            token = self.take()
            if token.text in ALPHABETS:
                words.append(self.braced_word())
            elif token.kind == "name":
                words.append(token.text + self.primes())
            elif token.text == ":":
                words.append(":")
            elif token.text != ",":
                raise self.fault("an index must be a letter.", token)
        return words

    def primes(self) -> str:
        r"""Pass over the primes of an index: j', j^\prime, j^{\prime}."""
        if self.here.kind == "prime":
            return self.take().text
        if self.here.text == "^":
            self.i += 1
            if self.script_is({r"\prime"}):
                return "'"
            self.i -= 1
        return ""

    def letters(self, words: list[str], token: Token) -> tuple[str, ...]:
        """Single small letters, the indices."""
        run = "".join(words)
        found = tuple(_LETTER.findall(run))
        if not found or "".join(found) != run:
            raise self.fault(f"an index must be a small letter; got {run!r}.", token)
        return found

    def sum_index(self) -> str:
        r"""The index of \sum_{i=1}^{n}; the bounds are those of the index wherever it is used."""
        braced = self.passes("{")
        token = self.take()
        if len(token.text) != 1 or not "a" <= token.text <= "z":
            raise self.fault("the index of a sum must be one small letter.", token)
        index = token.text + self.primes()
        if braced:
            if self.passes("="):
                self.take()
            self.expect("}")
        if self.passes("^"):
            upper = self.subscript()
            if len(upper) != 1 or len(upper[0]) != 1:
                raise self.fault("the upper bound of a sum must be one letter.", token)
        return index

    # --- what is passed over -----------------------------------------------------------------------------------------

    def drop_theta(self) -> None:
        r"""Pass over (\theta)."""
        if self.here.text == "(" and self.ahead().text in {r"\theta", "theta"} and self.ahead(2).text == ")":
            self.i += 3

    def drop_parameters(self, name: str) -> None:
        r"""Pass over (\theta) behind O, dO and dS, and over (Q, K, V) behind O."""
        if name in {"O", "dO", "dS"}:
            self.drop_theta()
        if name == "O" and [self.ahead(i).text for i in range(7)] == ["(", "Q", ",", "K", ",", "V", ")"]:
            self.i += 7

    def stated_shape(self) -> tuple[str, str] | None:
        r"""The n and d_v of \in \mathbb{R}^{n \times d_v}, if that is printed here."""
        if not self.passes(r"\in"):
            return None
        if not self.passes(r"\bR"):
            self.expect(r"\mathbb")
            self.braced_word()
        self.expect("^")
        return self.braced(self.sizes)

    def sizes(self) -> tuple[str, str]:
        r"""n \times d_v."""
        rows = self.size()
        self.expect(r"\times")
        return rows, self.size()

    def size(self) -> str:
        """n, m, d_k, d_v or d_model."""
        token = self.here
        found = self.plain_symbol()
        if symbols.KNOWN[found.name] != symbols.SCALAR:
            raise self.fault("expected a size.", token)
        return found.name

    def skip_environment(self) -> bool:
        r"""Pass over \begin{align*} and \end{align*}."""
        if self.here.text not in {r"\begin", r"\end"}:
            return False
        token = self.take()
        self.expect("{")
        word = self.take().text
        self.passes("*")
        self.expect("}")
        if word not in _ENVIRONMENTS:
            raise self.fault(f"the environment {word!r} is not of the list.", token)
        return True

r"""Text into tokens, plain text or LaTeX, and a place in a row of them; and the one error that a text can raise.

Marks that only place things (``\left``, ``&``, ``\,``, ``$``) leave no token. Every token knows where it stood, so
that an error can point at it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from attngrad.formulas.readings import Reading
from attngrad.formulas.symbols import BELOW, SIGNS, is_long_name

MAX_LENGTH = 2000
"""Characters of a formula; the longest line of the documents has 400."""


class FormulaError(ValueError):
    """A text that is no formula of this language: what is wrong, and a caret under the place.

    >>> print(FormulaError("unknown name 'dP2'. Did you mean dP?", "dS = dP2 * A", 5))
    audit_formula: unknown name 'dP2'. Did you mean dP?
        dS = dP2 * A
             ^
    """

    WINDOW = 60

    def __init__(self, message: str, text: str, position: int) -> None:
        self.message, self.text, self.position = message, text, position
        # Long texts are cut to a window; what cannot be printed on one line is shown as a question mark.
        start = max(0, position - self.WINDOW)
        shown = "".join(c if c.isprintable() else "?" for c in text[start : position + self.WINDOW])
        head = "..." * (start > 0)
        caret = " " * (4 + len(head) + position - start) + "^"
        super().__init__(f"audit_formula: {message}\n    {head}{shown}\n{caret}")


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of the text: ``kind`` is number, name, module, einsum, command, symbol or end."""

    kind: str
    text: str
    position: int


_PATTERN = re.compile(
    r"""
    (?P<statement>\s*?\n(?=\s*[A-Za-z][\w.]*\s*[+:]?=))
  | (?P<space>\s+|\#[^\n]*|\\(?:tag|label)\{[^{}]*\})
  | (?P<number>(?:[0-9]+(?:\.[0-9]+|\.(?![A-Za-z.]))?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)
  | (?P<module>(?:np|numpy|jnp|jax\.(?:numpy|nn)|(?:torch\.)?nn\.functional|torch|F|math|scipy\.special)\.(?=[a-z]))
  | (?P<long>[A-Za-z][A-Za-z0-9]*(?:\\?_[A-Za-z0-9]+)+)
  | (?P<name>[A-Za-z][A-Za-z0-9]*)
  | (?P<prime>(?<=[a-z])'+)
  | (?P<einsum>(?P<quote>["'])[a-zA-Z.,\s]+->[a-zA-Z.\s]*(?P=quote))
  | (?P<command>\\(?:[A-Za-z]+|[^A-Za-z]))
  | (?P<symbol>\*\*|\.\.\.|:=|\+=|[@*+\-/=()\[\]{},;:^_.&~$])
    """,
    re.VERBOSE,
)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*")

_PLACING = {
    *("&", "~", "$", r"\,", r"\;", r"\:", r"\!", "\\ ", "\\\n", r"\(", r"\)", r"\[", r"\]"),
    *(r"\left", r"\right", r"\big", r"\Big", r"\bigg", r"\Bigg", r"\bigl", r"\bigr", r"\Bigl", r"\Bigr"),
    *(r"\quad", r"\qquad", r"\displaystyle", r"\limits", r"\nonumber"),
}


def tokenize(text: str) -> list[Token]:
    r"""The tokens of ``text``, an ``end`` last; a FormulaError where a character belongs to none.

    >>> [t.text for t in tokenize(r"\frac{1}{2} Q.T")]
    ['\\frac', '{', '1', '}', '{', '2', '}', 'Q', '.', 'T', '']
    """
    if len(text) > MAX_LENGTH:
        raise FormulaError(f"the formula must have at most {MAX_LENGTH} characters; got {len(text)}.", text, MAX_LENGTH)
    tokens: list[Token] = []
    i = 0
    while i < len(text):
        found = _PATTERN.match(text, i)
        if found is None:
            if text[i] == "ᵀ":
                tokens += [Token("symbol", "^", i), Token("name", "T", i)]
            elif text[i] in BELOW:  # a run of letters below the line
                run = re.match(f"[{''.join(BELOW)}]+", text[i:])
                letters = "" if run is None else "".join(BELOW[c] for c in run.group())
                tokens += [Token("symbol", "_", i), Token("name", letters, i)]
                i += len(letters) - 1
            elif text[i] in SIGNS:
                sign = SIGNS[text[i]]
                tokens.append(Token("command" if sign[0] == "\\" else "symbol", sign, i))
            else:
                raise FormulaError(f"the character {text[i]!r} has no meaning here.", text, i)
            i += 1
            continue
        kind, piece, end = found.lastgroup or "", found.group(), found.end()
        if kind == "long":
            kind, piece, end = "name", *_long_name(text, i, piece)
        if kind == "statement":
            tokens += [Token("symbol", ";", i)] * bool(tokens)
        elif kind != "space" and piece not in _PLACING:
            tokens.append(Token(kind, piece, i))
        i = end
    tokens.append(Token("end", "", len(text)))
    return tokens


def _long_name(text: str, i: int, run: str) -> tuple[str, int]:
    """The longest name with underscores that ``run`` begins with, as in grad_scores_ij; else its first word."""
    end = len(run)
    while end > 0:
        word = run[:end].replace("\\", "")
        if is_long_name(word):
            return word, i + end
        end = run.rfind("_", 0, end)
    first = _NAME.match(text, i)
    return ("", i) if first is None else (first.group(), first.end())


class Cursor:
    """The tokens of a text, and the one to be read next."""

    def __init__(self, text: str, reading: Reading | None = None) -> None:
        self.text, self.tokens, self.i = text, tokenize(text), 0
        self.reading = Reading() if reading is None else reading

    @property
    def here(self) -> Token:
        """The next token; the last one is ``end``."""
        return self.tokens[self.i]

    def ahead(self, by: int = 1) -> Token:
        """A later token."""
        return self.tokens[min(self.i + by, len(self.tokens) - 1)]

    def take(self) -> Token:
        """The next token, passed over; the end stays."""
        token = self.here
        self.i += token.kind != "end"
        return token

    def passes(self, *texts: str) -> bool:
        """Pass over one of these, if it is next."""
        if self.here.kind == "end" or self.here.text not in texts:
            return False
        self.i += 1
        return True

    def expect(self, text: str) -> None:
        """Pass over ``text``, which must be next."""
        if not self.passes(text):
            raise self.unexpected(f"'{text}'")

    def put_back(self, *tokens: Token) -> None:
        """Tokens to be read next."""
        self.tokens[self.i : self.i] = tokens

    def fault(self, message: str, token: Token) -> FormulaError:
        """The one error, at a token."""
        return FormulaError(message, self.text, token.position)

    def unexpected(self, wanted: str) -> FormulaError:
        """The error for the next token."""
        got = f"'{self.here.text}'" if self.here.text else "the end"
        return self.fault(f"expected {wanted}; got {got}.", self.here)

"""A place in a row of tokens, and how to complain about it."""

from __future__ import annotations

from attngrad.formulas.tokens import FormulaError, Token, tokenize


class Cursor:
    """The tokens of a text, and the one to be read next."""

    def __init__(self, text: str) -> None:
        self.text, self.tokens, self.i = text, tokenize(text), 0

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

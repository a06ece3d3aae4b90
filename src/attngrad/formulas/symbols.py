"""The words of the language: every name with its shape, other spellings of it, and the functions.

A formula can say nothing else. Sizes: n queries, m keys, d_k features of Q and K, d_v of V; d_model of X where there is
a layer (then m = n). Axes beyond two are indices: ``J_i`` is a matrix, one for each row i.
"""

from __future__ import annotations

import difflib

Dims = tuple[str, ...]

ONE = "1"
SCALAR: Dims = (ONE, ONE)

_N_M, _N_K, _M_K, _M_V, _N_V, _N_1 = ("n", "m"), ("n", "d_k"), ("m", "d_k"), ("m", "d_v"), ("n", "d_v"), ("n", ONE)

SHAPES: dict[str, Dims] = {
    "Q": _N_K,
    "K": _M_K,
    "V": _M_V,
    "Z": _N_M,
    "S": _N_M,
    "A": _N_M,
    "M": _N_M,
    "O": _N_V,
    "L": _N_1,
    "delta": _N_1,
}


def _derivatives(shapes: dict[str, Dims], gradients: str, tangents: str = "") -> dict[str, Dims]:
    """dX and X_dot have the shape of X."""
    return {f"d{x}": shapes[x] for x in gradients.split()} | {f"{x}_dot": shapes[x] for x in tangents.split()}


SHAPES |= _derivatives(SHAPES, "O A S Z Q K V", "Q K V S A O L")
SHAPES |= {"J": ("n", "m", "m"), "p": ("n", "m", ONE)} | dict.fromkeys(("scale", "d_k", "d_v", "n", "m"), SCALAR)

LAYER: dict[str, Dims] = {
    "X": ("n", "d_model"),
    "W_Q": ("d_model", "d_k"),
    "W_K": ("d_model", "d_k"),
    "W_V": ("d_model", "d_v"),
}
LAYER |= _derivatives(LAYER, "X W_Q W_K W_V") | {"d_model": SCALAR}
"""The names of a layer of self-attention, one head: Q = X W_Q and so on."""

# The derivative of a matrix at a matrix has four axes.
SHAPES |= {
    f"d{of}/d{at}": (*SHAPES[of], *SHAPES[at])
    for of, at in (("Z", "Q"), ("Z", "K"), ("S", "Q"), ("S", "K"), ("A", "S"), ("O", "A"), ("O", "V"))
}

# The identity, all ones and basis vectors take the size that their neighbours need; the last two are columns.
SIZED: dict[str, Dims] = {"I": ("?", "?"), "ones": ("?", ONE), "e": ("?", "?", ONE)}

_SPELLINGS = {
    "A": "P weights",
    "dA": "dP dweights",
    "O": "Att Attn Attention Output out",
    "dO": "Lambda dout",
    "dS": "Omega dscores",
    "scale": "gamma",
    "d_k": "d",
    "L": "lse",
    "Q": "q",
    "K": "k",
    "V": "v",
    "S": "scores",
    "dQ": "dq",
    "dK": "dk",
    "dV": "dv",
}
ALIASES = {other: name for name, others in _SPELLINGS.items() for other in others.split()}


FUNCTIONS = {
    "sqrt": "entry by entry",
    "exp": "entry by entry",
    "log": "entry by entry",
    "sum": "over all entries",
    "rowsum": "over each row, a column",
    "colsum": "over each column, a row",
    "mean": "over all entries",
    "rowmean": "over each row, a column",
    "colmean": "over each column, a row",
    "softmax": "over each row; of a column, over the column",
    "dsoftmax": "its Jacobian at a row or column, diag(a) - a a^T",
    "diag": "a matrix with this row or column on its diagonal; of a square matrix, its diagonal as a column",
    "trace": "of a square matrix",
}

FUNCTION_ALIASES = {"sigma": "softmax", "dsigma": "dsoftmax", "tr": "trace", "ln": "log", "Delta": "diag"}

LOSSES = {"L", "l", "ell", "loss", "Loss", "sL"}
"""What stands above the line in dL/dQ."""

KNOWN = SHAPES | LAYER | SIZED


def canonical(name: str) -> str | None:
    """The one spelling of a name, or None for a name that is not of the list."""
    name = ALIASES.get(name, name)
    return name if name in KNOWN and "/" not in name else None


def function(name: str) -> str | None:
    """The one spelling of a function, or None."""
    name = FUNCTION_ALIASES.get(name, name)
    return name if name in FUNCTIONS else None


def split(run: str) -> list[str] | None:
    """A run of capital names, as QK or dSK, in its parts; None where it does not divide."""
    parts: list[str] = []
    while run:
        width = next((w for w in (2, 1) if run[:w] in KNOWN and run[:w][-1].isupper()), 0)
        width = width or (1 if run[0] in "WP" else 0)
        if not width:
            return None
        parts.append(run[:width])
        run = run[width:]
    return parts


def suggestion(name: str) -> str:
    """What an unknown name may have meant, as a sentence."""
    words = [w for w in (*KNOWN, *ALIASES, *FUNCTIONS) if "/" not in w]
    # 0 for O and case are the commonest slips.
    folded = {w.lower().replace("o", "0"): w for w in reversed(words)}
    near = folded.get(name.lower().replace("o", "0")) or next(iter(difflib.get_close_matches(name, words, 1)), None)
    if near:
        return f"Did you mean {near}?"
    shown = " ".join(n for n in SHAPES if "/" not in n)
    return f"Names: {shown}; functions: {' '.join(FUNCTIONS)}."

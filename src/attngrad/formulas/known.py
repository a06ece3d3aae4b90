"""What is known of each name: formulas that are right, and formulas that are wrong and found in print.

``{s}`` stands for the scale, written as the formula under audit writes it. The tests judge every line of both tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

from attngrad.formulas.parser import parse
from attngrad.formulas.tree import Equation, Expression, Symbol, names, renamed, symbol_text

_DS = "A * (dA - rowsum(A * dA))"
_A_DOT = "A * (S_dot - rowsum(A * S_dot))"

RIGHT: dict[str, tuple[str, ...]] = {
    "Z": ("Q @ K.T{s}",),
    "S": ("Q @ K.T{s}",),
    "A": ("softmax(S)", "softmax(Q @ K.T{s})", "exp(S - L)", "exp(S) / rowsum(exp(S))"),
    "O": ("A @ V", "softmax(Q @ K.T{s}) @ V", "softmax(S) @ V", "(A * M) @ V"),
    "L": ("log(rowsum(exp(S)))", "log(rowsum(exp(Q @ K.T{s})))"),
    "delta": ("rowsum(dO * O)", "rowsum(A * dA)"),
    "dA": ("dO @ V.T", "(dO @ V.T) * M"),
    "dS": (_DS, "A * (dA - delta)", "A * (dA - rowsum(dO * O))", "A * (dO @ V.T - rowsum(dO * O))"),
    "dQ": ("dS @ K{s}", f"({_DS}) @ K{{s}}", "dZ @ K{s}", "(A * (dO @ V.T - rowsum(dO * O))) @ K{s}"),
    "dK": ("dS.T @ Q{s}", f"({_DS}).T @ Q{{s}}", "dZ.T @ Q{s}", "(A * (dO @ V.T - rowsum(dO * O))).T @ Q{s}"),
    "dV": ("A.T @ dO", "(A * M).T @ dO"),
    "S_dot": ("(Q_dot @ K.T + Q @ K_dot.T){s}",),
    "L_dot": ("rowsum(A * S_dot)",),
    "A_dot": (_A_DOT, "A * (S_dot - L_dot)"),
    "O_dot": (f"({_A_DOT}) @ V + A @ V_dot", "A_dot @ V + A @ V_dot", "(A_dot * M) @ V + (A * M) @ V_dot"),
    "A_i": ("softmax(S_i)",),
    "A_ij": ("exp(S_ij) / (sum_k exp(S_ik))",),
    "dS_i": ("A_i * (dA_i - rowsum(A_i * dA_i))", "dA_i @ J_i"),
    "dS_ij": ("A_ij * (dA_ij - sum_k A_ik * dA_ik)",),
    "J_i": ("diag(A_i) - A_i.T @ A_i",),
    "dA_ij/dS_ij": ("A_ij * (1 - A_ij)",),
    "dA_ij/dS_ik": ("A_ij * (I_jk - A_ik)",),
    "dW_Q": ("X.T @ dQ", "X.T @ dS @ K{s}"),
    "dW_K": ("X.T @ dK", "X.T @ dS.T @ Q{s}"),
    "dW_V": ("X.T @ dV", "X.T @ A.T @ dO"),
    "dX": ("dQ @ W_Q.T + dK @ W_K.T + dV @ W_V.T",),
    # The derivative of a matrix at a matrix is written entry by entry: these replace both sides.
    "dZ/dQ": ("dZ_ij/dQ_ab = I_ia * K_jb{s}",),
    "dZ/dK": ("dZ_ij/dK_ab = I_ja * Q_ib{s}",),
    "dS/dQ": ("dS_ij/dQ_ab = I_ia * K_jb{s}",),
    "dS/dK": ("dS_ij/dK_ab = I_ja * Q_ib{s}",),
}
RIGHT["dZ"] = RIGHT["dS"]


@dataclass(frozen=True)
class Mistake:
    """A wrong formula for a name, by a short id, and what is wrong with it in words."""

    id: str
    target: str
    text: str
    why: str


_ROW_TERM = "the softmax also subtracts, from every entry of a row, the sum of A * dA along that row"

_OF_SCORES = (
    ("row-term-missing", "dA * A", f"The row term is missing: {_ROW_TERM}."),
    (
        "softmax-diagonal-only",
        "dA * A * (1 - A)",
        f"Only the diagonal of the softmax Jacobian is used: {_ROW_TERM}, not its own entry alone.",
    ),
    (
        "row-term-matrix-product",
        "dA * A - A @ dA.T @ A",
        "A @ dA.T @ A mixes the rows; the softmax acts on each alone, so only the diagonal of A @ dA.T belongs.",
    ),
    ("mean-for-row-sum", "dA * A - rowmean(dA * A)", "A mean of the row is subtracted in place of A * rowsum(A * dA)."),
    ("mean-for-row-sum", "dA * A - mean(dA * A)", "A mean is subtracted in place of A * rowsum(A * dA)."),
    ("mean-for-row-sum", "A * (dA - rowmean(dA))", "The row term is a sum weighted by A, not a mean of dA."),
    ("mean-for-row-sum", "A * (dA - rowmean(A * dA))", "The row term is the row sum of A * dA, not its mean."),
    ("row-term-without-weights", "dA * A - rowsum(dA * A)", "The row term lacks its factor A."),
    ("weights-missing", "dA - rowsum(A * dA)", "The factor A before the difference is missing."),
    ("weights-missing", "dA - A * rowsum(A * dA)", "The first term lacks its factor A."),
    (
        "row-term-over-columns",
        "A * (dA - colsum(A * dA))",
        "The sum runs down the columns; it must run along each row.",
    ),
    ("sum-over-all", "A * (dA - sum(A * dA))", "The sum runs over all rows; it must run along each row alone."),
    ("dweights-for-dscores", "dA", "dA is the gradient behind the softmax; its Jacobian is skipped."),
)

_SHARES = ("dQ @ W_Q.T", "dK @ W_K.T", "dV @ W_V.T")

MISTAKES: tuple[Mistake, ...] = (
    *(Mistake(id_, "dS", text, why) for id_, text, why in _OF_SCORES),
    *(Mistake(id_, "dQ", f"({text}) @ K{{s}}", f"In its dS: {why}") for id_, text, why in _OF_SCORES),
    *(Mistake(id_, "dK", f"({text}).T @ Q{{s}}", f"In its dS: {why}") for id_, text, why in _OF_SCORES),
    Mistake("scale-missing", "A", "softmax(Q @ K.T)", "The scale 1/sqrt(d_k) is missing under the softmax."),
    Mistake("scale-by-d", "A", "softmax(Q @ K.T / d_k)", "The scale is 1/sqrt(d_k), not 1/d_k."),
    Mistake("softmax-wrong-axis", "A", "softmax(S.T).T", "The softmax runs down the columns; it must run along rows."),
    Mistake("scale-missing", "O", "softmax(Q @ K.T) @ V", "The scale 1/sqrt(d_k) is missing under the softmax."),
    Mistake("softmax-skipped", "O", "S @ V", "The softmax is missing."),
    Mistake("log-missing", "L", "rowsum(exp(S))", "The logarithm is missing."),
    Mistake("lse-base-2", "L", "log(rowsum(exp(S))) / log(2)", "The logarithm is in base 2; it must be natural."),
    Mistake("row-term-missing", "A_dot", "A * S_dot", "The row term is missing: subtract A * rowsum(A * S_dot)."),
    Mistake("row-term-missing", "dS_ij", "A_ij * dA_ij", f"The row term is missing: {_ROW_TERM}."),
    Mistake(
        "softmax-diagonal-only",
        "dS_ij",
        "A_ij * (1 - A_ij) * dA_ij",
        "Only the diagonal of the softmax Jacobian is used.",
    ),
    Mistake(
        "diagonal-missing", "dA_ij/dS_ik", "-A_ij * A_ik", "Right for j != k only; for j = k there is A_ij beside."
    ),
    *(
        Mistake("input-gradient-dropped", "dX", " + ".join(shares), "X is read by Q, K and V: three gradients add up.")
        for shares in (*combinations(_SHARES, 1), *combinations(_SHARES, 2))
    ),
)


def scale_style(used: set[str], scale: float | None) -> str:
    """How the scale is written behind a product: by d_k, by name, or not at all where it is 1."""
    if scale is not None:
        return "" if scale == 1.0 else " * scale"
    return " * scale" if "scale" in used else " / sqrt(d_k)"


def _canonical(target: Symbol) -> tuple[str, dict[str, str]]:
    """The target in the letters i, j, k, and what each letter of these tables is in the text.

    An index of a sum takes a letter that the text does not use.
    """
    distinct = list(dict.fromkeys(target.indices))
    forward = dict(zip(distinct, "ijkl", strict=False))
    free = [c for c in "ijklabcuvw" if c not in distinct]
    back = {c: free.pop(0) for c in "ijklab" if c not in forward.values()} if distinct else {}
    renamed = Symbol(target.name, tuple(forward[i] for i in target.indices))
    return symbol_text(renamed), back | {new: old for old, new in forward.items()}


def right_forms(target: Symbol, style: str) -> list[Equation]:
    """The right formulas for a name, in the letters of its indices."""
    key, back = _canonical(target)
    found = []
    for form in RIGHT.get(key, ()):
        (equation,) = parse(form.replace("{s}", style) if "=" in form else f"{key} = {form.replace('{s}', style)}")
        found.append(Equation(tuple(renamed(side, back) for side in equation.sides)))
    return found


def nearest_right_forms(target: Symbol, used: set[str], style: str) -> list[Equation]:
    """The right formulas, those first that speak in the names that are used, with M where it is, and few others."""
    forms = [f for f in right_forms(target, style) if "M" in used or "M" not in names(*f.sides)]

    def distance(form: Equation) -> tuple[bool, int]:
        own = names(*form.sides[1:])
        return "M" in used and "M" not in own, len(own ^ (used - {target.name}))

    return sorted(forms, key=distance)


def mistakes_of(target: Symbol, style: str) -> list[tuple[Mistake, Expression]]:
    """The known wrong formulas for a name, with their right sides."""
    key, back = _canonical(Symbol("dS", target.indices) if target.name == "dZ" else target)
    own = [m for m in MISTAKES if m.target == key]
    return [(m, renamed(parse(f"{key} = {m.text.replace('{s}', style)}")[0].sides[1], back)) for m in own]

"""One table of every step: its matrix formula, and the formula of one entry, which ``explain`` evaluates.

The terminal, LaTeX, JSON and the page all read this table; the page carries it along and reads it again in JavaScript.
A row is its name and letters, and the formula of the matrix; below it stands that of an entry; ``if`` says what it
needs. What is given has no entry. Stages and numbers are those of the table of steps.

Braces choose by flag: ``{cap?cap(Z):Z}`` is ``cap(Z)`` where a softcap is given and ``Z`` elsewhere. Entry formulas are
sums of products, ``scale sum_i dS[ij] Q[id]``, with an optional function around the whole. Letters: i query, j key, d
feature of q and k, e feature of v, m feature of the layer, n feature of all heads together, p the feature that turns
with d (RoPE), h head, b batch. Numbers are those of docs/notation.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Set
from typing import NamedTuple

from attngrad.reference.table import STEPS, symbols


class Rule(NamedTuple):
    """How one step comes about. ``letters`` are those of an entry; a rule without ``entry`` is an input."""

    name: str
    number: str
    stage: str
    letters: str
    formula: str
    entry: str = ""
    needs: str = ""


STAGES = {
    "forward": "Forward",
    "backward": "Backward: the VJP",
    "tangent": "Forward mode: the JVP",
    "second": "Second order: the HVP",
}

_TABLE = """
Q[id]: queries
K[jd]: keys
V[je]: values
bias[ij]: added to the scores  if bias
sigma[h]: one logit per head, the sink  if sinks
M[ij]: 0 where dropped, else 1/(1 - rate)  if keep
Z[ij] = scale Q K^T
    scale sum_d Q[id] K[jd]
S[ij] = {cap?cap(Z):Z}{bias? + bias:}{hidden?, -inf where hidden:}
    {cap?cap(Z[ij]):Z[ij]}{bias? + bias[ij]:}
L[i] = log(rowsum(exp(S)){sinks? + exp(sigma):})
    log sum_j exp(S[ij]){sinks? + exp(sigma[h]):}
A[ij] = exp(S - L)
    exp S[ij] - L[i]
sink[i] = exp(sigma - L)  if sinks
    exp sigma[h] - L[i]
O[ie] = {keep?(A o M):A} V
    sum_j A[ij] {keep?M[ij] :}V[je]
dO[ie]: the loss gradient at O, given
dL[i]: the loss gradient at L, given  if dlse
dV[je] = {keep?(A o M):A}^T dO{group?, over the group:}
    sum_i A[ij] {keep?M[ij] :}dO[ie]
dA[ij] = {keep?(dO V^T) o M:dO V^T}
    sum_e dO[ie] V[je]{keep? M[ij]:}
delta[i] = rowsum(dO o O){dlse? - dL:}
    sum_e dO[ie] O[ie]{dlse? - dL[i]:}
dS[ij] = A o (dA - delta)
    A[ij] dA[ij] - A[ij] delta[i]
dbias[ij] = dS, summed over what bias is broadcast along  if bias
    sum_* dS[ij]
dsigma[h] = -sum(sink o delta)  if sinks
    - sum_bi sink[i] delta[i]
dZ[ij] = {cap?dS o cap'(Z):dS}
    dS[ij]{cap? cap'(Z[ij]):}
dQ[id] = scale {cap?dZ:dS} K
    scale sum_j {cap?dZ:dS}[ij] K[jd]
dK[jd] = scale {cap?dZ:dS}^T Q{group?, over the group:}
    scale sum_i {cap?dZ:dS}[ij] Q[id]
Q_dot[id]: the direction of Q, given
K_dot[jd]: the direction of K, given
V_dot[je]: the direction of V, given
bias_dot[ij]: the direction of bias, given  if bias_dot
sigma_dot[h]: the direction of sigma, given  if sinks_dot
Z_dot[ij] = scale (Q_dot K^T + Q K_dot^T)
    scale sum_d Q_dot[id] K[jd] + sum_d Q[id] K_dot[jd]
S_dot[ij] = {cap?cap'(Z) o Z_dot:Z_dot}{bias_dot? + bias_dot:}{hidden?, 0 where hidden:}
    {cap?cap'(Z[ij]) :}Z_dot[ij]{bias_dot? + bias_dot[ij]:}
L_dot[i] = rowsum(A o S_dot){sinks_dot? + sink o sigma_dot:}
    sum_j A[ij] S_dot[ij]{sinks_dot? + sink[i] sigma_dot[h]:}
A_dot[ij] = A o (S_dot - L_dot)
    A[ij] S_dot[ij] - A[ij] L_dot[i]
O_dot[ie] = {keep?(A_dot o M):A_dot} V + {keep?(A o M):A} V_dot
    sum_j A_dot[ij] {keep?M[ij] :}V[je] + sum_j A[ij] {keep?M[ij] :}V_dot[je]
dO_dot[ie]: the direction of dO, given
dL_dot[i]: the direction of dL, given  if dlse_dot
delta_dot[i] = rowsum(dO_dot o O + dO o O_dot){dlse_dot? - dL_dot:}
    sum_e dO_dot[ie] O[ie] + sum_e dO[ie] O_dot[ie]{dlse_dot? - dL_dot[i]:}
dA_dot[ij] = {keep?(dO_dot V^T + dO V_dot^T) o M:dO_dot V^T + dO V_dot^T}
    sum_e dO_dot[ie] V[je]{keep? M[ij]:} + sum_e dO[ie] V_dot[je]{keep? M[ij]:}
dS_dot[ij] = A_dot o (dA - delta) + A o (dA_dot - delta_dot)
    A_dot[ij] dA[ij] - A_dot[ij] delta[i] + A[ij] dA_dot[ij] - A[ij] delta_dot[i]
dZ_dot[ij] = {cap?dS_dot o cap'(Z) + dS o cap''(Z) o Z_dot:dS_dot}
    dS_dot[ij]{cap? cap'(Z[ij]) + dS[ij] cap''(Z[ij]) Z_dot[ij]:}
dQ_dot[id] = scale ({cap?dZ_dot:dS_dot} K + {cap?dZ:dS} K_dot)
    scale sum_j {cap?dZ_dot:dS_dot}[ij] K[jd] + sum_j {cap?dZ:dS}[ij] K_dot[jd]
dK_dot[jd] = scale ({cap?dZ_dot:dS_dot}^T Q + {cap?dZ:dS}^T Q_dot){group?, over the group:}
    scale sum_i {cap?dZ_dot:dS_dot}[ij] Q[id] + sum_i {cap?dZ:dS}[ij] Q_dot[id]
dV_dot[je] = {keep?(A_dot o M):A_dot}^T dO + {keep?(A o M):A}^T dO_dot{group?, over the group:}
    sum_i A_dot[ij] {keep?M[ij] :}dO[ie] + sum_i A[ij] {keep?M[ij] :}dO_dot[ie]
dbias_dot[ij] = dS_dot, summed as dbias  if bias
    sum_* dS_dot[ij]
dsigma_dot[h] = -sum(sink o ({sinks_dot?(sigma_dot - L_dot):-L_dot} o delta + delta_dot))  if sinks
    {sinks_dot?- sum_bi sink[i] sigma_dot[h] delta[i] :}+ sum_bi sink[i] L_dot[i] delta[i] - sum_bi sink[i] delta_dot[i]
"""

_ROW = re.compile(r"(\w+)\[(\w+)\](?: =|:) (.*?)(?:  if (\w+))?")
_STAGE = {symbol: stage for stage in STAGES for symbol in symbols((stage,)).values()}
_NUMBER = {step.symbol: step.number for step in STEPS.values()}


def _read(table: str) -> tuple[Rule, ...]:
    rules: list[Rule] = []
    for line in table.strip().splitlines():
        if row := _ROW.fullmatch(line):
            name, letters, formula, needs = row.groups("")
            rules.append(Rule(name, "", _STAGE[name], letters, formula, needs=needs))
        else:
            rules[-1] = rules[-1]._replace(number=_NUMBER[rules[-1].name], entry=line.strip())
    return tuple(rules)


RULES = _read(_TABLE)

KEY_SIDE = frozenset(f"{a}{b}{c}" for a in ("", "d") for b in "KV" for c in ("", "_dot", "_in")) | {"cos_k", "sin_k"}
"""Steps with one matrix per key head; all others with heads have one per query head."""

_FLAT = ("X", "Y", "W", "b")


def is_flat(name: str) -> bool:
    """Whether a step has no heads: X, Y, W_q, b_q and their gradients.

    >>> is_flat("dX_k"), is_flat("db_q"), is_flat("bias"), is_flat("delta")
    (True, True, False, False)
    """
    return name.removeprefix("d").split("_")[0] in _FLAT


_CHOICE = re.compile(r"\{(\w+)\?([^:}]*):([^}]*)\}")


def choose(template: str, flags: Set[str]) -> str:
    """``template`` with its braces resolved.

    >>> choose("{cap?cap(Z):Z}{bias? + bias:}", {"bias"})
    'Z + bias'
    """
    return _CHOICE.sub(lambda m: m[2] if m[1] in flags else m[3], template)


def resolve(rules: Iterable[Rule], flags: Set[str]) -> dict[str, Rule]:
    """The rules that apply under ``flags``, by name, their braces resolved; of two with one name the last."""
    found = {}
    for rule in rules:
        if not rule.needs or rule.needs in flags:
            found[rule.name] = rule._replace(formula=choose(rule.formula, flags), entry=choose(rule.entry, flags))
    return found

"""Document 003, an explicit formula for the gradient, Omega: right throughout, for scale 1."""

from __future__ import annotations

import numpy as np

from attngrad import reference
from attngrad._options import Array
from attngrad.errata._case import Head, along, softmax
from attngrad.errata._claim import Claim, Entry, entry, figure, relative_error

# The document sums e_i (...)^T over the rows i; p_i = K Q^T e_i, sigma is the softmax, dsigma its Jacobian, and
# Lambda = dL/dAtt = dout. Its three inputs share one shape; the formulas hold for T != S and D != E too, as here.


def _unit(i: int, n: int) -> Array:
    """e_i, as a column."""
    return np.eye(n)[:, [i]]


def _sigma(h: Head, i: int) -> Array:
    """sigma(p_i), as a column."""
    return softmax(h.k @ h.q.T @ _unit(i, len(h.q))[:, 0])[:, None]


def _out(h: Head) -> Array:
    return sum((_unit(i, len(h.q)) @ _sigma(h, i).T @ h.v for i in range(len(h.q))), np.zeros_like(h.dout))


def _moved(h: Head, p_dot: Array) -> Array:
    """sum_i e_i [dsigma(p_i) p_dot_i]^T V, for p_dot_i the columns of p_dot."""
    n = len(h.q)
    rows = [_unit(i, n) @ (h.jacobian[i] @ p_dot[:, [i]]).T @ h.v for i in range(n)]
    return sum(rows, np.zeros_like(h.dout))


def _d_v(h: Head) -> Array:
    n = len(h.q)
    return sum((_unit(i, n) @ _sigma(h, i).T @ h.v_dot for i in range(n)), np.zeros_like(h.dout))


def _projected(h: Head) -> list[Array]:
    """e_i e_i^T Lambda V^T dsigma(p_i), for each i."""
    n = len(h.q)
    return [_unit(i, n) @ _unit(i, n).T @ h.dout @ h.v.T @ h.jacobian[i] for i in range(n)]


def _omega(h: Head) -> Array:
    return sum(_projected(h), np.zeros_like(h.s))


def _omega_expanded(h: Head) -> Array:
    sigmas = [_sigma(h, i) for i in range(len(h.q))]
    return np.stack([h.dout[i] @ h.v.T @ (np.diag(x[:, 0]) - x @ x.T) for i, x in enumerate(sigmas)])


def _dv(h: Head) -> Array:
    n = len(h.q)
    return sum((_sigma(h, i) @ _unit(i, n).T @ h.dout for i in range(n)), np.zeros_like(h.v))


def _dq_chain(h: Head) -> Array:
    """<d_Q Att Q~, P>, line by line: four forms."""
    n, p, q_dot = len(h.q), h.dout, h.q_dot
    e = [_unit(i, n) for i in range(n)]
    ee, j = [x @ x.T for x in e], h.jacobian
    lines = [
        [np.sum(e[i] @ (j[i] @ h.k @ q_dot.T @ e[i]).T @ h.v * p) for i in range(n)],
        [np.sum(ee[i] @ q_dot @ h.k.T @ j[i].T @ h.v * p) for i in range(n)],
        [np.trace(h.v.T @ j[i] @ h.k @ q_dot.T @ ee[i] @ p) for i in range(n)],
        [np.trace(q_dot.T @ ee[i] @ p @ h.v.T @ j[i] @ h.k) for i in range(n)],
        [np.sum(q_dot * (ee[i] @ p @ h.v.T @ j[i] @ h.k)) for i in range(n)],
    ]
    return np.sum(lines, axis=1)


def _dk_chain(h: Head) -> Array:
    """<d_K Att K~, P>, line by line."""
    n, p, k_dot = len(h.q), h.dout, h.k_dot
    e = [_unit(i, n) for i in range(n)]
    ee, j = [x @ x.T for x in e], h.jacobian
    lines = [
        [np.sum(e[i] @ (j[i] @ k_dot @ h.q.T @ e[i]).T @ h.v * p) for i in range(n)],
        [np.sum(ee[i] @ h.q @ k_dot.T @ j[i].T @ h.v * p) for i in range(n)],
        [np.trace(h.v.T @ j[i] @ k_dot @ h.q.T @ ee[i] @ p) for i in range(n)],
        [np.trace(h.q.T @ ee[i] @ p @ h.v.T @ j[i] @ k_dot) for i in range(n)],
        [np.trace(k_dot.T @ j[i].T @ h.v @ p.T @ ee[i] @ h.q) for i in range(n)],
        [np.sum(k_dot * (j[i].T @ h.v @ p.T @ ee[i] @ h.q)) for i in range(n)],
    ]
    return np.sum(lines, axis=1)


def _dv_chain(h: Head) -> Array:
    """<d_V Att V~, P>, line by line."""
    n, p = len(h.q), h.dout
    e, sigma = [_unit(i, n) for i in range(n)], [_sigma(h, i) for i in range(n)]
    lines = [
        [np.sum(e[i] @ sigma[i].T @ h.v_dot * p) for i in range(n)],
        [np.sum(h.v_dot * (sigma[i] @ e[i].T @ p)) for i in range(n)],
    ]
    return np.sum(lines, axis=1)


def _scaled(h: Head) -> str:
    """What becomes of the boxed formula where the scale is 1/sqrt(d), as it usually is."""
    scale = h.q.shape[-1] ** -0.5
    usual = Head(h.q, h.k, h.v, h.dout, scale, np.random.default_rng(0))
    truth = (usual.dq, usual.dk, usual.dv)
    printed = relative_error((_omega(h) @ h.k, _omega(h).T @ h.q, _dv(h)), truth)
    adapted = relative_error(reference.per_row_gradients(h.q, h.k, h.v, h.dout, scale), truth)
    return (
        f"for scale 1; for 1/sqrt(d) it is wrong as it stands [{figure(printed)}], and right with "
        f"p_i = K Q^T e_i / sqrt(d) and (Omega K, Omega^T Q) / sqrt(d) [{figure(adapted)}]"
    )


def _along_q(h: Head) -> Array:
    return along(lambda q: h.out(q=q), (h.q, h.q_dot))


def _along_k(h: Head) -> Array:
    return along(lambda k: h.out(k=k), (h.k, h.k_dot))


def _along_v(h: Head) -> Array:
    return along(lambda v: h.out(v=v), (h.v, h.v_dot))


def _along_all(h: Head) -> Array:
    return along(lambda q, k, v: h.out(q, k, v), (h.q, h.q_dot), (h.k, h.k_dot), (h.v, h.v_dot))


ENTRIES: tuple[Entry, ...] = (
    entry(
        "003-1",
        "definition",
        "attention, row by row, without a scale",
        "Att = sigma(Q K^T) V = sum_i e_i sigma(K Q^T e_i)^T V",
        Claim(
            Head.unit,
            _out,
            lambda h: h.out(),
            evidence=lambda h: (
                "for scale 1; attention with 1/sqrt(d) is another function "
                f"[{figure(relative_error(_out(h), reference.attention(h.q, h.k, h.v)))}]"
            ),
        ),
    ),
    entry(
        "003-2",
        "total derivative",
        "the total derivative is the sum of the partial ones",
        "dAtt = d_Q Att Q~ + d_K Att K~ + d_V Att V~",
        Claim(Head.unit, lambda h: _moved(h, h.k @ h.q_dot.T) + _moved(h, h.k_dot @ h.q.T) + _d_v(h), _along_all),
    ),
    entry(
        "003-3",
        "partial derivatives",
        "the partial derivative along Q~",
        "d_Q Att Q~ = sum_i e_i [dsigma(p_i) K Q~^T e_i]^T V",
        Claim(Head.unit, lambda h: _moved(h, h.k @ h.q_dot.T), _along_q),
    ),
    entry(
        "003-4",
        "partial derivatives",
        "the partial derivative along K~",
        "d_K Att K~ = sum_i e_i [dsigma(p_i) K~ Q^T e_i]^T V",
        Claim(Head.unit, lambda h: _moved(h, h.k_dot @ h.q.T), _along_k),
    ),
    entry(
        "003-5",
        "partial derivatives",
        "the partial derivative along V~",
        "d_V Att V~ = sum_i e_i sigma(p_i)^T V~",
        Claim(Head.unit, _d_v, _along_v),
    ),
    entry(
        "003-6",
        "d_Q L",
        "every line of the trace computation for Q",
        "<d_Q Att Q~, P> = ... = sum_i <Q~, e_i e_i^T P V^T dsigma(p_i) K>",
        Claim(Head.unit, _dq_chain, lambda h: np.full(5, h.loss(_along_q(h)))),
    ),
    entry(
        "003-7",
        "d_Q L",
        "the gradient at Q",
        "d_Q L = sum_i e_i e_i^T Lambda V^T dsigma(p_i) K",
        Claim(Head.unit, lambda h: sum((x @ h.k for x in _projected(h)), np.zeros_like(h.q)), lambda h: h.dq),
    ),
    entry(
        "003-8",
        "d_K L",
        "every line of the trace computation for K",
        "<d_K Att K~, P> = ... = sum_i <K~, dsigma(p_i)^T V P^T e_i e_i^T Q>",
        Claim(Head.unit, _dk_chain, lambda h: np.full(6, h.loss(_along_k(h)))),
    ),
    entry(
        "003-9",
        "d_K L",
        "the gradient at K",
        "d_K L = sum_i dsigma(p_i)^T V Lambda^T e_i e_i^T Q",
        Claim(Head.unit, lambda h: sum((x.T @ h.q for x in _projected(h)), np.zeros_like(h.k)), lambda h: h.dk),
    ),
    entry(
        "003-10",
        "d_V L",
        "every line of the trace computation for V",
        "<d_V Att V~, P> = ... = sum_i <V~, sigma(p_i) e_i^T P>",
        Claim(Head.unit, _dv_chain, lambda h: np.full(2, h.loss(_along_v(h)))),
    ),
    entry(
        "003-11",
        "d_V L",
        "the gradient at V",
        "d_V L = sum_i sigma(p_i) e_i^T Lambda",
        Claim(Head.unit, _dv, lambda h: h.dv),
    ),
    entry(
        "003-12",
        "boxed result",
        "the whole gradient, with one Omega for Q and K",
        "dL = (Omega K, Omega^T Q, sum_i sigma(p_i) e_i^T Lambda)",
        Claim(
            Head.unit,
            lambda h: (_omega(h) @ h.k, _omega(h).T @ h.q, _dv(h)),
            lambda h: (h.dq, h.dk, h.dv),
            evidence=_scaled,
        ),
    ),
    entry(
        "003-13",
        "boxed result",
        "Omega is the gradient at the scores",
        "Omega = sum_i e_i e_i^T Lambda V^T dsigma(p_i)",
        Claim(Head.unit, _omega, lambda h: h.ds),
    ),
    entry(
        "003-14",
        "matrix form",
        "Omega, one row below the other",
        "row i of Omega = e_i^T Lambda V^T dsigma(p_i)",
        Claim(
            Head.unit,
            lambda h: np.stack([_unit(i, len(h.q))[:, 0] @ h.dout @ h.v.T @ j for i, j in enumerate(h.jacobian)]),
            lambda h: h.ds,
        ),
    ),
    entry(
        "003-15",
        "expanded form",
        "Omega with the softmax Jacobian written out",
        "row i of Omega = e_i^T Lambda V^T (diag(sigma(p_i)) - sigma(p_i) sigma(p_i)^T)",
        Claim(Head.unit, _omega_expanded, lambda h: h.ds),
    ),
)

"""Document 000, a note on dQ and dK: the chain rule stops before the softmax."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from attngrad._options import Array
from attngrad.errata._case import Head, complex_step, rowsum, softmax
from attngrad.errata._claim import Claim, Entry, Reading, entry, figure, relative_error


def scaled_softmax(h: Head) -> Array:
    """softmax(Q K^T / sqrt(d))."""
    return softmax(h.q @ h.k.T / np.sqrt(h.q.shape[-1]))


BEFORE_SCALE = Reading("the scores before scale and softmax", scaled_softmax, lambda h: h.a)
"""Of a Q K^T that is called the scores, and to which the softmax is then applied."""

# Z = Q K^T and its derivatives, which have four indices: dZ_ij / dQ_ab and dZ_ij / dK_ab.


def _dz_dq(h: Head) -> Array:
    return complex_step(lambda q: q @ h.k.T, h.q)


def _dz_dk(h: Head) -> Array:
    return complex_step(lambda k: h.q @ k.T, h.k)


def _dz(h: Head) -> Array:
    return complex_step(lambda z: h.loss(softmax(h.scale * z) @ h.v), h.q @ h.k.T)


def _right_dz(h: Head) -> Array:
    """A o (dA - rowsum(A o dA)) / sqrt(d)."""
    return h.scale * h.a * (h.da - rowsum(h.a * h.da))


def _rows(h: Head) -> Array:
    """True dZ_i/dQ_i, the i-th rows alone, ``(T, S, D)``."""
    return np.stack([_dz_dq(h)[i, :, i, :] for i in range(len(h.q))])


def _columns(h: Head) -> Array:
    """True derivative of column j of Z at row j of K, ``(S, T, D)``."""
    return np.stack([_dz_dk(h)[:, j, j, :] for j in range(len(h.k))])


def _block_of_dz_dk(h: Head) -> str:
    error = relative_error(np.broadcast_to(h.q, _columns(h).shape), _columns(h))
    return f"in the layout in which dZ/dQ is K it is Q [{figure(error)}], and the note insists on K, not K^T"


def _chain(h: Head) -> str:
    contracted = relative_error(np.einsum("ij,ijab->ab", _dz(h), _dz_dq(h)), h.dq)
    scale = relative_error(h.scale * h.ds, _dz(h))
    return (
        f"with the note's K for dZ/dQ, and so with all four indices [{figure(contracted)}]; the scale is inside: "
        f"dL/dZ = dS / sqrt(d) [{figure(scale)}]"
    )


def _after_the_softmax(product: Callable[[Array, Head], Array], truth: Callable[[Head], Array]) -> Claim[Head]:
    """The claim that dL/dA, times a factor, is the gradient; the same product of dL/dZ is."""
    return Claim(
        Head.random,
        lambda h: product(h.da, h),
        truth,
        lambda h: product(_right_dz(h), h),
        lambda h: (
            "with dL/dS in place of dL/dA the scale is still missing "
            f"[{figure(relative_error(product(h.ds, h), truth(h)))}]"
        ),
    )


ENTRIES: tuple[Entry, ...] = (
    entry(
        "000-1",
        "first formula",
        "the attention weights",
        "A = softmax(Q K^T / sqrt(d))",
        Claim(Head.random, scaled_softmax, lambda h: h.a),
    ),
    entry(
        "000-2",
        "second formula",
        "the scores before the softmax",
        "Z = Q K^T represents the attention scores before applying softmax",
        Claim(
            Head.random,
            lambda h: h.q @ h.k.T,
            lambda h: h.s,
            lambda h: h.scale * (h.q @ h.k.T),
            reading=BEFORE_SCALE,
        ),
        wrong="The softmax of the first formula is applied to Q K^T / sqrt(d): the scale is gone.",
        correct="Z / sqrt(d) is what the softmax is applied to",
    ),
    entry(
        "000-3",
        "dZ/dQ",
        "the derivative of Z at Q is called K",
        "dZ/dQ = K",
        Claim(
            Head.random,
            lambda h: h.k,
            _dz_dq,
            lambda h: np.einsum("ia,jb->ijab", np.eye(len(h.q)), h.k),
            reading=Reading("row by row, dZ_i/dQ_i = K", lambda h: np.broadcast_to(h.k, _rows(h).shape), _rows),
        ),
        wrong="A matrix by a matrix has four indices. K is its one nonzero block, and a shorthand for using it.",
        correct="dZ_ij/dQ_ab = [i = a] K_jb",
    ),
    entry(
        "000-4",
        "chain rule",
        "the chain rule through Z",
        "dL/dQ = dL/dZ dZ/dQ",
        Claim(Head.random, lambda h: _dz(h) @ h.k, lambda h: h.dq, evidence=_chain),
    ),
    entry(
        "000-5",
        "dQ; conclusion",
        "dL/dA stands where dL/dZ belongs, in dQ",
        "dL/dQ = dL/dA K",
        _after_the_softmax(lambda d, h: d @ h.k, lambda h: h.dq),
        wrong="dL/dA is the gradient after the softmax. Its Jacobian is skipped, and the scale with it.",
        correct="dL/dQ = dL/dZ K, dL/dZ = A o (dA - rowsum(A o dA)) / sqrt(d)",
    ),
    entry(
        "000-6",
        "dZ/dK",
        "the derivative of Z at K is called Q^T",
        "dZ/dK = Q^T",
        Claim(
            Head.random,
            lambda h: h.q.T,
            _dz_dk,
            lambda h: np.einsum("ja,ib->ijab", np.eye(len(h.k)), h.q),
            _block_of_dz_dk,
            Reading(
                "the derivative of column j of Z at row j of K, transposed",
                lambda h: np.broadcast_to(h.q.T, _columns(h).swapaxes(1, 2).shape),
                lambda h: _columns(h).swapaxes(1, 2),
            ),
        ),
        wrong="Four indices again; and the block is Q, so the transpose fits neither dZ/dQ nor the note's own dK.",
        correct="dZ_ij/dK_ab = [j = a] Q_ib",
    ),
    entry(
        "000-7",
        "dK; conclusion",
        "dL/dA stands where dL/dZ belongs, in dK",
        "dL/dK = (dL/dA)^T Q",
        _after_the_softmax(lambda d, h: d.T @ h.q, lambda h: h.dk),
        wrong="As in dQ: the softmax and the scale are skipped. The transpose and the factor Q are right.",
        correct="dL/dK = (dL/dZ)^T Q, dL/dZ = A o (dA - rowsum(A o dA)) / sqrt(d)",
    ),
)

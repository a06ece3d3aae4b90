"""Document 000, a note on dQ and dK: the chain rule stops before the softmax."""

from __future__ import annotations

import numpy as np

from attngrad._options import Array
from attngrad.errata._case import Head, complex_step, rowsum, softmax
from attngrad.errata._claim import Claim, Entry, entry, figure, relative_error

# Z = Q K^T and its derivatives, which have four indices: dZ_ij / dQ_ab and dZ_ij / dK_ab.


def _dz_dq(h: Head) -> Array:
    return complex_step(lambda q: q @ h.k.T, h.q)


def _dz_dk(h: Head) -> Array:
    return complex_step(lambda k: h.q @ k.T, h.k)


def _dz(h: Head) -> Array:
    return complex_step(lambda z: h.loss(softmax(h.scale * z) @ h.v), h.q @ h.k.T)


def _readings_of_dz_dq(h: Head) -> str:
    rows = np.stack([_dz_dq(h)[i, :, i, :] for i in range(len(h.q))])
    per_row = relative_error(rows, np.broadcast_to(h.k, rows.shape))
    chain = relative_error(np.einsum("ij,ijab->ab", _dz(h), _dz_dq(h)), _dz(h) @ h.k)
    return f"row by row it is right, dz_i/dq_i = K [{figure(per_row)}]; so dL/dZ contracts to dL/dZ K [{figure(chain)}]"


def _readings_of_dz_dk(h: Head) -> str:
    columns = np.stack([_dz_dk(h)[:, j, j, :] for j in range(len(h.k))])
    per_key = relative_error(columns, np.broadcast_to(h.q, columns.shape))
    return f"key by key the derivative is Q [{figure(per_key)}], not Q^T"


def _unscaled(h: Head, value: Array, truth: Array) -> str:
    return f"with dL/dS in place of dL/dA the scale is still missing [{figure(relative_error(value, truth))}]"


ENTRIES: tuple[Entry, ...] = (
    entry(
        "000-1",
        "first formula",
        "the attention weights",
        "A = softmax(Q K^T / sqrt(d))",
        Claim(Head.random, lambda h: softmax(h.q @ h.k.T / np.sqrt(h.q.shape[-1])), lambda h: h.a),
    ),
    entry(
        "000-2",
        "second formula",
        "what the softmax receives",
        "Z = Q K^T, and A = softmax(Z)",
        Claim(Head.random, lambda h: softmax(h.q @ h.k.T), lambda h: h.a, lambda h: softmax(h.scale * h.q @ h.k.T)),
        wrong="The scale of the first formula is gone, so this Z is not what the softmax receives.",
        correct="A = softmax(Z / sqrt(d)) with Z = Q K^T",
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
            _readings_of_dz_dq,
        ),
        wrong="A matrix by a matrix has four indices. K is its one nonzero block, and a shorthand for using it.",
        correct="dZ_ij/dQ_ab = [i = a] K_jb",
    ),
    entry(
        "000-4",
        "chain rule",
        "the chain rule through Z",
        "dL/dQ = dL/dZ dZ/dQ, that is dL/dZ K",
        Claim(
            Head.random,
            lambda h: _dz(h) @ h.k,
            lambda h: h.dq,
            evidence=lambda h: (
                f"the scale is inside: dL/dZ = dS / sqrt(d) [{figure(relative_error(h.scale * h.ds, _dz(h)))}]"
            ),
        ),
    ),
    entry(
        "000-5",
        "dQ; conclusion",
        "dL/dA stands where dL/dZ belongs, in dQ",
        "dL/dQ = dL/dA K",
        Claim(
            Head.random,
            lambda h: h.da @ h.k,
            lambda h: h.dq,
            lambda h: h.scale * (h.a * (h.da - rowsum(h.a * h.da))) @ h.k,
            lambda h: _unscaled(h, h.ds @ h.k, h.dq),
        ),
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
            _readings_of_dz_dk,
        ),
        wrong="Four indices again; and the block is Q, so the transpose fits neither this nor the note's own dK.",
        correct="dZ_ij/dK_ab = [j = a] Q_ib",
    ),
    entry(
        "000-7",
        "dK; conclusion",
        "dL/dA stands where dL/dZ belongs, in dK",
        "dL/dK = (dL/dA)^T Q",
        Claim(
            Head.random,
            lambda h: h.da.T @ h.q,
            lambda h: h.dk,
            lambda h: h.scale * (h.a * (h.da - rowsum(h.a * h.da))).T @ h.q,
            lambda h: _unscaled(h, h.ds.T @ h.q, h.dk),
        ),
        wrong="As in dQ: the softmax and the scale are skipped. The transpose and the factor Q are right.",
        correct="dL/dK = (dL/dZ)^T Q, dL/dZ = A o (dA - rowsum(A o dA)) / sqrt(d)",
    ),
)

"""What the lines of Transformer Attention Derivative compute."""

from __future__ import annotations

from functools import partial

import numpy as np

from attngrad.core.arrays import Array
from attngrad.errata._blocks import Blocks
from attngrad.errata._claim import Claim, Reading, relative_error
from attngrad.formulas.case import along, complex_step, softmax, t
from attngrad.reference.forms import block_diagonal, reciprocal

# G = df/dX at the layer's output X; A = (A_1, ..., A_H) the scores (the document also uses the letter for
# (S_1 V, ..., S_H V)); S their softmax; U = Upsilon(exp(A) 1), one over the row sums; gamma = 1/sqrt(d_k).


def by_hand(c: Blocks, **moved: Array) -> Array:
    """Concat(S_1 V W_1^V, ..., S_H V W_H^V), head by head, with any of the weights replaced."""
    w = c.weights | moved
    soft = [softmax(x / np.sqrt(c.n.width)) for x in c.products(w["w_q"], w["w_k"])]
    return np.concatenate([s @ c.value @ v for s, v in zip(soft, w["w_v"], strict=True)], axis=1)


def gradient_of_blocks(c: Blocks) -> Array:
    """(S_1 V, ..., S_H V)^T G (W^O)^T."""
    return c.mixed.T @ c.g @ c.w_o.T


def gradient_block_by_block(c: Blocks) -> Array:
    """diag((S_h V)^T G (W_h^O)^T)."""
    mixed, w_o = np.split(c.mixed, c.n.heads, axis=1), np.split(c.w_o, c.n.heads, axis=0)
    return block_diagonal(np.stack([m.T @ c.g @ w.T for m, w in zip(mixed, w_o, strict=True)]))


def diagonal_blocks(c: Blocks) -> float:
    """The error of ``gradient_of_blocks`` inside its diagonal blocks."""
    inside = block_diagonal(np.ones_like(c.w_v))
    return relative_error(gradient_of_blocks(c) * inside, block_diagonal(c.d_weights["w_v"]))


def softmax_as_written(c: Blocks, a: Array) -> Array:
    with np.errstate(all="ignore"):
        return np.exp(a) * reciprocal(np.exp(a) @ c.ones)


def stable_softmax(c: Blocks, a: Array) -> Array:
    blocks = np.split(a, c.n.heads, axis=1)
    return softmax_as_written(c, np.concatenate([x - np.max(x, axis=1, keepdims=True) for x in blocks], axis=1))


LARGE = 1e4
"""A factor that brings the scores to where exp overflows."""


def pulled(c: Blocks) -> Array:
    """G' = G (W^O)^T (V')^T, the gradient at the weights."""
    return c.g @ c.w_o.T @ c.value_blocks.T


def d_a(c: Blocks) -> Array:
    """G' o S - ((G' o S o U) 1^T) o exp(A)."""
    g = pulled(c)
    return g * c.s - ((g * c.s * c.inverse) @ c.ones.T) * np.exp(c.a)


def without_exp(c: Blocks) -> float:
    """The error of S o (G' - rowsum(S o G')), block by block."""
    return relative_error(c.s * (pulled(c) - (pulled(c) * c.s) @ c.ones), c.da)


def trace_lines(c: Blocks) -> Array:
    """df along a_dot, by each line of the derivation."""
    e, u, s, da, ones = np.exp(c.a), c.inverse, c.s, c.a_dot, c.ones
    left, g = c.value_blocks @ c.w_o @ c.g.T, pulled(c)
    de = e * da
    lines = [
        left @ along(lambda a: np.exp(a) * reciprocal(np.exp(a) @ ones), (c.a, da)),
        left @ (de * u + e * along(lambda a: reciprocal(np.exp(a) @ ones), (c.a, da))),
        left @ (e * u * da - e * u * u * (de @ ones)),
        left @ (s * da - s * u * along(lambda a: np.exp(a) @ ones, (c.a, da))),
        (g * s).T @ da - (g * s * u).T @ (de @ ones),
        (g * s).T @ da - ones @ (g * s * u).T @ de,
    ]
    last = np.trace((g * s).T @ da) - np.trace((((g * s * u) @ ones.T) * e).T @ da)
    return np.array([*(np.trace(x) for x in lines), last])


def one_head(c: Blocks, h: int) -> Array:
    """tr(gamma (df/dA)^T d(Q W_h^Q (W_h^K)^T K^T P_h))."""
    return c.along_weights(lambda q, k: np.trace(c.gamma * c.da.T @ c.products(q, k)[h] @ c.picks[h]))


def all_heads(c: Blocks) -> Array:
    return c.along_weights(lambda q, k: np.trace(c.gamma * c.da.T @ np.concatenate(c.products(q, k), axis=1)))


def with_one_head_moving(c: Blocks) -> Array:
    only = np.eye(c.n.heads)[0][:, None, None]
    return c.along_weights(lambda q, k: c.f_of_weights(w_q=q, w_k=k), only)


def d_w_q(c: Blocks) -> Array:
    terms = zip(c.picks, c.w_k, strict=True)
    return np.stack([c.gamma * c.query.T @ c.da @ p.T @ c.key @ w for p, w in terms])


def d_w_k(c: Blocks) -> Array:
    terms = zip(c.picks, c.w_q, strict=True)
    return np.stack([c.gamma * c.key.T @ p @ c.da.T @ c.query @ w for p, w in terms])


def one_weight_lines(c: Blocks) -> Array:
    """df along W_h^Q alone, then along W_h^K alone, by the lines that lead to their gradients."""
    lines = []
    for p, w_q, w_k, q_dot, k_dot in zip(c.picks, c.w_q, c.w_k, c.w_q_dot[0], c.w_k_dot[0], strict=True):
        common = c.gamma * c.key.T @ p @ c.da.T @ c.query
        lines += [np.trace(common @ q_dot @ w_k.T), np.trace(w_k.T @ common @ q_dot), np.trace(common @ w_q @ k_dot.T)]
    return np.array(lines)


def one_weight_truth(c: Blocks) -> Array:
    by_q = np.sum(c.d_weights["w_q"] * c.w_q_dot[0], axis=(1, 2))
    by_k = np.sum(c.d_weights["w_k"] * c.w_k_dot[0], axis=(1, 2))
    return np.stack([by_q, by_q, by_k], axis=1).reshape(-1)


# --- the differentials -----------------------------------------------------------------------------------------------


def lines_of_question_1(c: Blocks) -> Array:
    """df along W^O, by both lines."""
    heads = c.heads()
    moved = along(lambda w: heads @ w, (c.w_o, c.w_o_dot))
    return np.array([np.trace(c.g.T @ moved), np.trace(c.g.T @ heads @ c.w_o_dot)])


def first_lines(c: Blocks, **dots: Array) -> list[Array]:
    """df along these weights, by the three lines that open questions 2 and 3."""
    moves = [(c.weights[name], dot) for name, dot in dots.items()]

    def named(w: tuple[Array, ...]) -> dict[str, Array]:
        return dict(zip(dots, w, strict=True))

    return [
        np.trace(c.g.T @ along(lambda *w: c.heads(**named(w)) @ c.w_o, *moves)),
        np.trace(c.g.T @ along(lambda *w: c.heads(**named(w)), *moves) @ c.w_o),
        np.trace(c.g.T @ along(lambda *w: by_hand(c, **named(w)), *moves) @ c.w_o),
    ]


def along_w_v(c: Blocks) -> Array:
    """True df along W^V."""
    return np.sum(c.d_weights["w_v"] * c.w_v_dot)


def line_4(c: Blocks) -> Array:
    """tr(W^O G^T d(S_1 V, ..., S_H V) diag(W^V)): what is differentiated does not depend on W^V."""
    moved = along(lambda w: c.mixed, (c.w_v, c.w_v_dot))
    return np.trace(c.w_o @ c.g.T @ moved @ block_diagonal(c.w_v))


def line_4_at_w_v(c: Blocks) -> Array:
    return np.trace(c.w_o @ c.g.T @ c.mixed @ block_diagonal(c.w_v_dot))


def line_4_of_the_product(c: Blocks) -> Array:
    return np.trace(c.w_o @ c.g.T @ along(lambda w: c.mixed @ block_diagonal(w), (c.w_v, c.w_v_dot)))


def lines_with_blocks(c: Blocks) -> Array:
    """df along W^V, by the three lines with A = (S_1 V, ..., S_H V) and W^v."""
    dot = block_diagonal(c.w_v_dot)
    return np.array(
        [line_4_of_the_product(c), np.trace(c.w_o @ c.g.T @ c.mixed @ dot), np.trace(gradient_of_blocks(c).T @ dot)]
    )


def lines_of_question_3(c: Blocks) -> Array:
    """df along W^Q and W^K, by the lines before the softmax is written out."""
    dots = {"w_q": c.w_q_dot[0], "w_k": c.w_k_dot[0]}
    moves = [(getattr(c, name), dot) for name, dot in dots.items()]

    def weights(w_q: Array, w_k: Array) -> Array:
        return c.soft(c.gamma * np.concatenate(c.products(w_q, w_k), axis=1))

    ds = along(weights, *moves)
    lines = [
        c.w_o @ c.g.T @ ds @ c.value_blocks,
        c.w_o @ c.g.T @ along(lambda q, k: weights(q, k) @ c.value_blocks, *moves),
        c.value_blocks @ c.w_o @ c.g.T @ ds,
    ]
    return np.array([*first_lines(c, **dots), *(np.trace(x) for x in lines)])


def layout(c: Blocks) -> Array:
    return np.array([c.value_blocks.shape, c.ones.shape, c.picks[0].shape])


def layout_as_stated(c: Blocks) -> Array:
    """V' is Hn x d_model, 1 is Hn x Hn, P_h is n x Hn."""
    n, wide = c.n.keys, c.n.heads * c.n.keys
    return np.array([(wide, c.n.model), (wide, wide), (n, wide)])


# --- the figures and the checks ---------------------------------------------------------------------------------------

FIGURES = {
    "diagonal-blocks": diagonal_blocks,
    "large-scores": lambda c: f"{LARGE * np.max(np.abs(c.a)):.0f}",
    "scores": lambda c: f"{np.max(np.abs(c.a)):.0f}",
    "without-exp": without_exp,
    "line-4": lambda c: abs(line_4(c)),
}

blocks = partial(Claim, Blocks)

CHECKS = {
    "transformer-1": blocks(lambda c: by_hand(c) @ c.w_o, lambda c: c.heads() @ c.w_o),
    "transformer-2": blocks(lambda c: c.heads().T @ c.g, lambda c: complex_step(lambda w: c.f(c.heads() @ w), c.w_o)),
    "transformer-3": blocks(lambda c: c.mixed @ block_diagonal(c.w_v), lambda c: c.heads()),
    "transformer-4": blocks(
        gradient_of_blocks,
        lambda c: block_diagonal(c.d_weights["w_v"]),
        gradient_block_by_block,
        reading=Reading(
            "the gradient at a full matrix W^v, every entry of it free",
            gradient_of_blocks,
            lambda c: complex_step(lambda w: c.f(c.mixed @ w @ c.w_o), block_diagonal(c.w_v)),
        ),
    ),
    "transformer-5": blocks(
        lambda c: softmax_as_written(c, LARGE * c.a),
        lambda c: c.soft(LARGE * c.a),
        lambda c: stable_softmax(c, LARGE * c.a),
        reading=Reading(
            "mathematics, at scores whose exp is finite", lambda c: softmax_as_written(c, c.a), lambda c: c.s
        ),
    ),
    "transformer-6": blocks(layout_as_stated, layout),
    "transformer-7": blocks(trace_lines, lambda c: np.full(7, along(c.f_of_scores, (c.a, c.a_dot)))),
    "transformer-8": blocks(d_a, lambda c: c.da),
    "transformer-9": blocks(all_heads, lambda c: c.df),
    "transformer-10": blocks(
        lambda c: one_head(c, 0),
        lambda c: c.df,
        lambda c: np.sum([one_head(c, h) for h in range(c.n.heads)], axis=0),
        reading=Reading("df where only the weights of head h move", lambda c: one_head(c, 0), with_one_head_moving),
    ),
    "transformer-11": blocks(one_weight_lines, one_weight_truth),
    "transformer-12": blocks(d_w_q, lambda c: c.d_weights["w_q"]),
    "transformer-13": blocks(
        lambda c: d_w_k(c) @ t(c.w_k_dot[0]),
        lambda c: c.d_weights["w_k"],
        d_w_k,
        reading=Reading(
            "the matrix whose trace is df along W_h^K",
            lambda c: np.trace(d_w_k(c) @ t(c.w_k_dot[0]), axis1=1, axis2=2),
            lambda c: np.sum(c.d_weights["w_k"] * c.w_k_dot[0], axis=(1, 2)),
        ),
    ),
    "transformer-14": blocks(
        lines_of_question_1, lambda c: np.full(2, along(lambda w: c.f(c.heads() @ w), (c.w_o, c.w_o_dot)))
    ),
    "transformer-15": blocks(lambda c: np.array(first_lines(c, w_v=c.w_v_dot)), lambda c: np.full(3, along_w_v(c))),
    "transformer-16": blocks(
        line_4,
        along_w_v,
        line_4_at_w_v,
        reading=Reading("d((S_1 V, ..., S_H V) diag(W_1^V, ..., W_H^V))", line_4_of_the_product, along_w_v),
    ),
    "transformer-17": blocks(lines_with_blocks, lambda c: np.full(3, along_w_v(c))),
    "transformer-18": blocks(lines_of_question_3, lambda c: np.full(6, c.df[0])),
}

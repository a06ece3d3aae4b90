"""Document 002, the multi-head derivative by traces: right on paper but for four slips, and unsafe as arithmetic."""

from __future__ import annotations

import numpy as np

from attngrad.core.arrays import Array
from attngrad.errata._case import Blocks, along, complex_step, softmax, t
from attngrad.errata._claim import Claim, Entry, Reading, entry, relative_error
from attngrad.formulas.report import figure
from attngrad.reference.forms import block_diagonal, reciprocal

# G = df/dX at the layer's output X; A = (A_1, ..., A_H) the scores (the document also uses the letter for
# (S_1 V, ..., S_H V)); S their softmax; U = Upsilon(exp(A) 1), one over the row sums; gamma = 1/sqrt(d_k).


def _by_hand(c: Blocks) -> Array:
    heads = []
    for w_q, w_k, w_v in zip(c.w_q, c.w_k, c.w_v, strict=True):
        heads.append(softmax(c.query @ w_q @ (c.key @ w_k).T / np.sqrt(c.n.width)) @ (c.value @ w_v))
    return np.concatenate(heads, axis=1) @ c.w_o


def _gradient_of_blocks(c: Blocks) -> Array:
    """(S_1 V, ..., S_H V)^T G (W^O)^T."""
    return c.mixed.T @ c.g @ c.w_o.T


def _gradient_block_by_block(c: Blocks) -> Array:
    """diag((S_h V)^T G (W_h^O)^T)."""
    mixed, w_o = np.split(c.mixed, c.n.heads, axis=1), np.split(c.w_o, c.n.heads, axis=0)
    return block_diagonal(np.stack([m.T @ c.g @ w.T for m, w in zip(mixed, w_o, strict=True)]))


def _blocks_of_gradient(c: Blocks) -> str:
    inside = block_diagonal(np.ones_like(c.w_v))
    error = relative_error(_gradient_of_blocks(c) * inside, block_diagonal(c.d_w_v))
    return f"its diagonal blocks are right [{figure(error)}]"


def _plain_softmax(c: Blocks, a: Array) -> Array:
    with np.errstate(all="ignore"):
        return np.exp(a) * reciprocal(np.exp(a) @ c.ones)


def _stable_softmax(c: Blocks, a: Array) -> Array:
    blocks = np.split(a, c.n.heads, axis=1)
    return _plain_softmax(c, np.concatenate([x - np.max(x, axis=1, keepdims=True) for x in blocks], axis=1))


_LARGE = 1e4


def _sizes_of_scores(c: Blocks) -> str:
    largest = np.max(np.abs(c.a))
    return f"the scores reach {_LARGE * largest:.0f} where it fails, {largest:.0f} where it holds"


def _pulled(c: Blocks) -> Array:
    """G' = G (W^O)^T (V')^T, the gradient at the weights."""
    return c.g @ c.w_o.T @ c.value_blocks.T


def _trace_lines(c: Blocks) -> Array:
    """df along a_dot, by each line of the derivation."""
    e, u, s, da, ones = np.exp(c.a), c.inverse, c.s, c.a_dot, c.ones
    left, g = c.value_blocks @ c.w_o @ c.g.T, _pulled(c)
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


def _one_head(c: Blocks, h: int) -> Array:
    """tr(gamma (df/dA)^T d(Q W_h^Q (W_h^K)^T K^T P_h))."""
    return c.along_weights(lambda q, k: np.trace(c.gamma * c.da.T @ c.products(q, k)[h] @ c.picks[h]))


def _all_heads(c: Blocks) -> Array:
    return c.along_weights(lambda q, k: np.trace(c.gamma * c.da.T @ np.concatenate(c.products(q, k), axis=1)))


def _with_one_head_moving(c: Blocks) -> Array:
    only = np.zeros((c.n.heads, 1, 1))
    only[0] = 1.0
    return c.along_weights(lambda q, k: c.f_of_weights(w_q=q, w_k=k), only)


def _d_w_q(c: Blocks) -> Array:
    terms = zip(c.picks, c.w_k, strict=True)
    return np.stack([c.gamma * c.query.T @ c.da @ p.T @ c.key @ w for p, w in terms])


def _d_w_k(c: Blocks) -> Array:
    terms = zip(c.picks, c.w_q, strict=True)
    return np.stack([c.gamma * c.key.T @ p @ c.da.T @ c.query @ w for p, w in terms])


def _one_weight_lines(c: Blocks) -> Array:
    """df along W_h^Q alone, then along W_h^K alone, by the lines that lead to their gradients."""
    lines = []
    for p, w_q, w_k, q_dot, k_dot in zip(c.picks, c.w_q, c.w_k, c.w_q_dot[0], c.w_k_dot[0], strict=True):
        common = c.gamma * c.key.T @ p @ c.da.T @ c.query
        lines += [np.trace(common @ q_dot @ w_k.T), np.trace(w_k.T @ common @ q_dot), np.trace(common @ w_q @ k_dot.T)]
    return np.array(lines)


def _one_weight_truth(c: Blocks) -> Array:
    by_q, by_k = (np.sum(d * x, axis=(1, 2)) for d, x in ((c.d_w_q, c.w_q_dot[0]), (c.d_w_k, c.w_k_dot[0])))
    return np.stack([by_q, by_q, by_k], axis=1).reshape(-1)


# --- the differentials -----------------------------------------------------------------------------------------------


def _lines_of_question_1(c: Blocks) -> Array:
    """df along W^O, by both lines."""
    heads = c.heads()
    moved = along(lambda w: heads @ w, (c.w_o, c.w_o_dot))
    return np.array([np.trace(c.g.T @ moved), np.trace(c.g.T @ heads @ c.w_o_dot)])


def _first_lines(c: Blocks, **dots: Array) -> list[Array]:
    """df along these weights, by the three lines that open questions 2 and 3."""
    names = list(dots)
    moves = [(getattr(c, name), dot) for name, dot in dots.items()]

    def by_hand(*w: Array) -> Array:
        full = {"w_q": c.w_q, "w_k": c.w_k, "w_v": c.w_v} | dict(zip(names, w, strict=True))
        soft = [softmax(c.gamma * x) for x in c.products(full["w_q"], full["w_k"])]
        return np.concatenate([s @ c.value @ v for s, v in zip(soft, full["w_v"], strict=True)], axis=1)

    def named(*w: Array) -> Array:
        return c.heads(**dict(zip(names, w, strict=True)))

    return [
        np.trace(c.g.T @ along(lambda *w: named(*w) @ c.w_o, *moves)),
        np.trace(c.g.T @ along(named, *moves) @ c.w_o),
        np.trace(c.g.T @ along(by_hand, *moves) @ c.w_o),
    ]


def _along_w_v(c: Blocks) -> Array:
    """True df along W^V."""
    return np.sum(c.d_w_v * c.w_v_dot)


def _line_4(c: Blocks) -> Array:
    """tr(W^O G^T d(S_1 V, ..., S_H V) diag(W^V)): what is differentiated does not depend on W^V."""
    moved = along(lambda w: c.mixed, (c.w_v, c.w_v_dot))
    return np.trace(c.w_o @ c.g.T @ moved @ block_diagonal(c.w_v))


def _line_4_at_w_v(c: Blocks) -> Array:
    return np.trace(c.w_o @ c.g.T @ c.mixed @ block_diagonal(c.w_v_dot))


def _line_4_of_the_product(c: Blocks) -> Array:
    return np.trace(c.w_o @ c.g.T @ along(lambda w: c.mixed @ block_diagonal(w), (c.w_v, c.w_v_dot)))


def _lines_with_blocks(c: Blocks) -> Array:
    """df along W^V, by the three lines with A = (S_1 V, ..., S_H V) and W^v."""
    dot = block_diagonal(c.w_v_dot)
    return np.array(
        [_line_4_of_the_product(c), np.trace(c.w_o @ c.g.T @ c.mixed @ dot), np.trace(_gradient_of_blocks(c).T @ dot)]
    )


def _lines_of_question_3(c: Blocks) -> Array:
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
    return np.array([*_first_lines(c, **dots), *(np.trace(x) for x in lines)])


def _layout(c: Blocks) -> Array:
    return np.array([c.value_blocks.shape, c.ones.shape, c.picks[0].shape])


ENTRIES: tuple[Entry, ...] = (
    entry(
        "002-1",
        "question 1",
        "the multi-head layer",
        "MultiHead = Concat(head_1, ..., head_H) W^O, head_h = Attention(Q W_h^Q, K W_h^K, V W_h^V)",
        Claim(Blocks, _by_hand, lambda c: c.heads() @ c.w_o),
    ),
    entry(
        "002-2",
        "question 1",
        "the gradient at W^O",
        "df/dW^O = Concat(head_1, ..., head_H)^T G",
        Claim(Blocks, lambda c: c.heads().T @ c.g, lambda c: complex_step(lambda w: c.f(c.heads() @ w), c.w_o)),
    ),
    entry(
        "002-3",
        "question 2",
        "the value weights as one block-diagonal matrix",
        "Concat(S_1 V W_1^V, ..., S_H V W_H^V) = (S_1 V, ..., S_H V) diag(W_1^V, ..., W_H^V)",
        Claim(Blocks, lambda c: c.mixed @ block_diagonal(c.w_v), lambda c: c.heads()),
    ),
    entry(
        "002-4",
        "question 2",
        "the gradient at the block-diagonal W^v",
        "df/dW^v = (S_1 V, ..., S_H V)^T G (W^O)^T",
        Claim(
            Blocks,
            _gradient_of_blocks,
            lambda c: block_diagonal(c.d_w_v),
            _gradient_block_by_block,
            _blocks_of_gradient,
            Reading(
                "the gradient at a full matrix W^v, every entry of it free",
                _gradient_of_blocks,
                lambda c: complex_step(lambda w: c.f(c.mixed @ w @ c.w_o), block_diagonal(c.w_v)),
            ),
        ),
        wrong="Outside its diagonal blocks W^v is zero by construction, no parameter, and has no gradient; "
        "this matrix is full. A step along it would mix the heads.",
        correct="df/dW_h^V = (S_h V)^T G (W_h^O)^T, the diagonal blocks; zero elsewhere",
    ),
    entry(
        "002-5",
        "question 3",
        "the softmax is written without subtracting the maximum",
        "S = exp(A) o Upsilon(exp(A) 1)",
        Claim(
            Blocks,
            lambda c: _plain_softmax(c, _LARGE * c.a),
            lambda c: c.soft(_LARGE * c.a),
            lambda c: _stable_softmax(c, _LARGE * c.a),
            _sizes_of_scores,
            Reading("mathematics, at scores whose exp is finite", lambda c: _plain_softmax(c, c.a), lambda c: c.s),
        ),
        wrong="Judged as arithmetic, for exp(A) goes into the gradient that is to be computed (002-8): exp overflows "
        "above 709 in float64 and 88 in float32, and infinity over infinity is not a number.",
        correct="the same with A_h - rowmax(A_h) in place of A_h: S does not change",
    ),
    entry(
        "002-6",
        "question 3",
        "the sizes of the block matrices",
        "V' is Hn x d_model, 1 is Hn x Hn, P_h is n x Hn",
        Claim(
            Blocks,
            lambda c: np.array(
                [
                    (c.n.heads * c.n.keys, c.n.model),
                    (c.n.heads * c.n.keys, c.n.heads * c.n.keys),
                    (c.n.keys, c.n.heads * c.n.keys),
                ]
            ),
            _layout,
            evidence=lambda c: "n counts keys; V' has H d_v columns, which is d_model only where d_v = d_model / H",
        ),
    ),
    entry(
        "002-7",
        "question 3",
        "every line of the trace computation",
        "df = tr(V' W^O G^T dS) = ... = tr((df/dA)^T dA)",
        Claim(Blocks, _trace_lines, lambda c: np.full(7, along(c.f_of_scores, (c.a, c.a_dot)))),
    ),
    entry(
        "002-8",
        "question 3",
        "the gradient at the scores",
        "df/dA = G' o S - ((G' o S o U) 1^T) o exp(A), G' = G (W^O)^T V'^T, U = Upsilon(exp(A) 1)",
        Claim(
            Blocks,
            lambda c: _pulled(c) * c.s - ((_pulled(c) * c.s * c.inverse) @ c.ones.T) * np.exp(c.a),
            lambda c: c.da,
            evidence=lambda c: (
                "it is S o (G' - rowsum(S o G')), block by block, which needs no exp(A) "
                f"[{figure(relative_error(c.s * (_pulled(c) - (_pulled(c) * c.s) @ c.ones), c.da))}]"
            ),
        ),
    ),
    entry(
        "002-9",
        "question 3",
        "the scale, taken out of the differential",
        "df = tr(gamma (df/dA)^T d(Q W_1^Q (W_1^K)^T K^T, ..., Q W_H^Q (W_H^K)^T K^T))",
        Claim(Blocks, _all_heads, lambda c: c.df),
    ),
    entry(
        "002-10",
        "question 3",
        "the sum over the heads is missing",
        "df = tr(gamma (df/dA)^T d(Q W_h^Q (W_h^K)^T K^T P_h))",
        Claim(
            Blocks,
            lambda c: _one_head(c, 0),
            lambda c: c.df,
            lambda c: np.sum([_one_head(c, h) for h in range(c.n.heads)], axis=0),
            reading=Reading(
                "df where only the weights of head h move", lambda c: _one_head(c, 0), _with_one_head_moving
            ),
        ),
        wrong="The line before has all heads, this one has head h alone: (A_1, ..., A_H) is a sum of A_h P_h.",
        correct="df = sum_h tr(gamma (df/dA)^T d(Q W_h^Q (W_h^K)^T K^T P_h))",
    ),
    entry(
        "002-11",
        "question 3",
        "the traces with one weight moving",
        "tr(gamma K^T P_h (df/dA)^T Q d(W_h^Q (W_h^K)^T)), along W_h^Q or along W_h^K",
        Claim(
            Blocks,
            _one_weight_lines,
            _one_weight_truth,
            evidence=lambda c: "one weight of one head moves, so the sum that 002-10 lacks is not missed",
        ),
    ),
    entry(
        "002-12",
        "question 3",
        "the gradient at W_h^Q",
        "df/dW_h^Q = gamma Q^T df/dA P_h^T K W_h^K",
        Claim(Blocks, _d_w_q, lambda c: c.d_w_q),
    ),
    entry(
        "002-13",
        "question 3",
        "a differential is left in the gradient at W_h^K",
        "df/dW_h^K = gamma K^T P_h (df/dA)^T Q W_h^Q d((W_h^K)^T)",
        Claim(
            Blocks,
            lambda c: _d_w_k(c) @ t(c.w_k_dot[0]),
            lambda c: c.d_w_k,
            _d_w_k,
            reading=Reading(
                "the matrix whose trace is df along W_h^K",
                lambda c: np.trace(_d_w_k(c) @ t(c.w_k_dot[0]), axis1=1, axis2=2),
                lambda c: np.sum(c.d_w_k * c.w_k_dot[0], axis=(1, 2)),
            ),
        ),
        wrong="The step from the trace to the gradient should drop d((W_h^K)^T). With it the right side is a "
        "differential, and d_model x d_model.",
        correct="df/dW_h^K = gamma K^T P_h (df/dA)^T Q W_h^Q",
    ),
    entry(
        "002-14",
        "question 1",
        "both lines of the trace computation for W^O",
        "df = tr(G^T d(Concat(head_1, ..., head_H) W^O)) = tr(G^T Concat(head_1, ..., head_H) dW^O)",
        Claim(
            Blocks,
            _lines_of_question_1,
            lambda c: np.full(2, along(lambda w: c.f(c.heads() @ w), (c.w_o, c.w_o_dot))),
        ),
    ),
    entry(
        "002-15",
        "question 2, lines 1 to 3",
        "the first lines of the trace computation for W^V",
        "df = tr(G^T dX) = tr(G^T dConcat(head_1, ..., head_H) W^O) = tr(G^T d(S_1 V W_1^V, ..., S_H V W_H^V) W^O)",
        Claim(
            Blocks,
            lambda c: np.array(_first_lines(c, w_v=c.w_v_dot)),
            lambda c: np.full(3, _along_w_v(c)),
            evidence=lambda c: "d acts on the parenthesis that follows it, and W^O stays as it is",
        ),
    ),
    entry(
        "002-16",
        "question 2, line 4",
        "the differential acts on the softmax, not on W^V",
        "df = tr(W^O G^T d(S_1 V, ..., S_H V) diag(W_1^V, ..., W_H^V))",
        Claim(
            Blocks,
            _line_4,
            _along_w_v,
            _line_4_at_w_v,
            lambda c: f"along W^V alone it gives {figure(abs(_line_4(c)))}, for S_h V does not depend on W^V",
            Reading("d((S_1 V, ..., S_H V) diag(W_1^V, ..., W_H^V))", _line_4_of_the_product, _along_w_v),
        ),
        wrong="The d of the line before has stayed with the left factor. It must act on diag(W^V), or on the product, "
        "as it does two lines below.",
        correct="df = tr(W^O G^T (S_1 V, ..., S_H V) d diag(W_1^V, ..., W_H^V))",
    ),
    entry(
        "002-17",
        "question 2",
        "the trace computation with the block-diagonal W^v",
        "df = tr(W^O G^T d(A W^v)) = tr(W^O G^T A dW^v) = tr((A^T G (W^O)^T)^T dW^v), A = (S_1 V, ..., S_H V)",
        Claim(
            Blocks,
            _lines_with_blocks,
            lambda c: np.full(3, _along_w_v(c)),
            evidence=lambda c: "dW^v being block-diagonal, as W^v is",
        ),
    ),
    entry(
        "002-18",
        "question 3",
        "the lines of the trace computation before the softmax is written out",
        "df = tr(G^T dX) = ... = tr(W^O G^T d(S_1, ..., S_H) diag(V W_1^V, ..., V W_H^V)) = tr(V' W^O G^T dS)",
        Claim(
            Blocks,
            _lines_of_question_3,
            lambda c: np.full(6, c.df[0]),
            evidence=lambda c: "W^Q and W^K moving, d rightly acts on the softmax",
        ),
    ),
)

"""The claims of the document."""

from __future__ import annotations

from functools import partial

import numpy as np

from attngrad.errata._claim import Reading, relative_error
from attngrad.errata._formula import Statement
from attngrad.errata._records import Entry
from attngrad.errata._transformer import lines
from attngrad.errata._transformer.blocks import Blocks
from attngrad.formulas.case import along, complex_step, t
from attngrad.formulas.report import figure
from attngrad.reference.forms import block_diagonal

blocks = partial(Statement, Blocks)

ENTRIES: tuple[Entry, ...] = (
    blocks("transformer-1", "question 1", "the multi-head layer").claim(
        "MultiHead = Concat(head_1, ..., head_H) W^O, head_h = Attention(Q W_h^Q, K W_h^K, V W_h^V)",
        lambda c: lines.by_hand(c) @ c.w_o,
        lambda c: c.heads() @ c.w_o,
    ),
    blocks("transformer-2", "question 1", "the gradient at W^O").claim(
        "df/dW^O = Concat(head_1, ..., head_H)^T G",
        lambda c: c.heads().T @ c.g,
        lambda c: complex_step(lambda w: c.f(c.heads() @ w), c.w_o),
    ),
    blocks("transformer-3", "question 2", "the value weights as one block-diagonal matrix").claim(
        "Concat(S_1 V W_1^V, ..., S_H V W_H^V) = (S_1 V, ..., S_H V) diag(W_1^V, ..., W_H^V)",
        lambda c: c.mixed @ block_diagonal(c.w_v),
        lambda c: c.heads(),
    ),
    blocks("transformer-4", "question 2", "the gradient at the block-diagonal W^v").claim(
        "df/dW^v = (S_1 V, ..., S_H V)^T G (W^O)^T",
        lines.gradient_of_blocks,
        lambda c: block_diagonal(c.d_weights["w_v"]),
        lines.gradient_block_by_block,
        lines.blocks_of_gradient,
        Reading(
            "the gradient at a full matrix W^v, every entry of it free",
            lines.gradient_of_blocks,
            lambda c: complex_step(lambda w: c.f(c.mixed @ w @ c.w_o), block_diagonal(c.w_v)),
        ),
        wrong="Outside its diagonal blocks W^v is zero by construction, no parameter, and has no gradient; "
        "this matrix is full. A step along it would mix the heads.",
        correct="df/dW_h^V = (S_h V)^T G (W_h^O)^T, the diagonal blocks; zero elsewhere",
    ),
    blocks("transformer-5", "question 3", "the softmax is written without subtracting the maximum").claim(
        "S = exp(A) o Upsilon(exp(A) 1)",
        lambda c: lines.softmax_as_written(c, lines.LARGE * c.a),
        lambda c: c.soft(lines.LARGE * c.a),
        lambda c: lines.stable_softmax(c, lines.LARGE * c.a),
        lines.sizes_of_scores,
        Reading(
            "mathematics, at scores whose exp is finite", lambda c: lines.softmax_as_written(c, c.a), lambda c: c.s
        ),
        wrong="Judged as arithmetic, for exp(A) goes into the gradient that is to be computed (transformer-8): "
        "exp overflows above 709 in float64 and 88 in float32, and infinity over infinity is not a number.",
        correct="the same with A_h - rowmax(A_h) in place of A_h: S does not change",
    ),
    blocks("transformer-6", "question 3", "the sizes of the block matrices").claim(
        "V' is Hn x d_model, 1 is Hn x Hn, P_h is n x Hn",
        lambda c: np.array(
            [
                (c.n.heads * c.n.keys, c.n.model),
                (c.n.heads * c.n.keys, c.n.heads * c.n.keys),
                (c.n.keys, c.n.heads * c.n.keys),
            ]
        ),
        lines.layout,
        evidence=lambda c: "n counts keys; V' has H d_v columns, which is d_model only where d_v = d_model / H",
    ),
    blocks("transformer-7", "question 3", "every line of the trace computation").claim(
        "df = tr(V' W^O G^T dS) = ... = tr((df/dA)^T dA)",
        lines.trace_lines,
        lambda c: np.full(7, along(c.f_of_scores, (c.a, c.a_dot))),
    ),
    blocks("transformer-8", "question 3", "the gradient at the scores").claim(
        "df/dA = G' o S - ((G' o S o U) 1^T) o exp(A), G' = G (W^O)^T V'^T, U = Upsilon(exp(A) 1)",
        lambda c: lines.pulled(c) * c.s - ((lines.pulled(c) * c.s * c.inverse) @ c.ones.T) * np.exp(c.a),
        lambda c: c.da,
        evidence=lambda c: (
            "it is S o (G' - rowsum(S o G')), block by block, which needs no exp(A) "
            f"[{figure(relative_error(c.s * (lines.pulled(c) - (lines.pulled(c) * c.s) @ c.ones), c.da))}]"
        ),
    ),
    blocks("transformer-9", "question 3", "the scale, taken out of the differential").claim(
        "df = tr(gamma (df/dA)^T d(Q W_1^Q (W_1^K)^T K^T, ..., Q W_H^Q (W_H^K)^T K^T))",
        lines.all_heads,
        lambda c: c.df,
    ),
    blocks("transformer-10", "question 3", "the sum over the heads is missing").claim(
        "df = tr(gamma (df/dA)^T d(Q W_h^Q (W_h^K)^T K^T P_h))",
        lambda c: lines.one_head(c, 0),
        lambda c: c.df,
        lambda c: np.sum([lines.one_head(c, h) for h in range(c.n.heads)], axis=0),
        reading=Reading(
            "df where only the weights of head h move", lambda c: lines.one_head(c, 0), lines.with_one_head_moving
        ),
        wrong="The line before has all heads, this one has head h alone: (A_1, ..., A_H) is a sum of A_h P_h.",
        correct="df = sum_h tr(gamma (df/dA)^T d(Q W_h^Q (W_h^K)^T K^T P_h))",
    ),
    blocks("transformer-11", "question 3", "the traces with one weight moving").claim(
        "tr(gamma K^T P_h (df/dA)^T Q d(W_h^Q (W_h^K)^T)), along W_h^Q or along W_h^K",
        lines.one_weight_lines,
        lines.one_weight_truth,
        evidence=lambda c: "one weight of one head moves, so the sum that transformer-10 lacks is not missed",
    ),
    blocks("transformer-12", "question 3", "the gradient at W_h^Q").claim(
        "df/dW_h^Q = gamma Q^T df/dA P_h^T K W_h^K",
        lines.d_w_q,
        lambda c: c.d_weights["w_q"],
    ),
    blocks("transformer-13", "question 3", "a differential is left in the gradient at W_h^K").claim(
        "df/dW_h^K = gamma K^T P_h (df/dA)^T Q W_h^Q d((W_h^K)^T)",
        lambda c: lines.d_w_k(c) @ t(c.w_k_dot[0]),
        lambda c: c.d_weights["w_k"],
        lines.d_w_k,
        reading=Reading(
            "the matrix whose trace is df along W_h^K",
            lambda c: np.trace(lines.d_w_k(c) @ t(c.w_k_dot[0]), axis1=1, axis2=2),
            lambda c: np.sum(c.d_weights["w_k"] * c.w_k_dot[0], axis=(1, 2)),
        ),
        wrong="The step from the trace to the gradient should drop d((W_h^K)^T). With it the right side is a "
        "differential, and d_model x d_model.",
        correct="df/dW_h^K = gamma K^T P_h (df/dA)^T Q W_h^Q",
    ),
    blocks("transformer-14", "question 1", "both lines of the trace computation for W^O").claim(
        "df = tr(G^T d(Concat(head_1, ..., head_H) W^O)) = tr(G^T Concat(head_1, ..., head_H) dW^O)",
        lines.lines_of_question_1,
        lambda c: np.full(2, along(lambda w: c.f(c.heads() @ w), (c.w_o, c.w_o_dot))),
    ),
    blocks("transformer-15", "question 2, lines 1 to 3", "the first lines of the trace computation for W^V").claim(
        "df = tr(G^T dX) = tr(G^T dConcat(head_1, ..., head_H) W^O) = tr(G^T d(S_1 V W_1^V, ..., S_H V W_H^V) W^O)",
        lambda c: np.array(lines.first_lines(c, w_v=c.w_v_dot)),
        lambda c: np.full(3, lines.along_w_v(c)),
        evidence=lambda c: "d acts on the parenthesis that follows it, and W^O stays as it is",
    ),
    blocks("transformer-16", "question 2, line 4", "the differential acts on the softmax, not on W^V").claim(
        "df = tr(W^O G^T d(S_1 V, ..., S_H V) diag(W_1^V, ..., W_H^V))",
        lines.line_4,
        lines.along_w_v,
        lines.line_4_at_w_v,
        lambda c: f"along W^V alone it gives {figure(abs(lines.line_4(c)))}, for S_h V does not depend on W^V",
        Reading("d((S_1 V, ..., S_H V) diag(W_1^V, ..., W_H^V))", lines.line_4_of_the_product, lines.along_w_v),
        wrong="The d of the line before has stayed with the left factor. It must act on diag(W^V), or on the product, "
        "as it does two lines below.",
        correct="df = tr(W^O G^T (S_1 V, ..., S_H V) d diag(W_1^V, ..., W_H^V))",
    ),
    blocks("transformer-17", "question 2", "the trace computation with the block-diagonal W^v").claim(
        "df = tr(W^O G^T d(A W^v)) = tr(W^O G^T A dW^v) = tr((A^T G (W^O)^T)^T dW^v), A = (S_1 V, ..., S_H V)",
        lines.lines_with_blocks,
        lambda c: np.full(3, lines.along_w_v(c)),
        evidence=lambda c: "dW^v being block-diagonal, as W^v is",
    ),
    blocks(
        "transformer-18", "question 3", "the lines of the trace computation before the softmax is written out"
    ).claim(
        "df = tr(G^T dX) = ... = tr(W^O G^T d(S_1, ..., S_H) diag(V W_1^V, ..., V W_H^V)) = tr(V' W^O G^T dS)",
        lines.lines_of_question_3,
        lambda c: np.full(6, c.df[0]),
        evidence=lambda c: "W^Q and W^K moving, d rightly acts on the softmax",
    ),
)

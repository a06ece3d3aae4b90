r"""LaTeX as documents print it is the same formula as its plain text."""

from __future__ import annotations

import pytest

from attngrad.formulas import FormulaError
from attngrad.formulas.parser import parse
from attngrad.formulas.tree import show
from printed import PRINTED

PAIRS = {
    r"\frac{\partial L}{\partial Q} = \frac{1}{\sqrt{d_k}} \frac{\partial L}{\partial S} K": "dQ = 1/sqrt(d_k) dS K",
    r"$$A = \text{softmax}\left(\frac{QK^T}{\sqrt{d_k}}\right),$$": "A = softmax(Q @ K.T / sqrt(d_k))",
    r"A = \mathrm{softmax}(S) = \operatorname{softmax}(S) = \sigma(S)": "A = softmax(S) = softmax(S) = softmax(S)",
    r"\(\delta = \text{rowsum}(O \odot dO)\)": "delta = rowsum(O * dO)",
    r"\frac{dL}{dQ} = \gamma \, \frac{dL}{dS} K": "dQ = scale dS K",
    r"\frac{\partial L}{\partial S}^T = \left[\frac{\partial L}{\partial S}\right]^{\top}": "dS.T = dS^T",
    r"\frac{\partial L}{\partial \left(\frac{QK^T}{\sqrt{d_k}} \right)} = \frac{\partial L}{\partial S}": "dS = dS",
    r"A_{i,j} = \frac{e^{S_{i,j}}}{\sum_{k=1}^n e^{S_{i,k}}}": "A_ij = exp(S_ij) / sum_k exp(S_ik)",
    r"\frac{\partial A_{ij}}{\partial S_{ij}} = A_{ij}(1 - A_{ij})": "dA_ij/dS_ij = A_ij (1 - A_ij)",
    r"\tilde{S} = \dot{S}": "S_dot = S_dot",
    r"\frac{\partial \mathcal{L}}{\partial X} = \frac{\partial \mathcal{L}}{\partial Q} W^{Q^T}": "dX = dQ W_Q.T",
    r"W^Q = W_Q = W^{Q^T}^T = (W_Q^T)^T = {W^Q^T}^T": "W_Q = W_Q = W_Q.T.T = W_Q.T.T = W_Q.T.T",
    r"\frac{\partial L}{\partial V} = A^{T} \cdot dO \in \mathbb{R}^{n \times d_v}": "dV = A.T dO",
    r"d_Q \sL(\theta) \equiv \Omega(\theta) K": "dQ = dS K",
    r"d_Q \mathscr{L} = d_Q L": "dQ = dQ",
    r"\mathrm{Att}(Q, K, V) = \text{Output} = AV": "O = O = A V",
    r"\begin{align*} O &= AV \\ &= \sigma(S) V \\ S &= \frac{QK^T}{\sqrt{d_k}} \end{align*}": (
        "O = A V = softmax(S) V, S = Q K.T / sqrt(d_k)"
    ),
    r"d\sigma(p_i) = \Delta \sigma(p_i) - \sigma(p_i) \sigma(p_i)^t": (
        "dsoftmax(p_i) = diag(softmax(p_i)) - softmax(p_i) softmax(p_i)^T"
    ),
    r"\nabla_Q \mathcal{L} = \nabla_{S} L \, K / \sqrt{d_{head}}": "dQ = dS K / sqrt(d_k)",
    r"A^{\mathrm{T}} = A^\mathsf{T} = A^{T} = A^T": "A.T = A.T = A.T = A.T",
    r"A \mathbf{1}_m = \mathbb{1}": "A @ ones = ones",
    r"\log \exp S = \ln(\exp(S))": "log(exp(S)) = log(exp(S))",
}


@pytest.mark.parametrize(("latex", "plain"), PAIRS.items())
def test_latex_and_plain_text_are_one_formula(latex, plain):
    assert parse(latex) == parse(plain)


@pytest.mark.parametrize("text", [text for text, _, _ in PRINTED])
def test_every_printed_formula_is_read_and_reads_back(text):
    equations = parse(text)
    assert parse(show(equations)) == equations


def test_a_stated_shape_is_kept():
    assert parse(r"dV = A^T dO \in \mathbb{R}^{n \times d_{\text{model}}}")[0].stated == ("n", "d_model")
    assert parse("dV = A^T dO")[0].stated is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (r"A = \frac{\partial Q}{\partial L}", "above the line"),
        (r"A = \frac{\partial f}{\partial S}", "unknown name 'f'"),
        (r"A = \frac{\partial L}{\partial (A + A)}", "may be differentiated at"),
        (r"A = \frac{\partial A_i}{\partial S_j}", "not of the list"),
        (r"A = \text{soft max}(S)", "expected '}'"),
        (r"A = \sum_{i=1}^{n+1} A_i", "an index must be a letter"),
        (r"A = \begin{bmatrix} A \end{bmatrix}", r"\begin is no part"),
        (r"\begin{matrix} A = A \end{matrix}", "environment 'matrix'"),
        (r"A = A \in \mathbb{R}^{n}", r"expected '\times'"),
        (r"A = A \in \mathbb{R}^{Q \times n}", "expected a size"),
        (r"A = \mathcal{L}", "the loss has no value here"),
    ],
)
def test_latex_beyond_the_list_is_refused(text, message):
    with pytest.raises(FormulaError) as caught:
        parse(text)
    assert message in str(caught.value)

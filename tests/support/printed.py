r"""The matrix formulas of attention of four documents, as they print them, and whether they hold.

Scale 1 where a document has none; a formula that says something else than a matrix formula (a line of code, a trace, a
table of shapes) is not here.
"""

from __future__ import annotations

NOTE = {
    r"A = \text{softmax}\left(\frac{QK^T}{\sqrt{d_k}}\right),": True,
    r"Z = QK^T,": False,
    r"\frac{\partial Z}{\partial Q} = K.": False,
    r"\frac{\partial \mathcal{L}}{\partial Q} = \frac{\partial \mathcal{L}}{\partial Z} \cdot "
    r"\frac{\partial Z}{\partial Q}.": True,
    r"\frac{\partial \mathcal{L}}{\partial Q} = \frac{\partial \mathcal{L}}{\partial A} \cdot K,": False,
    r"\frac{\partial Z}{\partial K} = Q^T.": False,
    r"\frac{\partial \mathcal{L}}{\partial K} = \left(\frac{\partial \mathcal{L}}{\partial A} \right)^T "
    r"\cdot Q.": False,
}

SELF_ATTENTION = {
    r"\text{Attention}(Q, K, V) = \text{softmax}\left(\frac{QK^T}{\sqrt{d_k}}\right)V": True,
    r"S = \frac{QK^T}{\sqrt{d_k}}": True,
    r"A = \text{softmax}(S)": True,
    r"O = AV": True,
    r"\frac{\partial L}{\partial O} = \frac{\partial L}{\partial O}": True,
    r"\frac{\partial L}{\partial A} = \frac{\partial L}{\partial O} \cdot V^T": True,
    r"\frac{\partial A_i}{\partial S_i} = A_i \cdot (I - A_i^T)": False,
    r"\frac{\partial L}{\partial S} = \left(\frac{\partial L}{\partial A} \right) \odot A - A "
    r"\left(\frac{\partial L}{\partial A} \right)^T \cdot A": False,
    r"\frac{\partial L}{\partial \left(\frac{QK^T}{\sqrt{d_k}} \right)} = \frac{\partial L}{\partial S}": True,
    r"\frac{\partial L}{\partial Q} = \frac{1}{\sqrt{d_k}} "
    r"\frac{\partial L}{\partial \left(\frac{QK^T}{\sqrt{d_k}} \right)} \cdot K": True,
    r"\frac{\partial L}{\partial K} = \frac{1}{\sqrt{d_k}} Q^T \cdot "
    r"\frac{\partial L}{\partial \left(\frac{QK^T}{\sqrt{d_k}} \right)}": False,
    r"\frac{\partial L}{\partial V} = A^T \cdot \frac{\partial L}{\partial O}": True,
    r"\frac{\partial L}{\partial Q} = \frac{1}{\sqrt{d_k}} \frac{\partial L}{\partial S} \cdot K": True,
    r"\frac{\partial L}{\partial K} = \frac{1}{\sqrt{d_k}} Q^T \cdot \frac{\partial L}{\partial S}": False,
    r"A_{i,j} = \frac{e^{S_{i,j}}}{\sum_{k=1}^n e^{S_{i,k}}}": True,
    r"\frac{\partial A_{i,j}}{\partial S_{i,j}} = A_{i,j}(1 - A_{i,j})": True,
    r"\frac{\partial A_{i,j}}{\partial S_{i,k}} = -A_{i,j}A_{i,k}": False,  # said of k != j only
    r"\frac{\partial L}{\partial S} = \frac{\partial L}{\partial A} \cdot J": False,
    r"\frac{\partial L}{\partial S} = \left(\frac{\partial L}{\partial A} \right) \odot A - A \cdot "
    r"\left(\frac{\partial L}{\partial A} \right)^T \cdot A": False,
    r"\text{Output} = \text{Attention}(Q, K, V) = \text{softmax}\left(\frac{QK^T}{\sqrt{d_k}}\right)V": True,
    r"Q = X \cdot W^Q": True,
    r"V = XW^V": True,
    r"\text{Output} = AV": True,
    r"\frac{\partial \mathcal{L}}{\partial A} = \frac{\partial \mathcal{L}}{\partial O} V^T "
    r"\in \mathbb{R}^{n \times n}": True,
    r"\frac{\partial \mathcal{L}}{\partial V} = A^T \frac{\partial \mathcal{L}}{\partial O} "
    r"\in \mathbb{R}^{n \times d_v}": True,
    r"\frac{\partial \mathcal{L}}{\partial S} = A \circ \left( \frac{\partial \mathcal{L}}{\partial A} - "
    r"\sum_{i=1}^n A_i \frac{\partial \mathcal{L}}{\partial A_i} \right) \in \mathbb{R}^{n \times n}": False,
    r"\frac{\partial \mathcal{L}}{\partial Q} = \frac{1}{\sqrt{d_k}} \frac{\partial \mathcal{L}}{\partial S} K "
    r"\in \mathbb{R}^{n \times d_k}": True,
    r"\frac{\partial \mathcal{L}}{\partial K} = \frac{1}{\sqrt{d_k}} \frac{\partial \mathcal{L}}{\partial S}^T Q "
    r"\in \mathbb{R}^{n \times d_k}": True,
    r"\begin{aligned}\frac{\partial \mathcal{L}}{\partial W^Q} &= X^T \frac{\partial \mathcal{L}}{\partial Q} "
    r"\in \mathbb{R}^{d_{\text{model}} \times d_k} \\ "
    r"\frac{\partial \mathcal{L}}{\partial W^K} &= X^T \frac{\partial \mathcal{L}}{\partial K} "
    r"\in \mathbb{R}^{d_{\text{model}} \times d_k} \\ "
    r"\frac{\partial \mathcal{L}}{\partial W^V} &= X^T \frac{\partial \mathcal{L}}{\partial V} "
    r"\in \mathbb{R}^{d_{\text{model}} \times d_v}\end{aligned}": True,
    r"\frac{\partial \mathcal{L}}{\partial X} = \frac{\partial \mathcal{L}}{\partial Q} W^{Q^T} + "
    r"\frac{\partial \mathcal{L}}{\partial K} W^{K^T} + \frac{\partial \mathcal{L}}{\partial V} W^{V^T} "
    r"\in \mathbb{R}^{n \times d_{\text{model}}}": True,
}

OMEGA = {
    r"\Attn(Q, K, V) = \sigma(QK^t) V,": True,
    r"\begin{align*} \Attn(Q, K, V) &= \sum_{i=1}^{n} e_i \sigma((e_i^t Q K^t)^t)^t V \\ "
    r"&= \sum_{i=1}^{n} e_i \sigma(K Q^t e_i)^t V, \end{align*}": True,
    r"p_i = K Q^t e_i": True,
    r"d_Q \sL(\theta) \equiv \sum_{i=1}^{n} e_i e_i^t \Lambda(\theta) V^t d \sigma(p_i) K.": True,
    r"d_K \sL(\theta) \equiv \sum_{i=1}^{n} d\sigma(p_i)^t V \Lambda(\theta)^t e_i e_i^t Q.": True,
    r"d_V \sL(\theta) \equiv \sum_{i=1}^{n} \sigma(p_i) e_i^t \Lambda(\theta).": True,
    r"\Omega(\theta) = \sum_{i=1}^{n} e_i e_i^t \Lambda(\theta) V^t d \sigma(p_i).": True,
    r"\Omega_i = e_i^t \Lambda(\theta) V^t (\Delta \sigma(p_i) - \sigma(p_i) \sigma(p_i)^t)": True,
}
"""Of a document without a scale."""

PRINTED = [(text, holds, None) for text, holds in (NOTE | SELF_ATTENTION).items()]
PRINTED += [(text, holds, 1.0) for text, holds in OMEGA.items()]

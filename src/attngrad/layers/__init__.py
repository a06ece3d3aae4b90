"""The multi-head attention layer: projections around attention, with its backward, forward mode and second order.

::

    Q = rope(X_q W_q + b_q)    K = rope(X_k W_k + b_k)    V = X_v W_v + b_v        heads split
    O = attention(Q, K, V)                                                        heads merged
    Y = O W_o + b_o

A 16-bit layer stores parameters and activations in 16 bits and computes every product in float32, rounded once.
"""

from __future__ import annotations

from attngrad.layers.multihead import MultiHeadAttention
from attngrad.layers.projections import LayerGradients

__all__ = ["LayerGradients", "MultiHeadAttention"]

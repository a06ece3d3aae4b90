"""One training step of a multi-head attention layer: d_model 128, 4 heads, a batch of 32 sequences of 10 tokens.

Run it: ``python examples/documents_layer.py``
"""

from __future__ import annotations

import numpy as np

import attngrad
from attngrad.optim import SGD


def main() -> tuple[float, float]:
    """Forward, backward, one step of SGD; print shapes and the loss before and after."""
    rng = np.random.default_rng(0)
    layer = attngrad.MultiHeadAttention(d_model=128, num_heads=4)
    optimizer = SGD(layer.params, lr=0.001)
    x = rng.standard_normal((32, 10, 128), dtype=np.float32)
    target = rng.standard_normal((32, 10, 128), dtype=np.float32)

    def loss(y: np.ndarray) -> float:
        """Half the squared distance, summed over features, mean over tokens: its gradient is (y - target) / tokens."""
        return 0.5 * float(np.mean(np.sum((y - target) ** 2, axis=-1)))

    y = layer(x)
    before = loss(y)
    dx = layer.backward((y - target) / np.float32(32 * 10))
    print("output:  ", y.shape)
    print("gradient:", dx.shape, "of the input")
    for name, gradient in layer.grads.items():
        print("gradient:", gradient.shape, "of", name)

    optimizer.step(layer.grads)
    after = loss(layer(x))
    print(f"loss: {before:.6f} before the step, {after:.6f} after")
    return before, after


if __name__ == "__main__":
    main()

"""Two layers of attention learn induction: to go on with a sequence that repeats itself.

Each sequence repeats a random block of distinct tokens, of a random length. Where the block comes round again, the next
token is the one that followed the last time; nothing else predicts it. It takes two layers: the first tells each token
its predecessor, so that the second can look for the place whose predecessor is the token it is at. (One layer stays
below an accuracy of 0.3: try ``--layers 1``.)

Every gradient is computed by hand: softmax cross-entropy, unembedding, ``layer.backward``, residuals, embedding.

Run it: ``python examples/induction.py --steps 400 --seed 0``
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import attngrad
from attngrad.optim import Adam, clip_by_global_norm

NDArray = npt.NDArray[Any]

VOCABULARY, LENGTH, BLOCK = 32, 32, (6, 14)
D_MODEL, HEADS, BATCH = 64, 4, 32


class Batch(NamedTuple):
    """Tokens and their successors ``(B, T)``, and where the successor follows from what came before."""

    tokens: NDArray
    successors: NDArray
    predictable: NDArray


class History(NamedTuple):
    """Loss and accuracy at each step, and the accuracy on fresh sequences at the end."""

    loss: list[float]
    accuracy: list[float]
    fresh_accuracy: float


def sample(rng: np.random.Generator, batch: int) -> Batch:
    """Sequences that repeat a block of distinct tokens, of a length drawn from BLOCK for each."""
    blocks = rng.permuted(np.tile(np.arange(VOCABULARY), (batch, 1)), axis=1)
    lengths = rng.integers(*BLOCK, (batch, 1), endpoint=True)
    place = np.arange(LENGTH + 1)
    sequence = np.take_along_axis(blocks, place % lengths, axis=1)
    return Batch(sequence[:, :-1], sequence[:, 1:], place[:-1] >= lengths)


class Model:
    """x = E[tokens]; x += layer(x), for each layer; logits = x U. Positions enter by the layers' rope."""

    def __init__(self, rng: np.random.Generator, layers: int) -> None:
        self.layers = [attngrad.MultiHeadAttention(D_MODEL, HEADS, rope=100.0, rng=rng) for _ in range(layers)]
        self.embed = rng.standard_normal((VOCABULARY, D_MODEL), dtype=np.float32)
        self.unembed = rng.standard_normal((D_MODEL, VOCABULARY), dtype=np.float32) / np.float32(D_MODEL)
        self.params: dict[str, Any] = {"embed": self.embed, "unembed": self.unembed}
        self.params |= {f"layer{i}": layer.params for i, layer in enumerate(self.layers)}

    def forward(self, tokens: NDArray) -> NDArray:
        """Logits ``(B, T, V)``."""
        self.tokens = tokens
        x = self.embed[tokens]
        for layer in self.layers:
            x = x + layer(x, causal=True)
        self.x = x
        return x @ self.unembed

    def backward(self, dlogits: NDArray) -> dict[str, Any]:
        """The gradient of <dlogits, logits>, in the form of ``params``."""
        # logits = x U
        dunembed = np.tensordot(self.x, dlogits, axes=((0, 1), (0, 1)))
        dx = dlogits @ self.unembed.T
        for layer in reversed(self.layers):
            layer.zero_grad()
            # x = x + layer(x)
            dx = dx + layer.backward(dx)
        # x = E[tokens]
        dembed = np.zeros_like(self.embed)
        np.add.at(dembed, self.tokens, dx)
        return {"embed": dembed, "unembed": dunembed} | {f"layer{i}": a.grads for i, a in enumerate(self.layers)}


def cross_entropy(logits: NDArray, batch: Batch) -> tuple[float, float, NDArray]:
    """Mean loss and accuracy over the predictable places, and the gradient at the logits: (softmax - one hot) / N."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    p = np.exp(shifted)
    p /= p.sum(axis=-1, keepdims=True)
    rows = np.nonzero(batch.predictable)
    picked = (*rows, batch.successors[rows])
    loss = -float(np.mean(np.log(p[picked])))
    accuracy = float(np.mean(logits.argmax(axis=-1)[rows] == batch.successors[rows]))
    # loss = -mean log softmax(logits)[picked]
    dlogits = p * batch.predictable[..., None]
    dlogits[picked] -= 1.0
    return loss, accuracy, dlogits / np.float32(len(rows[0]))


def train(steps: int = 400, seed: int = 0, layers: int = 2, lr: float = 3e-3, quiet: bool = False) -> History:
    """Train with Adam; show loss and accuracy; measure the accuracy on 256 fresh sequences."""
    rng = np.random.default_rng(seed)
    model = Model(rng, layers)
    optimizer = Adam(model.params, lr=lr, betas=(0.9, 0.99))
    losses, accuracies = [], []
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  accuracy {task.fields[accuracy]:.3f}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, disable=quiet) as progress:
        task = progress.add_task("train", total=steps, loss=float("nan"), accuracy=0.0)
        for step in range(steps):
            data = sample(rng, BATCH)
            loss, accuracy, dlogits = cross_entropy(model.forward(data.tokens), data)
            grads = model.backward(dlogits)
            clip_by_global_norm(grads, 1.0)
            optimizer.lr = lr * min(1.0, (step + 1) / 50)  # warm up
            optimizer.step(grads)
            losses.append(loss)
            accuracies.append(accuracy)
            progress.update(task, advance=1, loss=loss, accuracy=accuracy)
    data = sample(rng, 256)
    _, fresh, _ = cross_entropy(model.forward(data.tokens), data)
    return History(losses, accuracies, fresh)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Two layers of attention learn induction.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=2)
    arguments = parser.parse_args()
    attngrad.share_threads()  # the products of NumPy and the kernels on one set of threads
    history = train(arguments.steps, arguments.seed, arguments.layers)
    print(f"accuracy on fresh sequences, where the block comes round again: {history.fresh_accuracy:.3f}")


if __name__ == "__main__":
    main()

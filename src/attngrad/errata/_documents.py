"""The four documents: a short name for each, and its title."""

from __future__ import annotations

DOCUMENTS = {
    "equation-z": "The equation Z = QK^T",
    "back-pass": "Self-Attention Gradients Calculation for Back Pass",
    "transformer": "Transformer Attention Derivative",
    "explicit-formula": "An explicit formula for the gradient of standard attention",
}
"""The title of each document as it is printed there (the first heading where it has none), by a name from its words."""

_NUMBERS = dict(zip(("000", "001", "002", "003"), DOCUMENTS, strict=True))


def name_of(document: str) -> str:
    """The name of a document; also from the number that it had in earlier versions."""
    name = _NUMBERS.get(document, document)
    if name not in DOCUMENTS:
        raise ValueError(f"run: document must be None or one of {', '.join(DOCUMENTS)}; got {document!r}.")
    return name

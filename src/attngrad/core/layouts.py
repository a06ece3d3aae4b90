"""The shapes of q, k and v: what does not fit, and notes to errors where another layout would."""

from __future__ import annotations

from typing import Any

Shape = tuple[int, ...]

_AXES = "Axes are (..., heads, tokens, features)."


def misfit(q: Shape, k: Shape, v: Shape) -> tuple[str, str, object, str] | None:
    """What does not fit: argument, rule, what came, remedy; None where all does."""
    for name, shape in (("k", k), ("v", v)):
        if len(shape) != len(q) or shape[:-3] != q[:-3]:
            rule = f"have as many axes as q and its leading axes {q[:-3]}"
            return name, rule, f"shape {shape} beside q of {q}", "Leading axes do not broadcast."
    if k[-1] != q[-1]:
        return "k", f"have {q[-1]} features (axis -1), like q", f"shape {k}", _AXES
    if v[-2] != k[-2]:
        return "v", f"have {k[-2]} tokens (axis -2), like k", f"shape {v}", _AXES
    if len(q) > 2:
        if k[-3] != q[-3] and (k[-3] == 0 or q[-3] % k[-3]):
            rule = f"have {q[-3]} or a divisor of {q[-3]} heads (axis -3), like q"
            return "k", rule, k[-3], "Repeat or regroup the key heads."
        if v[-3] != k[-3]:
            return "v", f"have {k[-3]} heads (axis -3), like k", v[-3], _AXES
    return None


def broadcasts(shape: Shape, target: Shape) -> bool:
    """Whether an array of ``shape`` broadcasts to exactly ``target``."""
    if shape == target:
        return True
    if len(shape) > len(target):
        return False
    return all(n in (1, m) for n, m in zip(reversed(shape), reversed(target), strict=False))


def note(q: Shape, k: Shape, v: Shape) -> str:
    """What to add to an error if the shapes fit with tokens before heads; else nothing."""
    shapes = [_swapped(shape) for shape in (q, k, v)]
    if len(q) < 3 or misfit(*shapes) is not None:
        return ""
    axes = f"({'batch, ' if len(q) == 4 else '..., ' if len(q) > 4 else ''}tokens, heads, features)"
    return f" The shapes fit as {axes}: if q is that, pass q.swapaxes(-3, -2), and k and v likewise."


def array_note(name: str, shape: Shape, target: Shape, x: Any) -> str:
    """What to add where an option of ``shape`` does not broadcast to ``target``, beside the operands ``x``."""
    q, k, v = (tuple(a.shape) for a in (x.q, x.k, x.v))
    if len(q) == 3 and shape and shape[0] == q[0] > 1:
        asked = "if it is (batch, tokens, features), pass q[:, None], or split its features into heads"
        return f" A q of 3 axes is (heads, tokens, features): {asked}; k and v likewise."
    if len(q) < 4 or target != x.scores_shape:
        return ""
    if broadcasts(shape, (*_swapped(q)[:-1], _swapped(k)[-2])):
        return note(q, k, v)
    batch, _, queries, keys = target[-4:]
    if shape in ((batch, keys), (batch, queries, keys)):
        index = ":, None, None" if len(shape) == 2 else ":, None"
        return f" If its first axis is the batch, pass {name}[{index}]."
    return ""


def count_note(count: int, name: str, axis: int, x: Any) -> str:
    """What to add where an option has ``count`` entries, those of another ``axis`` of the operand ``name``."""
    q, k, v = (tuple(a.shape) for a in (x.q, x.k, x.v))
    shape = k if name == "k" else q
    return note(q, k, v) if len(shape) > 2 and shape[axis] == count else ""


def exchanged_note(name: str, shape: Shape, target: Shape) -> str:
    """What to add where ``name`` is of ``shape`` in place of ``target``, if tokens before heads explain it."""
    if len(shape) < 3 or _swapped(shape) != target:
        return ""
    return f"If its tokens come before its heads, pass {name}.swapaxes(-3, -2)."


def _swapped(shape: Shape) -> Shape:
    return (*shape[:-3], *shape[-2:-1], *shape[-3:-2], *shape[-1:])

"""How people spell things: arguments, weights, gradients, sizes, options, as ``names.toml`` has them."""

from __future__ import annotations

import re
from functools import cache

from attngrad.core.files import read_toml

_AFFIX = "w|weights?|kernel|matrix|proj|projection|linear|layer|lin|fc|dense|to|param|p|attn|mat|c"
_PART = {
    **dict.fromkeys(("q", "query", "queries"), "w_q"),
    **dict.fromkeys(("k", "key", "keys"), "w_k"),
    **dict.fromkeys(("v", "val", "value", "values"), "w_v"),
    **dict.fromkeys(("o", "out", "output", "0", "concat"), "w_o"),
    **dict.fromkeys(("qkv", "in"), "w_qkv"),
}
_WEIGHT = re.compile(
    rf"(?P<before>(?:{_AFFIX})*?)(?P<part>{'|'.join(sorted(_PART, key=len, reverse=True))})(?P<after>(?:{_AFFIX})*)"
)
_WHOLE = {"cattn": "w_qkv", "cproj": "w_o", "proj": "w_o", "projweight": "w_o", "wproj": "w_o", "dense": "w_o"}
_BEFORE = ("grads", "grad", "dld", "dl", "d", "g")
_AFTER = ("gradient", "grads", "grad", "g")


def squashed(name: str) -> str:
    """Lower case, letters and digits alone.

    >>> squashed("W_Q"), squashed("q_proj.weight")
    ('wq', 'qprojweight')
    """
    return re.sub(r"[^a-z0-9]", "", name.lower())


@cache
def _table(kind: str) -> dict[str, str]:
    return {
        spelling: name for name, many in read_toml("attngrad.auditor", "names.toml")[kind].items() for spelling in many
    }


def known(name: str, *kinds: str) -> str | None:
    """What a name means, by the first of these tables that has it.

    >>> known("grad_output", "arrays"), known("is_causal", "options"), known("n_head", "sizes")
    ('dout', 'causal', 'heads')
    """
    key = squashed(name)
    return next((_table(kind)[key] for kind in kinds if key in _table(kind)), None)


def weight(name: str, *, bare: bool = False) -> str | None:
    """Which projection a name stands for; a ``bare`` letter may stand for one too.

    >>> weight("W_q"), weight("q_proj"), weight("Wqkv"), weight("to_out"), weight("q"), weight("q", bare=True)
    ('w_q', 'w_q', 'w_qkv', 'w_o', None, 'w_q')
    """
    key = squashed(name)
    if key in _WHOLE:
        return _WHOLE[key]
    if _table("arrays").get(key) == "x":  # inp
        return None
    found = _WEIGHT.fullmatch(key)
    if found is None or not (bare or found["before"] or found["after"] or found["part"] == "qkv"):
        return None
    return _PART[found["part"]]


def gradient(name: str, *, bare: bool = False) -> str | None:
    """Which projection's gradient a name stands for.

    >>> gradient("dW_q"), gradient("grad_wo"), gradient("Wk_grad"), gradient("dq")
    ('dw_q', 'dw_o', 'dw_k', None)
    """
    key = squashed(name)
    for before in _BEFORE:
        if key.startswith(before) and (found := weight(key[len(before) :], bare=bare)):
            return f"d{found}"
    for after in _AFTER:
        if key.endswith(after) and (found := weight(key[: -len(after)], bare=bare)):
            return f"d{found}"
    return None

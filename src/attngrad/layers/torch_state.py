"""State dicts of ``torch.nn.MultiheadAttention``: the same numbers under other names, weights transposed.

torch computes ``x @ weight.T``, so weight is (out, in); ours are (in, out). torch stacks the three input projections
in ``in_proj_weight`` (3 E, E), unless kdim or vdim differ from E, when it keeps them apart.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from attngrad.core.arrays import NDArray, kind_of
from attngrad.core.checks import fail
from attngrad.core.dtypes import BFLOAT16

_APART = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
_KNOWN = {"in_proj_weight", *_APART, "in_proj_bias", "out_proj.weight", "out_proj.bias"}


def to_params(function: str, state: Mapping[str, Any]) -> dict[str, NDArray]:
    """Our parameters from torch's, as arrays of their own."""
    if not isinstance(state, Mapping):
        fail(TypeError, function, "state_dict", "be a mapping of names to tensors", kind_of(state))
    for name in state:
        if name in ("bias_k", "bias_v"):
            remedy = "Build the module with add_bias_kv=False."
            fail(ValueError, function, "state_dict", "be without bias_k and bias_v", repr(name), remedy)
        if name not in _KNOWN:
            rule, remedy = "be of one torch.nn.MultiheadAttention", "Take module.state_dict(), without a prefix."
            fail(ValueError, function, "state_dict", rule, f"the key {name!r}", remedy)
    required = ("out_proj.weight", *(("in_proj_weight",) if "in_proj_weight" in state else _APART))
    missing = [name for name in required if name not in state]
    if missing:
        fail(ValueError, function, "state_dict", f"have the keys {', '.join(required)}", f"no {', '.join(missing)}")
    arrays = {name: _to_numpy(function, name, x) for name, x in state.items()}
    size = arrays["out_proj.weight"].shape[0]
    for name, x in arrays.items():
        axes = 1 if name.endswith("bias") else 2
        rows = 3 * size if name.startswith("in_proj") else size
        if x.ndim != axes or x.shape[0] != rows:
            fail(ValueError, function, name, f"have {axes} axes and {rows} rows", f"shape {x.shape}")

    stacked = arrays.get("in_proj_weight")
    weights = np.split(stacked, 3) if stacked is not None else [arrays[name] for name in _APART]
    params = {name: w.T.copy() for name, w in zip(("w_q", "w_k", "w_v"), weights, strict=True)}
    params["w_o"] = arrays["out_proj.weight"].T.copy()
    if "in_proj_bias" in arrays:
        biases = np.split(arrays["in_proj_bias"], 3)
        params |= {name: b.copy() for name, b in zip(("b_q", "b_k", "b_v"), biases, strict=True)}
    if "out_proj.bias" in arrays:
        params["b_o"] = arrays["out_proj.bias"].copy()
    return params


def from_params(function: str, params: Mapping[str, NDArray]) -> dict[str, Any]:
    """torch's state dict from our parameters. A module of torch has all biases or none: missing ones become zeros."""
    try:
        import torch
    except ImportError as error:
        raise ImportError(f"{function}: PyTorch is not installed. Run: pip install 'attngrad[torch]'.") from error

    weights = [params[name].T for name in ("w_q", "w_k", "w_v")]
    if len({w.shape for w in weights}) == 1:
        arrays = {"in_proj_weight": np.concatenate(weights)}
    else:
        arrays = dict(zip(_APART, weights, strict=True))
    arrays["out_proj.weight"] = params["w_o"].T
    if any(name.startswith("b_") for name in params):
        b_q, b_k, b_v, b_o = (
            params.get(f"b_{x}", np.zeros(params[f"w_{x}"].shape[1], params["w_q"].dtype)) for x in "qkvo"
        )
        arrays |= {"in_proj_bias": np.concatenate([b_q, b_k, b_v]), "out_proj.bias": b_o}

    def tensor(x: NDArray) -> Any:
        own = x.copy(order="C")
        if own.dtype == BFLOAT16:
            return torch.from_numpy(own.view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(own)

    return {name: tensor(x) for name, x in arrays.items()}


def _to_numpy(function: str, name: str, x: Any) -> NDArray:
    if isinstance(x, np.ndarray):
        return x
    torch: Any = sys.modules.get("torch")  # a tensor cannot be here without it
    if torch is None or not isinstance(x, torch.Tensor):
        fail(TypeError, function, name, "be a torch.Tensor or a numpy.ndarray", kind_of(x))
    x = x.detach().cpu()
    if x.dtype == torch.bfloat16:
        return np.asarray(x.contiguous().view(torch.uint16).numpy()).view(BFLOAT16)
    return np.asarray(x.numpy())

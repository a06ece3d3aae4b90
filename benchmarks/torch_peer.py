"""torch's scaled_dot_product_attention, on the best path that it has for each case.

Causal with T = S goes through is_causal, grouped heads through enable_gqa; other causal shapes and windows are boolean
masks, a bias is a floating mask. Gradients come from torch.autograd.grad, the forward runs in inference mode. Where a
bias is differentiated or D != E, torch itself takes its n x n path. Only its math backend has a forward mode: JVP is
torch.func.jvp of it, HVP torch.func.jvp of torch.func.vjp.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from attngrad.core.arrays import NDArray
from attngrad.core.dtypes import BFLOAT16
from benchmarks.cases import Case, Inputs
from benchmarks.peers import Peer, Prepared, gradients, second_order


class Torch(Peer):
    """torch.nn.functional.scaled_dot_product_attention."""

    name = "torch"

    def __init__(self, threads: int) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.torch.set_num_threads(threads)
        passes = {
            "forward": self._forward,
            "forward + backward": self._backward,
            "jvp": self._jvp,
            "hvp": self._hvp,
        }
        super().__init__(str(self.torch.__version__), passes)
        self._sdpa = self.torch.nn.functional.scaled_dot_product_attention

    def tensor(self, x: NDArray) -> Any:
        """``x`` as a tensor on the same memory."""
        if x.dtype == BFLOAT16:
            return self.torch.from_numpy(x.view(np.int16)).view(self.torch.bfloat16)
        return self.torch.from_numpy(x)

    def array(self, x: Any) -> NDArray:
        """A tensor as a NumPy array; bfloat16 as float32."""
        x = x.detach()
        array: NDArray = (x.float() if x.dtype == self.torch.bfloat16 else x).numpy()
        return array

    def _options(self, case: Case, x: Inputs) -> dict[str, Any]:
        options: dict[str, Any] = {}
        visible = case.visible(np.arange(case.n.t))
        if case.options.causal and case.n.t == case.n.s and x.mask is None and x.bias is None:
            options["is_causal"] = True
        elif x.bias is not None:
            bias = x.bias if visible is None else np.where(visible, x.bias, -np.inf).astype(x.bias.dtype)
            options["attn_mask"] = self.tensor(bias)
        elif visible is not None or x.mask is not None:
            planes = [plane for plane in (visible, x.mask) if plane is not None]
            options["attn_mask"] = self.tensor(np.logical_and.reduce(planes))
        if case.n.group > 1:
            options["enable_gqa"] = True
        return options

    def _forward(self, case: Case, x: Inputs) -> Prepared:
        q, k, v = (self.tensor(a) for a in x[:3])
        sdpa, options, inference_mode = self._sdpa, self._options(case, x), self.torch.inference_mode

        def call() -> Any:
            with inference_mode():
                return sdpa(q, k, v, **options)

        return Prepared(call, lambda out: {"out": self.array(out)})

    def _backward(self, case: Case, x: Inputs) -> Prepared:
        q, k, v = (self.tensor(a).requires_grad_() for a in x[:3])
        dout = self.tensor(x.dout)
        sdpa, options = self._sdpa, self._options(case, x)
        leaves = [q, k, v]
        if case.options.dbias:
            leaves.append(options["attn_mask"].requires_grad_())
        grad = self.torch.autograd.grad

        def call() -> Any:
            out = sdpa(q, k, v, **options)
            return out, grad(out, leaves, dout)

        return Prepared(call, lambda found: gradients(found, self.array))

    def _pushed(self, function: Any, x: Inputs, names: Sequence[str]) -> Callable[[], Any]:
        """The call of torch.func.jvp of ``function``, which takes the inputs ``names`` in order, along the tangents."""
        jvp, backend = self.torch.func.jvp, self.torch.nn.attention.SDPBackend.MATH
        sdpa_kernel = self.torch.nn.attention.sdpa_kernel
        inputs = {name: self.tensor(getattr(x, name)) for name in names}
        tangents = {name: self.tensor(x_dot) for name, x_dot in x.given([f"{name}_dot" for name in names]).items()}
        primals = tuple(inputs[name] for name in tangents)
        directions = tuple(tangents.values())
        with warnings.catch_warnings():  # the first jvp of a process loads code that torch itself calls deprecated
            warnings.simplefilter("ignore", DeprecationWarning)
            jvp(self.torch.sin, (self.torch.ones(1),), (self.torch.ones(1),))

        def along(*moved: Any) -> Any:
            return function(*(inputs | dict(zip(tangents, moved, strict=True))).values())

        def call() -> Any:
            with sdpa_kernel(backend):
                return jvp(along, primals, directions)

        return call

    def _jvp(self, case: Case, x: Inputs) -> Prepared:
        sdpa, options = self._sdpa, self._options(case, x)
        call = self._pushed(lambda q, k, v: sdpa(q, k, v, **options), x, ("q", "k", "v"))
        return Prepared(call, lambda found: dict(zip(("out", "out_dot"), map(self.array, found), strict=True)))

    def _hvp(self, case: Case, x: Inputs) -> Prepared:
        sdpa, options, vjp = self._sdpa, self._options(case, x), self.torch.func.vjp

        def pulled(q: Any, k: Any, v: Any, dout: Any) -> Any:
            _, pullback = vjp(lambda q, k, v: sdpa(q, k, v, **options), q, k, v)
            return pullback(dout)

        return Prepared(self._pushed(pulled, x, ("q", "k", "v", "dout")), lambda found: second_order(found, self.array))


PEER = Torch

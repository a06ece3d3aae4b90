"""A Hessian-vector product of a whole language model of Transformers, in all its parameters.

``attn_implementation="attngrad"`` gives attention the second derivatives that the fused ``"sdpa"`` lacks; ``"eager"``
has them too, with T x S memory per head, and checks the result. The model is tiny and random: nothing is downloaded.

Run it: ``python examples/transformers_second_order.py``
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp
from transformers import AutoModelForCausalLM, LlamaConfig

import attngrad.transformers  # noqa: F401  registers the name "attngrad"


def main() -> dict[str, dict[str, Tensor]]:
    """The product by each implementation that has it; print their norms and how far they are apart."""
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}
    config = LlamaConfig(**size, num_attention_heads=4, num_key_value_heads=2)
    model = AutoModelForCausalLM.from_config(config).double().eval()
    ids = torch.randint(50, (2, 24))
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    direction = {name: torch.randn_like(p) for name, p in parameters.items()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
        return functional_call(model, parameters, (), inputs).loss

    found = {}
    for implementation in ("attngrad", "eager", "sdpa"):
        model.set_attn_implementation(implementation)
        try:
            found[implementation] = jvp(grad(loss), (parameters,), (direction,))[1]
        except NotImplementedError as error:
            print(f"{implementation:9s} {str(error).split('.')[0]}")
        else:
            norm = sum(x.square().sum() for x in found[implementation].values()) ** 0.5
            print(f"{implementation:9s} |H v| = {norm:.6f}")
    apart = max(float((x - found["eager"][name]).abs().max()) for name, x in found["attngrad"].items())
    print(f"attngrad and eager are at most {apart:.1e} apart: the softmax of eager is in float32")
    return found


if __name__ == "__main__":
    main()

"""MeanFlow with a diffusion transformer of Diffusers: the derivative du/dt by one forward-mode pass through the model.

The model learns the average velocity u(z, t) from noise at time t down to data at time 0, by the identity
u = v - t du/dt, with du/dt the derivative along (v, 1). PyTorch's fused attention has no forward mode;
``attngrad.diffusers.enable`` gives the model one that has. The model is tiny and random: nothing is downloaded.

Run it: ``python examples/diffusers_jvp.py``
"""

from __future__ import annotations

import torch
from diffusers import DiTTransformer2DModel
from torch import Tensor
from torch.nn import functional

import attngrad.diffusers


def main(steps: int = 100) -> list[float]:
    """Train for some steps; print what PyTorch says without attngrad, and the losses."""
    torch.manual_seed(0)
    size = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, "sample_size": 8, "in_channels": 4}
    model = DiTTransformer2DModel(**size, num_embeds_ada_norm=10).eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    labels = torch.arange(16) % 2
    data = functional.interpolate(torch.randn(2, 4, 2, 2), scale_factor=4)[labels]  # two pictures, by label

    def u(z: Tensor, t: Tensor) -> Tensor:
        return model(z, 3 * t, labels).sample

    def loss() -> Tensor:
        noise, t = torch.randn_like(data), torch.rand(16)
        velocity, late = noise - data, t[:, None, None, None]
        mean, mean_dot = torch.func.jvp(u, (data + late * velocity, t), (velocity, torch.ones_like(t)))
        return (mean - (velocity - late * mean_dot).detach()).square().mean()

    try:
        loss()
    except NotImplementedError as error:
        print("without attngrad:", str(error).split(".")[0])
    attngrad.diffusers.enable(model)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        losses.append(value.item())
        if step % 25 == 0 or step == steps - 1:
            print(f"step {step:3d}: loss {losses[-1]:.3f}")
    noise = torch.randn_like(data)
    with torch.no_grad():
        drawn = noise - u(noise, torch.ones(16))  # one step from noise to data
    print(f"one-step samples: rms distance to the data {(drawn - data).square().mean().sqrt():.2f}, noise's "
          f"{(noise - data).square().mean().sqrt():.2f}")  # fmt: skip
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)  # the model is too small for more
    main()

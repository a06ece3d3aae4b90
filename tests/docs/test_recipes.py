"""The recipes in examples/ compute what they say; PyTorch's fused attention does what their docstrings say of it."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as fused

import attngrad.torch
from tests.docs.test_examples import EXAMPLES, load
from tests.support import torch_dense

NO_FORWARD_MODE = pytest.raises(NotImplementedError, match="Trying to use forward AD with _scaled_dot_product_flash")
NO_DOUBLE_BACKWARD = pytest.raises(RuntimeError, match="flash_attention_for_cpu_backward is not implemented")


@pytest.fixture(autouse=True)
def one_thread():
    """So that no other test can hold these up: threads of PyTorch that wait for each other burn what others need."""
    before = torch.get_num_threads(), attngrad.get_num_threads()
    torch.set_num_threads(1)
    attngrad.set_num_threads(1)
    yield
    torch.set_num_threads(before[0])
    attngrad.set_num_threads(before[1])


def dense(*arrays, **options):
    return torch_dense.attention(*arrays, **options)[0]


def gradients(loss, parameters):
    """Of the loss by each parameter; none of them zero."""
    found = torch.autograd.grad(loss, list(parameters))
    assert all(g.any() for g in found)
    return found


def assert_same(found, expected):
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


# --- the backward pass by hand ---------------------------------------------------------------------------------------


def test_the_backward_pass_by_hand_is_that_of_the_kernels_and_of_finite_differences():
    recipe = load("backward_by_hand")
    found = recipe.errors(seed=3)
    assert {judge: set(errors) for judge, errors in found.items()} == {
        "attngrad.vjp": {"O", "dQ", "dK", "dV"},
        "finite differences": {"dQ", "dK", "dV"},
        "attngrad.MultiHeadAttention": {"y", "x", "w_q", "w_k", "w_v", "w_o"},
    }
    for judge, errors in found.items():
        assert max(errors.values()) < (1e-8 if judge == "finite differences" else 1e-13), judge


def test_the_errors_by_hand_show_a_wrong_row_term(monkeypatch):
    recipe = load("backward_by_hand")
    right = recipe.backward
    monkeypatch.setattr(recipe, "backward", lambda kept, dout: right(kept._replace(a=0.99 * kept.a), dout))
    assert all(max(errors.values()) > 1e-3 for errors in recipe.errors().values())


# --- MeanFlow --------------------------------------------------------------------------------------------------------


def meanflow_loss(attention):
    recipe = load("meanflow")
    torch.manual_seed(1)
    model = recipe.Velocity(attention).double()
    data = recipe.sample(3).double()
    batch = (data, torch.randn_like(data), *(x.double() for x in recipe.times(3)))
    return recipe.errors(model, *batch).sum(), [p for p in model.parameters() if p.requires_grad]


def test_the_step_of_meanflow_is_that_of_dense_attention():
    (ours, ours_by), (theirs, theirs_by) = map(meanflow_loss, (attngrad.torch.attention, dense))
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
    assert_same(gradients(ours, ours_by), gradients(theirs, theirs_by))


def test_fused_attention_has_no_forward_mode_for_meanflow():
    with NO_FORWARD_MODE:
        meanflow_loss(fused)


def test_the_error_of_meanflow_falls():
    _, losses = load("meanflow").train(60)
    assert np.mean(losses[-10:]) < 0.6 * np.mean(losses[:10])


# --- force matching --------------------------------------------------------------------------------------------------


def potential(attention=attngrad.torch.attention):
    recipe = load("force_matching")
    torch.manual_seed(2)
    return recipe, recipe.Potential(attention).double(), recipe.sample(2, torch.float64)


def test_the_forces_are_the_slopes_of_the_energy():
    recipe, model, data = potential()
    for energy in (model, recipe.morse):
        forces = recipe.forces_of(energy, data.x, data.kinds)
        for _ in range(5):
            direction, h = torch.randn_like(data.x), 1e-5
            with torch.no_grad():
                ends = [energy(data.x + step * direction, data.kinds).sum() for step in (h, -h)]
            expected = -(ends[0] - ends[1]) / (2 * h)
            torch.testing.assert_close((forces * direction).sum(), expected, rtol=1e-6, atol=1e-8)


def test_the_training_gradient_of_the_forces_is_that_of_dense_attention():
    found = []
    for attention in (attngrad.torch.attention, dense):
        recipe, model, data = potential(attention)
        parameters = [p for name, p in model.named_parameters() if name != "energy.2.bias"]  # of no force
        found.append(gradients(recipe.loss_of(model, data), parameters))
    assert_same(*found)


def test_the_error_of_the_forces_falls():
    _, found = load("force_matching").train(80)
    assert np.mean(found[-5:]) < 0.3 * np.mean(found[:5])


@pytest.mark.filterwarnings("ignore::UserWarning")  # why the kernel is not available
def test_fused_attention_has_no_kernel_for_a_bias_that_needs_a_gradient():
    def biased(q, k, v, bias, **_):
        return fused(q, k, v, bias)

    recipe, model, data = potential(biased)
    assert recipe.loss_of(model, data).isfinite()  # by the math backend
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="No available kernel"):
        recipe.loss_of(model, data)
    recipe, model, data = potential(lambda q, k, v, bias, **_: fused(q * bias.mean(), k, v))
    with NO_DOUBLE_BACKWARD:
        recipe.loss_of(model, data).backward()


# --- a gradient penalty ----------------------------------------------------------------------------------------------


def penalty():
    recipe = load("gradient_penalty")
    torch.manual_seed(3)
    critic, (real, made) = recipe.Critic().double(), recipe.sample(3)
    slopes = recipe.slopes(critic, real.double(), made.double(), torch.rand(3, 1, 1).double())
    parameters = [p for name, p in critic.named_parameters() if name != "score.2.bias"]  # of no slope
    return gradients((slopes - 1).square().sum(), parameters)


def test_the_gradient_of_the_penalty_is_that_of_dense_attention():
    with attngrad.torch.sdpa():
        ours = penalty()
    with sdpa_kernel(SDPBackend.MATH):
        assert_same(ours, penalty())


def test_fused_attention_has_no_double_backward_for_the_penalty():
    with NO_DOUBLE_BACKWARD:
        penalty()


def test_the_penalty_holds_the_slopes_near_1():
    recipe = load("gradient_penalty")
    with attngrad.torch.sdpa():
        assert recipe.train(0.0, steps=100).slope > 10
        with_penalty = recipe.train(10.0, steps=100)
    assert 0.5 < with_penalty.slope < 2
    assert with_penalty.gap > 0.5


# --- test-time training ----------------------------------------------------------------------------------------------


def outer(attention, dtype=torch.float64):
    recipe = load("test_time_training")
    torch.manual_seed(4)
    weights, rates = recipe.initial(dtype=dtype)
    loss = recipe.loss_of(weights, rates, *recipe.sample(3, dtype), attention=attention)
    return gradients(loss, [*weights.values(), *rates.values()])


def test_the_outer_gradient_is_that_of_dense_attention():
    assert_same(outer(attngrad.torch.attention), outer(dense))


def test_fused_attention_has_no_double_backward_for_the_inner_loop():
    with NO_DOUBLE_BACKWARD:
        outer(lambda q, k, v, **_: fused(q, k, v, is_causal=True, enable_gqa=True))


def test_the_target_is_the_turned_mean_of_the_window():
    recipe = load("test_time_training")
    x, y = recipe.sample(4)
    means = torch.stack([x[:, max(0, i - recipe.WINDOW + 1) : i + 1].mean(1) for i in range(recipe.TOKENS)], 1)
    torch.testing.assert_close(means.norm(dim=-1), y.norm(dim=-1))
    turn = torch.atan2(y[..., 1], y[..., 0]) - torch.atan2(means[..., 1], means[..., 0])
    torch.testing.assert_close(turn.cos(), turn.cos()[:, :1].expand_as(turn), rtol=0, atol=1e-4)


@pytest.mark.thorough
def test_inner_steps_lower_the_loss_on_fresh_sequences():
    losses, found = load("test_time_training").train()
    assert np.mean(losses[-20:]) < 0.5 * losses[0]
    assert found[2] < 0.8 * found[1] < 0.5 * found[0]


# --- audits ----------------------------------------------------------------------------------------------------------


def test_the_audit_of_fused_attention_says_what_raises():
    notes = str(attngrad.torch.audit(fused, effort="quick"))
    assert "does not offer forward mode" in notes
    assert "does not offer double backward" in notes


# --- the Hessian's spectrum ------------------------------------------------------------------------------------------


def test_the_ritz_values_are_eigenvalues_of_the_hessian_of_dense_attention():
    recipe = load("hessian_spectrum")
    p, oracle = recipe.problem(4), recipe.problem(4, attention=dense)
    exact = torch.linalg.eigvalsh(torch.func.hessian(oracle.loss)(oracle.start))
    torch.testing.assert_close(recipe.dense(p.loss, p.start), exact, rtol=1e-9, atol=1e-11)
    found = recipe.spectrum(recipe.hvp(p.loss, p.start), p.start, probes=2)
    assert recipe.ends(found) == pytest.approx((exact[0].item(), exact[-1].item()), rel=1e-8)


def test_lanczos_finds_every_eigenvalue_of_a_small_matrix():
    recipe = load("hessian_spectrum")
    x = torch.randn(7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    matrix, probe = x + x.T, x[0]
    found = recipe.lanczos(lambda v: matrix @ v, probe, 20)
    torch.testing.assert_close(found.values, torch.linalg.eigvalsh(matrix))
    for power in range(3):  # the weights integrate powers of the matrix at the probe
        expected = probe @ torch.linalg.matrix_power(matrix, power) @ probe / probe.square().sum()
        torch.testing.assert_close((found.values**power * found.weights).sum(), expected)


def test_fused_attention_has_no_hessian_vector_product():
    recipe = load("hessian_spectrum")
    p = recipe.problem(4, attention=lambda q, k, v, causal: fused(q, k, v, is_causal=causal))
    with NO_FORWARD_MODE:
        recipe.hvp(p.loss, p.start)(p.start)


# --- as scripts ------------------------------------------------------------------------------------------------------

SCRIPTS = {
    "backward_by_hand": ([], ["largest difference from finite differences"]),
    "meanflow": (["--steps", "5", "--alone"], ["made in one step: "]),
    "force_matching": (["--steps", "5"], ["on fresh clusters: error "]),
    "gradient_penalty": (["--steps", "5"], ["penalty 10.0: mean slope "]),
    "test_time_training": (["--steps", "5"], ["fresh sequences, 2 inner steps: "]),
    "hessian_spectrum": (["--width", "16"], ["256 parameters, trained: ", "1024 parameters, at the start: "]),
    "audit_your_attention": (
        [],
        [
            "homework: WRONG: dS, dQ and dK are wrong",
            "mistakes: scale-missing-in-dk, softmax-diagonal-only\n",
            "homework, corrected: RIGHT",
            "kernel: WRONG: dQ, dK and dV are wrong",
            "mistakes: scale-missing-in-dq, group-one-head-only\n",
            "kernel, corrected: RIGHT",
            "The smallest failing case",
        ],
    ),
}
"""Arguments, and what the script then prints, in this order."""


@pytest.mark.thorough
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_runs_by_itself(name):
    arguments, promised = SCRIPTS[name]
    command = [sys.executable, EXAMPLES / f"{name}.py", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ATTNGRAD_NUM_THREADS": "1"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)  # noqa: S603
    places = [found.stdout.find(text) for text in promised]
    assert -1 not in places, found.stdout
    assert places == sorted(places)


@pytest.mark.parametrize("name", ["meanflow", "force_matching", "gradient_penalty", "test_time_training"])
def test_it_learns_the_same_on_the_backend_of_other_devices(name):
    def steps():
        torch.manual_seed(0)
        with attngrad.torch.sdpa():
            return load(name).train(steps=2)

    native = steps()
    with attngrad.torch.use_backend("blocked"):
        blocked = steps()
    compared = [numbers(native), numbers(blocked)]
    assert compared[0]
    assert torch.allclose(*(torch.tensor(x, dtype=torch.float64) for x in compared), rtol=1e-3)


def numbers(found):
    """The numbers in what a training run returns: losses, a judgement."""
    if isinstance(found, float):
        return [found]
    if isinstance(found, dict):
        found = list(found.values())
    return [x for y in found for x in numbers(y)] if isinstance(found, (tuple, list)) else []

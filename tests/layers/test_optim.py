"""The optimisers step as torch's do; clipping and loss scaling keep their promises."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from attngrad import MultiHeadAttention
from attngrad.optim import SGD, Adam, LossScaler, clip_by_global_norm
from attngrad.testing import relative_error

SIXTEEN = [np.float16, ml_dtypes.bfloat16]


def quadratic(p: Any) -> Any:
    """The gradient of a function with curvature of every size, so that a wrong step shows."""
    return {name: np.sin(3 * x) + x * np.arange(1, x.size + 1).reshape(x.shape) for name, x in p.items()}


def start(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {"a": rng.standard_normal((3, 4)), "b": rng.standard_normal(5)}


SGD_CASES = [
    {"lr": 0.01},
    {"lr": 0.01, "weight_decay": 0.1},
    {"lr": 0.01, "momentum": 0.9},
    {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1},
    {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
]
ADAM_CASES = [
    {},
    {"lr": 0.1},
    {"lr": 0.1, "betas": (0.5, 0.9), "eps": 1e-3},
    {"lr": 0.1, "weight_decay": 0.2},
]


@pytest.mark.parametrize(
    ("ours", "theirs", "settings"),
    [(SGD, torch.optim.SGD, c) for c in SGD_CASES]
    + [(Adam, torch.optim.Adam, c) for c in ADAM_CASES[:3]]
    + [(Adam, torch.optim.AdamW, {"weight_decay": 0.0, **c}) for c in ADAM_CASES],
)
def test_twenty_steps_equal_those_of_torch(ours, theirs, settings):
    p = start()
    tensors = {name: torch.tensor(x, requires_grad=True) for name, x in p.items()}
    optimizer, peer = ours(p, **settings), theirs(tensors.values(), **settings)
    before = {name: x.copy() for name, x in p.items()}
    for i in range(20):
        if i == 10:  # lr may change on the way
            optimizer.lr *= 0.5
            peer.param_groups[0]["lr"] *= 0.5
        grads = quadratic(p)
        for name, x in tensors.items():
            x.grad = torch.tensor(grads[name])
        optimizer.step(grads)
        peer.step()
    for name, x in tensors.items():
        assert relative_error(p[name], x.detach().numpy()) < 1e-12
        assert not np.array_equal(p[name], before[name])


def test_parameters_of_several_layers_are_one_tree():
    layers = [MultiHeadAttention(4, 2, rng=i) for i in range(2)]
    bias = np.zeros(3, np.float32)
    optimizer = SGD({"bias": bias, **{f"layer{i}": layer.params for i, layer in enumerate(layers)}}, lr=1.0)
    before = layers[1].params["w_v"].copy()
    layers[1].grads["w_v"][...] = 0.25
    optimizer.step({"bias": np.ones(3, np.float32), "layer0": layers[0].grads, "layer1": layers[1].grads})
    assert np.array_equal(layers[1].params["w_v"], before - np.float32(0.25))
    assert np.array_equal(bias, [-1, -1, -1])
    assert np.array_equal(layers[0].params["w_v"], MultiHeadAttention(4, 2, rng=0).params["w_v"])


def test_some_parameters_may_be_trained_alone():
    layer = MultiHeadAttention(4, 2)
    before = {name: p.copy() for name, p in layer.params.items()}
    for g in layer.grads.values():
        g[...] = 1.0
    SGD({"w_o": layer.params["w_o"]}, lr=1.0).step(layer.grads)
    assert [name for name in before if not np.array_equal(before[name], layer.params[name])] == ["w_o"]


@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize(("kind", "settings"), [(SGD, {"lr": 2.0**-12}), (Adam, {"lr": 2.0**-12})])
def test_updates_too_small_for_sixteen_bits_add_up_in_the_master_copy(dtype, kind, settings):
    p, wide = {"w": np.ones(4, dtype)}, {"w": np.ones(4, np.float32)}
    grads = {"w": np.full(4, 0.5, np.float32)}
    narrow_step, wide_step = kind(p, **settings), kind(wide, **settings)
    narrow_step.step(grads)
    assert np.array_equal(p["w"], np.ones(4, dtype))  # too small to see
    wide_step.step(grads)
    for _ in range(499):
        narrow_step.step(grads)
        wide_step.step(grads)
    assert wide["w"][0] < 0.95
    assert np.array_equal(p["w"], wide["w"].astype(dtype))


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_a_write_to_a_sixteen_bit_parameter_is_gone_on_from(dtype):
    p = {"w": np.ones(2, dtype)}
    optimizer = SGD(p, lr=1.0)
    p["w"][0] = 8.0
    optimizer.step({"w": np.full(2, 0.5, dtype)})
    assert np.array_equal(p["w"], np.array([7.5, 0.5], dtype))


BAD_GRADS: dict[str, tuple[Any, type[Exception], str]] = {
    "missing": ({"a": np.ones((3, 4))}, ValueError, "grads must have the names of params, 'b' too; got a"),
    "shape": (
        {"a": np.ones((3, 4)), "b": np.ones(4)},
        ValueError,
        "grads['b'] must have the shape of the parameter, (5,)",
    ),
    "dtype": ({"a": np.ones((3, 4)), "b": np.ones(5, np.float32)}, TypeError, "grads['b'] must have the dtype"),
    "kind": ({"a": np.ones((3, 4)), "b": None}, TypeError, "grads['b'] must be a numpy.ndarray; got None"),
    "list": ([1], TypeError, "grads must be a mapping of names to arrays; got list"),
}


@pytest.mark.parametrize("kind", [SGD, Adam])
@pytest.mark.parametrize(
    ("dtype", "taken"),
    [
        (np.float64, {np.float64}),
        (np.float32, {np.float32}),
        (np.float16, {np.float16, np.float32}),
        (ml_dtypes.bfloat16, {ml_dtypes.bfloat16, np.float32}),
    ],
)
def test_gradients_have_the_dtype_of_the_parameter_or_float32_beside_sixteen_bits(kind, dtype, taken):
    for other in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16):
        p = {"w": np.ones(2, dtype)}
        optimizer, grads = kind(p, lr=0.5), {"w": np.ones(2, other)}
        if other in taken:
            optimizer.step(grads)
            assert not np.array_equal(p["w"], np.ones(2))
            continue
        rule = f"have the dtype of the parameter, {np.dtype(dtype)}{', or float32' if dtype in SIXTEEN else ''}; got"
        with pytest.raises(TypeError, match=rule):
            optimizer.step(grads)
        assert np.array_equal(p["w"], np.ones(2))


@pytest.mark.parametrize("kind", [SGD, Adam])
@pytest.mark.parametrize(("grads", "error", "message"), BAD_GRADS.values(), ids=BAD_GRADS.keys())
def test_wrong_gradients_are_named_and_change_nothing(kind, grads, error, message):
    p, fresh = start(), start()
    optimizer, other = kind(p, lr=0.1), kind(fresh, lr=0.1)
    with pytest.raises(error) as caught:
        optimizer.step(grads)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{kind.__name__}.step: ")
    assert all(np.array_equal(p[name], x) for name, x in start().items())
    optimizer.step(quadratic(p))
    other.step(quadratic(fresh))
    assert all(np.array_equal(p[name], fresh[name]) for name in p)


def frozen() -> Any:
    x = np.ones(3)
    x.flags.writeable = False
    return x


P = {"w": np.ones(3)}
BAD_SETTINGS: dict[str, tuple[Any, type[Exception], str]] = {
    "lr": (lambda: SGD(P, lr=-1.0), ValueError, "SGD: lr must be >= 0; got -1.0"),
    "lr kind": (lambda: Adam(P, lr="fast"), TypeError, "Adam: lr must be a real number; got 'fast' (str)"),
    "momentum": (lambda: SGD(P, 0.1, momentum=-0.1), ValueError, "momentum must be >= 0"),
    "nesterov": (lambda: SGD(P, 0.1, nesterov=True), ValueError, "momentum must be positive where nesterov is True"),
    "weight_decay": (lambda: Adam(P, weight_decay=math.inf), ValueError, "weight_decay must be finite; got inf"),
    "betas": (lambda: Adam(P, betas=(0.9, 1.0)), ValueError, "betas must be in [0, 1); got 1.0"),
    "betas kind": (lambda: Adam(P, betas=0.9), TypeError, "betas must be a pair (beta1, beta2); got 0.9"),
    "params kind": (lambda: SGD([P], 0.1), TypeError, "params must be a mapping of names to arrays; got list"),
    "params dtype": (lambda: SGD({"w": np.ones(3, int)}, 0.1), TypeError, "params['w'] must have dtype float64"),
    "read-only": (lambda: SGD({"w": frozen()}, 0.1), ValueError, "params['w'] must be writable"),
    "twice": (lambda: SGD({"a.b": P["w"], "a": {"b": P["w"]}}, 0.1), ValueError, "'a.b' twice"),
    "max_norm": (lambda: clip_by_global_norm(P, 0.0), ValueError, "clip_by_global_norm: max_norm must be positive"),
    "scale": (lambda: LossScaler(scale=0.0), ValueError, "LossScaler: scale must be in [2**-100, 2**100]"),
    "growth": (lambda: LossScaler(growth=0.5), ValueError, "growth must be >= 1"),
    "backoff": (lambda: LossScaler(backoff=1.0), ValueError, "backoff must be in (0, 1)"),
    "interval": (lambda: LossScaler(interval=0), ValueError, "interval must be positive"),
    "optimizer": (
        lambda: LossScaler().step(None, P),
        TypeError,
        "LossScaler.step: optimizer must be an optimiser, with a method step(grads); got None. Pass SGD(...)",
    ),
}


@pytest.mark.parametrize(("function", "error", "message"), BAD_SETTINGS.values(), ids=BAD_SETTINGS.keys())
def test_wrong_settings_are_named(function, error, message):
    with pytest.raises(error) as caught:
        function()
    assert message in str(caught.value)


# --- clip_by_global_norm ----------------------------------------------------------------------------------------------


def test_clipping_scales_all_gradients_alike_and_returns_the_norm():
    g = start()
    before = {name: x.copy() for name, x in g.items()}
    norm = math.sqrt(sum(np.sum(x**2) for x in g.values()))
    assert clip_by_global_norm(g, 10 * norm) == pytest.approx(norm, rel=1e-14)
    assert all(np.array_equal(g[name], before[name]) for name in g)
    assert clip_by_global_norm({"inner": g}, norm / 4) == pytest.approx(norm, rel=1e-14)
    assert all(relative_error(g[name], before[name] / 4) < 1e-14 for name in g)
    assert clip_by_global_norm(g, math.inf) == pytest.approx(norm / 4, rel=1e-14)


@pytest.mark.parametrize("size", [1e-310, 1e-200, 1e200, 1e307])
def test_the_norm_neither_overflows_nor_underflows(size):
    g = {"a": np.array([3 * size]), "b": np.array([4 * size, 0.0])}
    assert clip_by_global_norm(g, 1e308) == pytest.approx(5 * size, rel=1e-10)
    assert clip_by_global_norm(g, size) == pytest.approx(5 * size, rel=1e-10)
    assert np.allclose([g["a"][0] / size, g["b"][0] / size], [0.6, 0.8])


def test_the_norm_of_float32_gradients_is_taken_in_float64():
    g = {"w": np.array([3e30, 4e30], np.float32)}
    assert clip_by_global_norm(g, 1.0) == pytest.approx(5e30, rel=1e-6)
    assert g["w"].dtype == np.float32
    assert np.allclose(g["w"], [0.6, 0.8])


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_sixteen_bit_gradients_are_clipped_in_place(dtype):
    g = {"w": np.array([300.0, 400.0], dtype)}
    assert clip_by_global_norm(g, 5.0) == 500.0
    assert np.array_equal(g["w"], np.array([3.0, 4.0], dtype))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_norm_that_is_not_finite_leaves_the_gradients_alone(bad):
    g = {"a": np.array([1.0, bad]), "b": np.full(3, 7.0)}
    assert not math.isfinite(clip_by_global_norm(g, 1.0))
    assert np.array_equal(g["a"], [1.0, bad], equal_nan=True)
    assert np.array_equal(g["b"], [7.0, 7.0, 7.0])


def test_a_read_only_gradient_is_named_before_any_is_scaled_and_may_be_measured():
    g = {"a": np.full(3, 7.0), "b": frozen()}
    with pytest.raises(ValueError, match=r"clip_by_global_norm: grads\['b'\] must be writable; got a read-only array"):
        clip_by_global_norm(g, 1.0)
    assert np.array_equal(g["a"], [7.0, 7.0, 7.0])
    assert clip_by_global_norm(g, math.inf) == pytest.approx(math.sqrt(150.0))


def test_no_gradients_have_norm_zero():
    assert clip_by_global_norm({}, 1.0) == 0.0
    assert clip_by_global_norm({"a": np.zeros(3), "b": np.zeros((0, 2))}, 1.0) == 0.0


# --- LossScaler -------------------------------------------------------------------------------------------------------


def test_the_scaler_steps_on_the_unscaled_gradients_and_leaves_them_as_they_are():
    p, q = start(), start()
    grads = quadratic(p)
    scaled = {name: 1024.0 * g for name, g in grads.items()}
    kept = {name: g.copy() for name, g in scaled.items()}
    assert LossScaler(scale=1024.0).step(Adam(p), scaled)
    Adam(q).step(grads)
    assert all(np.array_equal(p[name], q[name]) for name in p)
    assert all(np.array_equal(scaled[name], kept[name]) for name in p)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_scaler_skips_and_backs_off_on_inf_and_nan(bad):
    p = start()
    optimizer, scaler = Adam(p, lr=0.1), LossScaler(scale=8.0, backoff=0.25)
    grads = quadratic(p)
    grads["b"][3] = bad
    assert not scaler.step(optimizer, grads)
    assert scaler.scale == 2.0
    assert all(np.array_equal(p[name], x) for name, x in start().items())
    q = start()  # and the optimiser has not counted the step
    assert scaler.step(optimizer, {n: 2.0 * g for n, g in quadratic(p).items()})
    Adam(q, lr=0.1).step(quadratic(q))
    assert all(np.array_equal(p[name], q[name]) for name in p)


def test_the_scaler_grows_after_an_interval_of_good_steps_in_a_row():
    p = {"w": np.zeros(1)}
    optimizer, scaler = SGD(p, lr=0.0), LossScaler(scale=4.0, growth=3.0, interval=2)
    good, bad = {"w": np.ones(1)}, {"w": np.full(1, np.inf)}
    scales = []
    for g in (good, good, good, bad, good, good):
        scaler.step(optimizer, g)
        scales.append(scaler.scale)
    assert scales == [4.0, 12.0, 12.0, 6.0, 6.0, 18.0]


def test_the_scale_reaches_neither_zero_nor_infinity():
    p = {"w": np.zeros(1, np.float32)}
    optimizer = SGD(p, lr=0.0)
    small, large = LossScaler(backoff=1e-30), LossScaler(growth=1e30, interval=1)
    for _ in range(9):
        small.step(optimizer, {"w": np.full(1, np.nan, np.float32)})
        large.step(optimizer, {"w": np.zeros(1, np.float32)})
    assert 0.0 < small.scale < 1e-20
    assert 1e20 < large.scale < np.finfo(np.float32).max


def test_the_scaler_clips_what_it_has_unscaled():
    p = {"w": np.zeros(2)}
    assert LossScaler(scale=8.0).step(SGD(p, lr=1.0), {"w": np.array([24.0, 32.0])}, max_norm=1.0)
    assert np.allclose(p["w"], [-0.6, -0.8])


def test_sixteen_bit_gradients_are_unscaled_in_float32():
    p = {"w": np.ones(1, np.float16)}
    optimizer, scaler = SGD(p, lr=2.0**24), LossScaler(scale=2.0**16)
    assert scaler.step(optimizer, {"w": np.full(1, 2.0**-10, np.float16)})  # 2**-26 unscaled: zero in float16
    assert p["w"][0] == 0.75


def test_the_scaler_passes_on_the_error_of_a_wrong_gradient_and_does_not_count_the_step():
    p = start()
    scaler = LossScaler(scale=4.0, interval=1)
    with pytest.raises(ValueError, match="'b' too"):
        scaler.step(SGD(p, lr=0.1), {"a": np.ones((3, 4))})
    assert scaler.scale == 4.0


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_a_sixteen_bit_layer_learns_with_the_scaler(dtype):
    rng = np.random.default_rng(0)
    x, target = (rng.standard_normal((4, 5, 16)) for _ in range(2))
    layer = MultiHeadAttention(16, 2, dtype=dtype)
    optimizer, scaler = Adam(layer.params, lr=3e-3), LossScaler(scale=2.0**24, interval=50)
    losses, stepped = [], []
    for _ in range(120):
        difference = layer(x.astype(dtype)).astype(np.float64) - target
        losses.append(float(np.mean(difference**2)))
        layer.zero_grad()
        with np.errstate(over="ignore"):
            layer.backward((scaler.scale * difference / len(x)).astype(dtype))
        stepped.append(scaler.step(optimizer, layer.grads))
    if dtype is np.float16:
        assert not stepped[0]  # overflow at first: skipped, until the scale has come down
    assert sum(stepped) > 90
    assert losses[-1] < 0.5 * losses[0]

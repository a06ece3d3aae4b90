"""Files of layers: bit exact, whole or not at all, and refused by name where they are not ours."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from attngrad import MultiHeadAttention
from layer_tools import DTYPES, randomise


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "config",
    [{}, {"bias": True}, {"num_kv_heads": 2, "d_head": 6, "rope": 12345.678, "bias": True}],
    ids=["plain", "bias", "grouped, rope"],
)
def test_save_and_load_are_bit_exact(tmp_path, dtype, config):
    layer = randomise(MultiHeadAttention(8, 4, dtype=dtype, **config))
    layer.params["w_q"][0, :4] = [np.nan, np.inf, -0.0, np.finfo(dtype).tiny if dtype in DTYPES[:3] else 1e-40]
    path = tmp_path / "layer.safetensors"
    layer.save(path)
    loaded = MultiHeadAttention.load(str(path))
    assert repr(loaded) == repr(layer)
    assert list(loaded.params) == list(layer.params)
    for name, p in layer.params.items():
        assert loaded.params[name].tobytes() == p.tobytes()
        assert loaded.params[name].flags.writeable
    assert os.listdir(tmp_path) == ["layer.safetensors"]


def test_a_loaded_layer_computes_and_trains_as_the_saved_one(tmp_path):
    module = torch.nn.MultiheadAttention(8, 2, kdim=6, vdim=10, dtype=torch.float64)
    layer = MultiHeadAttention.from_torch(module.state_dict(), 2)
    layer.save(tmp_path / "x")
    loaded = MultiHeadAttention.load(tmp_path / "x")
    rng = np.random.default_rng(0)
    x = [rng.standard_normal((3, n)) for n in (8, 6, 10)]
    assert np.array_equal(loaded(*x), layer(*x))
    assert all(np.array_equal(a, b) for a, b in zip(loaded.backward(x[0]), layer.backward(x[0]), strict=True))


def test_save_replaces_the_file_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "layer.safetensors"
    MultiHeadAttention(8, 2, rng=1).save(path)
    before = path.read_bytes()

    def full_disk(fd: int) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(OSError, match="no space left"):
            MultiHeadAttention(8, 2, rng=2).save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]
    with path.open("rb") as reader:  # who reads the old file while the new one is written has it whole
        MultiHeadAttention(8, 2, rng=2).save(path)
        assert reader.read() == before
    assert path.read_bytes() != before


@pytest.mark.parametrize("place", ["missing/layer", "file/layer", "folder"])
def test_where_nothing_can_be_written_the_error_names_the_path_that_was_given(tmp_path, place, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match=rf": '{place}'$") as caught:
        MultiHeadAttention(8, 2).save(place)
    assert caught.value.filename == place
    assert isinstance(caught.value, FileNotFoundError) == place.startswith("missing")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_a_name_may_be_as_long_as_the_file_system_takes(tmp_path):
    path = tmp_path / ("x" * 255)
    MultiHeadAttention(8, 2).save(path)
    assert MultiHeadAttention.load(path).d_model == 8


def write_foreign(path: Any, tensors: dict[str, Any], config: Any) -> None:
    save_file(tensors, path, None if config is None else {"attngrad": config})


OURS = {"layer": "MultiHeadAttention", "num_heads": 2, "num_kv_heads": 2, "rope": None}
X = np.ones((2, 3, 8), np.float32)
FOREIGN: dict[str, tuple[Callable[[Any], Any], str]] = {
    "text": (lambda p: p.write_text("not a checkpoint at all"), "the file must be safetensors, and complete"),
    "empty": (lambda p: p.write_bytes(b""), "the file must be safetensors, and complete"),
    "no metadata": (lambda p: write_foreign(p, {"w": X}, None), "the file must be of a MultiHeadAttention"),
    "other metadata": (lambda p: write_foreign(p, {"w": X}, "}"), "the file must be of a MultiHeadAttention"),
    "a list": (lambda p: write_foreign(p, {"w": X}, "[1]"), "the file must be of a MultiHeadAttention"),
    "other layer": (
        lambda p: write_foreign(p, {"w": X}, '{"layer": "MLP"}'),
        "the file must be of a MultiHeadAttention",
    ),
    "missing": (lambda p: write_foreign(p, {"w_q": X[0]}, json.dumps(OURS)), "'w_k' is missing or unknown"),
    "integers": (
        lambda p: write_foreign(p, {"w_q": np.ones(3, int)}, json.dumps(OURS)),
        "tensor 'w_q' must be float64",
    ),
    "shapes": (
        lambda p: write_foreign(
            p, {f"w_{c}": X[0].T.copy() for c in "qkvo"}, json.dumps({**OURS, "num_heads": 3, "num_kv_heads": 3})
        ),
        "w_o must have 8 columns",
    ),
}


@pytest.mark.parametrize(("write", "rule"), FOREIGN.values(), ids=FOREIGN.keys())
def test_a_file_that_is_not_ours_is_named_with_the_rule(tmp_path, write, rule):
    path = tmp_path / "other.safetensors"
    write(path)
    with pytest.raises(ValueError, match=r"MultiHeadAttention\.load") as caught:
        MultiHeadAttention.load(path)
    assert rule in str(caught.value)
    assert "other.safetensors" in str(caught.value)


def test_a_truncated_file_is_named(tmp_path):
    path = tmp_path / "cut.safetensors"
    MultiHeadAttention(8, 2).save(path)
    whole = path.read_bytes()
    for size in (4, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"cut\.safetensors.*must be safetensors, and complete"):
            MultiHeadAttention.load(path)
    with pytest.raises(FileNotFoundError):
        MultiHeadAttention.load(tmp_path / "none")

"""What a type checker tells a user of the public functions."""

from __future__ import annotations

import pytest
from mypy import api

ARRAY = "numpy.ndarray[tuple[Any, ...], numpy.dtype[Any]]"
CODE = """
import numpy, torch, attngrad, attngrad.torch
x = numpy.eye(2)
t = torch.eye(2)
reveal_type(attngrad.attention(x, x, x, causal=True))
reveal_type(attngrad.attention(x, x, x, return_lse=True))
reveal_type(attngrad.vjp(x, x, x, return_lse=True)[0])
reveal_type(attngrad.attention_weights(x, x))
reveal_type(attngrad.torch.attention(t, t, t))
attngrad.attention(x, x, x, casual=True)
"""


@pytest.mark.thorough
def test_what_is_returned_depends_on_return_lse_and_an_unknown_option_is_told(tmp_path):
    file = tmp_path / "use.py"
    file.write_text(CODE)
    told, errors, _ = api.run(["--strict", "--no-error-summary", f"--cache-dir={tmp_path}", str(file)])
    assert errors == ""
    types = [line.split('"')[1] for line in told.splitlines() if "Revealed type" in line]
    pair = f"tuple[{ARRAY}, {ARRAY}]"
    assert types == [ARRAY, pair, pair, ARRAY, "torch._tensor.Tensor"]
    assert '"casual"' in told

"""The corpus is audited without a wrapper: every verdict is right, and the wrong ones are named in full."""

import random

import pytest

from tests.auditor.corpus.candidates import INDEX, VARIATIONS, label
from tests.auditor.corpus.score import score
from tiers import thorough

ALL = [*INDEX, *VARIATIONS]
UNNAMED: set[str] = set()
"""Those that are wrong and are not named in full."""
TELLING = {
    "numpy_homework.py:sdpa_backward_v1",
    "numpy_masks.py:causal_with_cache",
    "torch_functions.py:FlashAttnRef",
    "torch_kernels.py:bwd_d64",
    "layouts.py:backward_btd_keys",
    "jax_functions.py:pallas_like",
    "layers.py:SelfAttentionFlat",
    "layers_functional.py:AttentionTwoTerms",
    "torch_modules.py:CausalSelfAttention",
    "tinyformer/attention.py:Attention",
    "tinyformer/old.py:attention_vjp_old",
    "variations.py:ScaledAttention",
}
"""One of each file, for ``make test``."""
MORE = {
    "numpy_masks.py:gqa_tiled",
    "numpy_masks.py:dropout_attention_fwd",
    "layouts.py:attn_bthd",
    "layouts.py:varlen_attention",
    "layers.py:PackedAttentionShort",
}
"""And these: two conventions, a seed that is not used, a layout, a layer."""


@pytest.fixture(autouse=True)
def seeded():
    """One candidate is wrong in one call of 20, by Python's generator."""
    random.seed(0)


def audited(entry, effort):
    row = score(entry, effort=effort)
    assert row.audited, row.note
    assert row.verdict_right, row.note
    assert row.in_full == (not entry["right"] and label(entry) not in UNNAMED), (row.mistakes, row.note)


@pytest.mark.filterwarnings("ignore")  # as a user would run it: NaN and overflow in a wrong candidate warn
@pytest.mark.parametrize("entry", [e for e in ALL if label(e) in TELLING | MORE], ids=label)
def test_a_telling_candidate_of_each_file_is_judged_and_named_by_quick(entry):
    audited(entry, "quick")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("entry", thorough(ALL), ids=label)
def test_every_candidate_is_judged_and_named(entry):
    audited(entry, "default")


def test_nine_of_ten_that_are_wrong_are_named():
    wrong = {label(e) for e in INDEX if not e["right"]}
    assert {label(e) for e in ALL} >= UNNAMED | TELLING | MORE
    assert len({name.split(":")[0] for name in TELLING}) == len(TELLING) == len({e["file"] for e in ALL})
    assert len(UNNAMED & wrong) <= 0.1 * len(wrong)

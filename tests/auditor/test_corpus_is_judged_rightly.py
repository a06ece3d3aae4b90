"""Every candidate of the corpus is audited without a wrapper, and the verdict is what the index says."""

import pytest

from tests.auditor.corpus.candidates import INDEX, label
from tests.auditor.corpus.score import score

TELLING = ("gqa_tiled", "dropout_attention_fwd", "attn_bthd", "varlen_attention", "PackedAttentionShort")
"""What ``make test`` audits of them: two conventions, a seed that is not used, a layout, a layer."""
ENTRIES = [pytest.param(e, marks=[] if e["name"] in TELLING else [pytest.mark.thorough], id=label(e)) for e in INDEX]


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.filterwarnings("ignore")  # what candidates do in arithmetic is their business
def test_the_verdict_is_what_the_index_says(entry):
    row = score(entry, effort="quick")
    assert row.verdict_right, (row.status, row.note)
    if entry["name"] == "gqa_tiled":
        assert row.mistakes == ()

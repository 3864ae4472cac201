"""The reader of Prometheus text."""

import pytest

from tests.support.metrics import parse

TEXT = """\
# TYPE firsttoken_kv_blocks gauge
firsttoken_kv_blocks{role="decode",state="free",worker="decode-0"} 5.0
firsttoken_kv_blocks{role="decode",state="active",worker="decode-0"} 2.0
# TYPE firsttoken_step_sequences histogram
firsttoken_step_sequences_bucket{le="1.0"} 3.0
firsttoken_step_sequences_bucket{le="2.0"} 4.0
firsttoken_step_sequences_bucket{le="+Inf"} 10.0
firsttoken_step_sequences_count 10.0
firsttoken_step_sequences_sum 40.0
"""


def test_sums_and_labels() -> None:
    """Totals by labels; an unknown name is 0."""
    scrape = parse(TEXT)

    assert 7 == scrape.total("firsttoken_kv_blocks")
    assert 5 == scrape.total("firsttoken_kv_blocks", state="free")
    assert {"free": 5, "active": 2} == scrape.by("firsttoken_kv_blocks", "state")
    assert 0 == scrape.total("nothing")


def test_histograms() -> None:
    """Observations above a bound; a value that is no bound is refused."""
    scrape = parse(TEXT)

    assert 7 == scrape.above("firsttoken_step_sequences", 1.0)
    with pytest.raises(ValueError, match="bounds"):
        scrape.above("firsttoken_step_sequences", 3.0)

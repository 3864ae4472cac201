"""Packing of prefill chunks."""

from hypothesis import given
from hypothesis import strategies as st

from shared.engine.batcher import pack_chunks


@given(
    lengths=st.lists(st.integers(0, 300), max_size=30),
    token_budget=st.integers(1, 400),
    max_sequences=st.integers(1, 12),
)
def test_a_step_is_within_its_limits_and_never_idle(lengths: list[int], token_budget: int, max_sequences: int) -> None:
    """In order, without doubles; the oldest is in; beyond it the budget holds; nobody who would fit is left out."""
    picked = pack_chunks(lengths, token_budget=token_budget, max_sequences=max_sequences)
    used = sum(lengths[place] for place in picked)

    assert sorted(set(picked)) == picked
    assert picked[:1] == ([0] if lengths else [])
    assert len(picked) <= max_sequences
    assert used <= token_budget or len([place for place in picked if lengths[place]]) == 1
    if len(picked) < max_sequences:
        left_out = [length for place, length in enumerate(lengths) if place not in picked]
        assert all(length > token_budget - used for length in left_out)

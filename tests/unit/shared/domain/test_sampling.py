"""Sampling parameters cannot be wrong."""

from typing import Any

import pytest

from shared.domain.sampling import MAX_SEED, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("inf")),
        ("top_k", -1),
        ("seed", -1),
        ("seed", MAX_SEED + 1),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: float) -> None:
    """The message starts with the field, so that an edge can point at it."""
    values: dict[str, Any] = {"seed": 1, field: value}

    with pytest.raises(ValueError, match=f"^{field} "):
        SamplingParams(**values)


def test_temperature_zero_is_greedy() -> None:
    """And nothing else is."""

    assert SamplingParams(temperature=0.0, seed=1).is_greedy
    assert not SamplingParams(temperature=0.01, seed=1).is_greedy

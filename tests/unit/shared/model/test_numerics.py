"""Numeric modes and the fingerprint that keeps unlike ones apart."""

from typing import get_args

from shared.model.numerics import NumericMode, WeightFormat, deployment_numerics
from shared.settings import NumericModeName


def test_what_each_mode_computes_with() -> None:
    """Format of the weights, bits of the layers' activations, bits of the head's."""
    assert {
        NumericMode.F32: (WeightFormat.F32, None, None),
        NumericMode.Q4F32: (WeightFormat.Q4, None, None),
        NumericMode.Q4A16: (WeightFormat.Q4, 16, 16),
        NumericMode.Q4A8: (WeightFormat.Q4, 8, 16),
        NumericMode.Q8A16: (WeightFormat.Q8, 16, 16),
        NumericMode.BF16: (WeightFormat.BF16, None, None),
    } == {mode: (mode.weight_format, mode.activation_bits, mode.head_activation_bits) for mode in NumericMode}


def test_settings_know_the_same_modes() -> None:
    """They are a layer below and repeat the names."""
    assert [str(mode) for mode in NumericMode] == list(get_args(NumericModeName))


def test_whatever_changes_a_bit_changes_the_fingerprint() -> None:
    """Weights, either role's way of computing, and which role has which."""
    prints = [
        deployment_numerics("a", prefill="x", decode="x"),
        deployment_numerics("b", prefill="x", decode="x"),
        deployment_numerics("a", prefill="y", decode="x"),
        deployment_numerics("a", prefill="x", decode="y"),
        deployment_numerics("a", prefill="y", decode="y"),
    ]

    assert len(set(prints)) == len(prints)
    assert deployment_numerics("a", prefill="x", decode="x") == prints[0]

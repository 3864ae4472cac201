"""Numeric modes: in which numbers a model's products are computed, and the fingerprint that tells them apart.

Loads neither torch nor numba: settings, preparation and the command line use it too.
"""

import hashlib
from enum import StrEnum

GROUP = 32
"""Numbers that share one scale, of a quantised weight's row as well as of a token's activations."""
_FINGERPRINT_BYTES = 16


class WeightFormat(StrEnum):
    """What the matrices of a mode are kept as; modes with the same format share a packed file."""

    F32 = "f32"
    Q4 = "q4"
    Q8 = "q8"
    BF16 = "bf16"


class NumericMode(StrEnum):
    """Weights and activations of the layers' products; everything between the products is float32 in every mode.

    `q4` weights are the 4-bit groups of the source itself (w = d * q + m, without loss), `q8` weights are groups of
    w = d * q. `a16` and `a8` round a token's activations to int16 or int8, a scale for each group of 32. Where weights
    are quantised, embedding and head are `q8`, and the head takes float32 (`q4f32`) or int16 activations.
    """

    F32 = "f32"
    Q4F32 = "q4f32"
    Q4A16 = "q4a16"
    Q4A8 = "q4a8"
    Q8A16 = "q8a16"
    BF16 = "bf16"

    @property
    def weight_format(self) -> WeightFormat:
        """Of the layers' matrices. Q4 needs a source whose layers are 4-bit groups; BF16 only torch computes."""
        match self:
            case NumericMode.F32:
                return WeightFormat.F32
            case NumericMode.Q4F32 | NumericMode.Q4A16 | NumericMode.Q4A8:
                return WeightFormat.Q4
            case NumericMode.Q8A16:
                return WeightFormat.Q8
            case NumericMode.BF16:
                return WeightFormat.BF16

    @property
    def activation_bits(self) -> int | None:
        """Bits of the integers that a layer's activations are rounded to; None where they stay floating."""
        match self:
            case NumericMode.Q4A16 | NumericMode.Q8A16:
                return 16
            case NumericMode.Q4A8:
                return 8
            case NumericMode.F32 | NumericMode.Q4F32 | NumericMode.BF16:
                return None

    @property
    def head_activation_bits(self) -> int | None:
        """The same for the head, which never goes below int16: its product is what tokens are chosen by."""
        return None if self.activation_bits is None else 16


def deployment_numerics(source_hash: str, *, prefill: str, decode: str) -> bytes:
    """What a KV layout carries: equal exactly where weights and both roles' ways of computing are equal.

    `prefill` and `decode` name backend, kernels and mode of each role. Both roles know both, so that roles that differ
    on purpose shake hands and deployments that differ do not.
    """
    return hashlib.blake2b(repr((source_hash, prefill, decode)).encode(), digest_size=_FINGERPRINT_BYTES).digest()

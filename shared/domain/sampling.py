"""How the next token is chosen; valid by construction."""

import math
from dataclasses import dataclass

MAX_SEED = 2**64 - 1
MAX_TEMPERATURE = 2.0  # OpenAI's bound


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Temperature 0 is exactly argmax, ties to the lowest id; top_k 0 and top_p 1 are off.

    Token i of the output is drawn with the random number Philox(key=seed, counter=i), whatever the batch or attempt.
    Raises ValueError on construction, the message starting with the name of the field.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and 0.0 <= self.temperature <= MAX_TEMPERATURE):
            raise ValueError(f"temperature must be between 0 and {MAX_TEMPERATURE:g}")
        if not (math.isfinite(self.top_p) and 0.0 < self.top_p <= 1.0):
            raise ValueError("top_p must be above 0 and at most 1")
        if self.top_k < 0:
            raise ValueError("top_k must be 0 (off) or more")
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError("seed must be an unsigned 64-bit integer")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

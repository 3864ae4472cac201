"""How the next token is chosen; valid by construction."""

import math
from collections.abc import Collection
from dataclasses import dataclass

from shared.domain.ids import TokenId

MAX_SEED = 2**64 - 1
MAX_TEMPERATURE = 2.0  # OpenAI's bound, as are the next four
MAX_PENALTY = 2.0
MAX_LOGIT_BIAS = 100.0
MAX_BIASED_TOKENS = 300
MAX_TOP_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 128  # a chat model has a handful; each is compared with every token


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Temperature 0 is exactly argmax, ties to the lowest id. Off: top_k 0, top_p 1, min_p 0, repetition_penalty 1.

    Token i of the output is drawn with the random number Philox(key=seed, counter=i), whatever the batch or attempt.
    Presence and frequency penalties look at the output, the repetition penalty at prompt and output. `top_logprobs`
    None asks for no log probabilities, 0 for the chosen token's alone.
    Raises ValueError on construction, the message starting with the name of the field.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[TokenId, float], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[TokenId, ...] = ()
    top_logprobs: int | None = None
    seed: int

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        if not (math.isfinite(self.top_p) and 0.0 < self.top_p <= 1.0):
            raise ValueError("top_p must be above 0 and at most 1")
        if self.top_k < 0:
            raise ValueError("top_k must be 0 (off) or more")
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_range("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0.0):
            raise ValueError("repetition_penalty must be above 0")
        if len(self.logit_bias) > MAX_BIASED_TOKENS:
            raise ValueError(f"logit_bias must not name more than {MAX_BIASED_TOKENS} tokens")
        for token_id, bias in self.logit_bias:
            _check_range(f"logit_bias of token {token_id}", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        if self.min_tokens < 0:
            raise ValueError("min_tokens must be 0 or more")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(f"stop_token_ids must not name more than {MAX_STOP_TOKEN_IDS} tokens")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise ValueError(f"top_logprobs must be between 0 and {MAX_TOP_LOGPROBS}")
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError("seed must be an unsigned 64-bit integer")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the logits."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def is_end(self, token_id: TokenId, *, index: int, eos_ids: Collection[TokenId]) -> bool:
        """Whether output token `index` ends an answer: EOS (name none where it is ignored) or one of its own stop
        tokens; up to token `min_tokens` none of them does.
        """
        return index > self.min_tokens and (token_id in eos_ids or token_id in self.stop_token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Natural logarithms of probabilities of one output token, before temperature and cuts."""

    logprob: float
    """Of the chosen token."""
    top: tuple[tuple[TokenId, float], ...] = ()
    """The likeliest tokens, likeliest first, ties by rising id."""


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise ValueError(f"{name} must be between {low:g} and {high:g}")

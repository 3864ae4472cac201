"""The output tokens of one sequence until the gateway has delivered them. Pure.

Tokens are numbered from 1 and leave by acknowledgement only. Nothing here knows of streams: a stream keeps the index
that it sends next and reads from there, so a token is never held twice.
"""

from dataclasses import dataclass

from shared.domain.request import FinishReason
from shared.engine.executor import SampledToken

# What one token takes on the wire at most, so that a bound in bytes is a bound in tokens: an id; with log probabilities
# a float more, and a float and an id for each alternative.
TOKEN_BYTES = 4
LOGPROB_BYTES = 4
AHEAD_WITH_STOP_STRINGS = 4  # tokens beyond a stop string are wasted, so few are computed before the gateway has looked


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxEnd:
    """After the last token: its index and why the answer ended."""

    index: int
    reason: FinishReason


def outbox_capacity(*, max_tokens: int, max_bytes: int, has_stop_strings: bool, top_logprobs: int | None = None) -> int:
    """How many tokens may be unacknowledged; at least 1. `top_logprobs` as in SamplingParams."""
    token_bytes = TOKEN_BYTES
    if top_logprobs is not None:
        token_bytes += LOGPROB_BYTES + top_logprobs * (TOKEN_BYTES + LOGPROB_BYTES)
    capacity = max(1, min(max_tokens, max_bytes // token_bytes))
    return min(capacity, AHEAD_WITH_STOP_STRINGS) if has_stop_strings else capacity


class Outbox:
    """Holds tokens `acked_upto + 1 .. last_index`, at most `capacity` of them.

    The reader of a continued answer has `num_delivered` tokens already.
    """

    def __init__(self, *, capacity: int, num_delivered: int = 0) -> None:
        if capacity < 1:
            raise ValueError("capacity must be at least 1")
        self._capacity = capacity
        self._tokens: list[SampledToken] = []
        self._acked_upto = num_delivered
        self._end: OutboxEnd | None = None

    def __len__(self) -> int:
        """Tokens held."""
        return len(self._tokens)

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def acked_upto(self) -> int:
        return self._acked_upto

    @property
    def last_index(self) -> int:
        """Of the newest token; 0 before the first."""
        return self._acked_upto + len(self._tokens)

    @property
    def may_compute_upto(self) -> int:
        """The engine's credit: the highest index for which there is room."""
        return self._acked_upto + self._capacity

    @property
    def end(self) -> OutboxEnd | None:
        return self._end

    @property
    def is_done(self) -> bool:
        """The answer has ended and everything of it is acknowledged."""
        return self._end is not None and not self._tokens

    def append(self, index: int, token: SampledToken) -> None:
        """Raises ValueError when the index is not the next one, the outbox is full, or the answer has ended."""
        if self._end is not None:
            raise ValueError(f"token {index} after the end at {self._end.index}")
        if index != self.last_index + 1:
            raise ValueError(f"token {index} after {self.last_index}")
        if len(self._tokens) >= self._capacity:
            raise ValueError(f"token {index} is beyond the credit")
        self._tokens.append(token)

    def close(self, reason: FinishReason) -> None:
        """The newest token was the last. Raises ValueError when there is none, or a second time."""
        if self._end is not None or self.last_index == 0:
            raise ValueError("an answer ends once, after a token")
        self._end = OutboxEnd(index=self.last_index, reason=reason)

    def read(self, from_index: int) -> tuple[SampledToken, ...]:
        """The tokens held from `from_index` on; none where it lies beyond the newest.

        Raises ValueError where it asks for tokens that have left.
        """
        if from_index <= self._acked_upto:
            raise ValueError(f"token {from_index} has left: acknowledged up to {self._acked_upto}")
        return tuple(self._tokens[from_index - self._acked_upto - 1 :])

    def ack(self, index: int) -> bool:
        """Tokens 1..index are delivered. False when that is no news, or names tokens that do not exist."""
        if not self._acked_upto < index <= self.last_index:
            return False
        del self._tokens[: index - self._acked_upto]
        self._acked_upto = index
        return True

    def finish(self, index: int, reason: FinishReason) -> None:
        """The reader has the whole answer, `index` tokens of it: acknowledges everything and drops what lies beyond.

        A repeat changes nothing. Raises ValueError for an answer longer than what was made.
        """
        if not 1 <= index <= self.last_index:
            raise ValueError(f"an answer of {index} tokens, {self.last_index} were made")
        if self._end is None or index < self._end.index:
            self._end = OutboxEnd(index=index, reason=reason)
        self._acked_upto = self.last_index
        self._tokens.clear()

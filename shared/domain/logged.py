"""What is kept of a resumable answer, so that another reader can go on with it."""

from dataclasses import dataclass

from shared.domain.ids import Attempt, TokenId
from shared.domain.request import RequestSpec
from shared.domain.sampling import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class LogHead:
    """What was asked. `served` is the gateway's own: how the answer is shown."""

    spec: RequestSpec
    key_hash: str
    served: bytes
    deadline_unix_ms: int = 0
    """When the client's time is over; 0 = never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedTokens:
    """Consecutive output tokens, the first of them numbered `first_index`, of one attempt."""

    first_index: int
    ids: tuple[TokenId, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One a token, or none at all."""
    attempt: Attempt
    cached_tokens: int = 0
    """Means something with token 1."""

    @property
    def last_index(self) -> int:
        return self.first_index + len(self.ids) - 1

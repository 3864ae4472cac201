"""Names for what would otherwise be bare strings and integers."""

from dataclasses import dataclass
from typing import NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
Attempt = NewType("Attempt", int)
Epoch = NewType("Epoch", int)
"""Grows with each active scheduler; whatever carries less than the highest seen is refused."""
Incarnation = NewType("Incarnation", int)
"""Random 64 bits of one process start; compared for equality only."""
TransferId = NewType("TransferId", int)
BlockId = NewType("BlockId", int)
"""Place of a block in its pool."""
TokenId = NewType("TokenId", int)


@dataclass(frozen=True, slots=True)
class RequestKey:
    """One try to serve a request: what work belongs to in every worker's table."""

    request_id: RequestId
    attempt: Attempt

    def __str__(self) -> str:
        return f"{self.request_id}/{self.attempt}"

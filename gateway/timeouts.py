"""How long a request may take: what its client asks for, within the gateway's bounds. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from gateway.intake import Intake
from shared.domain.clock import Clock
from shared.domain.errors import ErrorCode, ServingError

HEADER = "x-request-timeout"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutRule:
    """Seconds: of a client that says nothing, and the most that one can ask for."""

    default_s: float
    max_s: float

    def with_deadline(self, intake: Intake, headers: Mapping[str, str], received_at: float) -> Intake:
        """Of header and body the shorter one counts, from the moment when the request came.

        Raises INVALID_REQUEST for a header that is no time.
        """
        asked = [each for each in (header_timeout_s(headers), intake.timeout_s) if each is not None]
        deadline = received_at + min([*(asked or [self.default_s]), self.max_s])
        children = tuple(replace(child, deadline=deadline) for child in intake.children)
        return replace(intake, deadline=deadline, children=children)


def header_timeout_s(headers: Mapping[str, str]) -> float | None:
    """Seconds; None where it is not given. Raises INVALID_REQUEST."""
    text = headers.get(HEADER)
    if text is None:
        return None
    try:
        timeout_s = math.nan if "_" in text else float(text)  # Python reads 1_000, nobody else does
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s < math.inf:
        raise ServingError(
            ErrorCode.INVALID_REQUEST,
            "X-Request-Timeout: must be a number of seconds above 0",
            param="X-Request-Timeout",
        )
    return timeout_s


def deadline_to_unix_ms(deadline: float | None, clock: Clock) -> int:
    """For what is kept in Redis; 0 = none."""
    return 0 if deadline is None else clock.unix_ms() + round((deadline - clock.monotonic()) * 1000)


def deadline_from_unix_ms(unix_ms: int, clock: Clock) -> float | None:
    """By this gateway's clock, of what another gateway has kept."""
    return clock.monotonic() + (unix_ms - clock.unix_ms()) / 1000 if unix_ms else None

"""Who gets the next blocks, and who gives his up when there are none. Pure: claims in, decisions out.

A sequence begins with blocks for its prompt, the tokens that its client has, and one block more; it grows while it
runs. Growth of what runs comes before new reservations, and the older request before the younger. Where blocks are
short a victim leaves the worker and comes back by requeue and replay: parked ones first, then the youngest. The oldest
is never a victim of a younger one, and each request fits an empty pool, so the oldest always reaches its end.

One that has come back begins with blocks for its next tokens, too, and stays until its reader has them: an older one
that is short waits for that. So a replay is never for nothing, and nobody waits for longer than a replay and what these
blocks hold: one that wants more of them, or whose outbox is full, is a victim like any other.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, RequestId, RequestKey
from shared.domain.request import RequestSpec
from shared.domain.worker import CONTINUED_TOKENS, num_tokens_at_start
from shared.kv.layout import KvLayout

# The event loop hears of a step after its end, and its grant counts from the next border between steps on: one or two
# tokens at most on an idle loop, eight on a busy one. Where blocks come later than that the sequence misses a step.
GROW_AHEAD_TOKENS = 8
# So many of its tokens a continued sequence sends before it can be a victim; its first blocks are enough for them.
KEPT_TOKENS = CONTINUED_TOKENS - GROW_AHEAD_TOKENS
# A full outbox that moves within this time is a reader a round trip behind, as any is with stop strings: no better a
# victim than another.
PARKED_VICTIM_S = 0.5
PREEMPTION_CAUSES = ("blocks", "parked", "drain")
PARKED_S = 10.0  # a phone that changes cells is back by then; whoever is slower costs a replay


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A sequence that holds blocks and has not ended. Request ids sort by admission."""

    key: RequestKey
    num_blocks: int
    num_wanted: int
    """Blocks that it needs beside those, to go on; 0 for most."""
    is_parked: bool
    """For long enough to be a victim before the others."""
    is_fresh: bool = False
    """It is continued, and has not sent `KEPT_TOKENS` to a reader: what it makes without one is lost when it leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What to do now. Blocks of victims come back later; then ask again while `is_short`."""

    grants: tuple[tuple[RequestKey, int], ...]
    victims: tuple[RequestKey, ...]
    is_short: bool
    awaits_fresh: bool = False
    """Somebody who is short waits for the tokens of a fresh one: ask again after each step."""


def check_fits(layout: KvLayout, spec: RequestSpec, *, pool_blocks: int) -> None:
    """Raises ServingError where not even an empty pool would do: such a request could never reach its end."""
    needed = layout.num_blocks_for(spec.max_total_tokens)
    if needed > pool_blocks:
        raise ServingError(
            ErrorCode.NEVER_FITS, f"prompt and answer need {needed} KV blocks, the pool has {pool_blocks}"
        )


def num_blocks_at_start(layout: KvLayout, spec: RequestSpec, *, num_delivered: int) -> int:
    """What a reservation takes; never more than the whole request needs."""
    most = layout.num_blocks_for(spec.max_total_tokens)
    return min(layout.num_blocks_for(num_tokens_at_start(spec.num_prompt_tokens, num_delivered)) + 1, most)


def num_blocks_ahead(layout: KvLayout, spec: RequestSpec, *, last_index: int, upto_index: int) -> int:
    """Blocks that a running sequence should hold by now.

    Token i is fed to get token i + 1, and lies at position prompt + i - 1. `upto_index` is the credit: the highest
    token that may be computed.
    """
    fed_upto = min(last_index + GROW_AHEAD_TOKENS, upto_index - 1, spec.max_tokens - 1)
    return layout.num_blocks_for(spec.num_prompt_tokens + max(fed_upto, 0))


def share_out(claims: Iterable[Claim], *, num_available: int, num_returning: int) -> Shares:
    """Serve what is wanted, the oldest request first and none past it; choose victims for what is missing.

    `num_available` blocks can be taken now; `num_returning` will come back from sequences that have ended. One that is
    short does not leave while a younger one is kept for its next tokens: it waits.
    """
    by_age = sorted(claims, key=_age)
    grants: list[tuple[RequestKey, int]] = []
    victims: dict[RequestKey, None] = {}
    kept = [claim for claim in by_age if _is_kept(claim)]
    # Stable: the youngest of the parked comes last.
    candidates = sorted((claim for claim in by_age if not _is_kept(claim)), key=lambda claim: claim.is_parked)
    is_short = awaits_fresh = False
    for claim in by_age:
        if claim.num_wanted == 0 or claim.key in victims:
            continue
        if not is_short and claim.num_wanted <= num_available:
            num_available -= claim.num_wanted
            grants.append((claim.key, claim.num_wanted))
            continue
        is_short = True
        num_missing = claim.num_wanted - num_available - num_returning
        while num_missing > 0 and claim.key not in victims:
            if candidates[-1] is claim and not claim.is_parked and kept and _age(claim) < _age(kept[-1]):
                awaits_fresh = True
                break
            victim = candidates.pop()
            victims[victim.key] = None
            num_missing -= victim.num_blocks
        num_available, num_returning = 0, max(-num_missing, 0)  # what is left of it serves the next one
    return Shares(grants=tuple(grants), victims=tuple(victims), is_short=is_short, awaits_fresh=awaits_fresh)


def _is_kept(claim: Claim) -> bool:
    return claim.is_fresh and not claim.is_parked and claim.num_wanted == 0


def _age(claim: Claim) -> tuple[RequestId, Attempt]:
    return claim.key.request_id, claim.key.attempt

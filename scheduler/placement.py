"""Which pair of workers an attempt goes to, and which requests no pair can ever take.

The rule. Requests are looked at oldest first. A pair is usable when both are ready and have the same KV layout.
Prefill: no tokens remaining, or remaining + prompt within two token budgets; least remaining first. Decode: free
blocks for the prompt, the tokens that the gateway holds, and one block to go on; most free first. A worker on which an
attempt of the request has failed is left out while another of its role could serve it.

A request that no usable pair has room for now is passed over by younger ones for at most `OVERTAKING_S`. After that one
pair is kept for it (the decode worker with most free blocks of those that could ever hold it, the prefill worker with
least remaining): nothing younger is placed on these two until it is placed or gone. What runs there ends in its own
time, so the wait is bounded by the requests already placed; other workers go on, and the kept pair is the only capacity
that idles, for as long as its room grows towards the big request. One request at a time has a pair kept: the oldest
that needs it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from scheduler.fleet import Worker
from scheduler.waiting import Waiter
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import WorkerId
from shared.domain.request import Role, SequenceState

PREFILL_BUDGETS_AHEAD = 2  # one being computed, one ready behind it; more would be a second queue inside the worker
OVERTAKING_S = 1.0  # about the time of a short answer: long enough to fill gaps, short enough not to starve
REFUSAL_MEMORY_S = 5.0  # a refusal for another cause than blocks would otherwise never be lifted


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A prefill and a decode worker that understand each other."""

    prefill: Worker
    decode: Worker


def choose(
    waiter: Waiter, prefills: Sequence[Worker], decodes: Sequence[Worker], kept: Collection[WorkerId], now: float
) -> Pair | None:
    """The best usable pair with room now, or None. Workers in `kept` are for someone else."""
    decodes, prefills = _without_avoided(decodes, waiter), _without_avoided(prefills, waiter)
    for decode in sorted(decodes, key=lambda worker: -worker.free_blocks):
        if decode.worker_id in kept or not _decode_has_room(decode, waiter, now):
            continue
        for prefill in sorted(prefills, key=lambda worker: worker.remaining_tokens):
            if prefill.worker_id in kept or prefill.facts.layout != decode.facts.layout or not prefill.is_ready:
                continue
            if _prefill_has_room(prefill, waiter):
                return Pair(prefill=prefill, decode=decode)
    return None


def pair_to_keep(waiter: Waiter, prefills: Sequence[Worker], decodes: Sequence[Worker]) -> Pair | None:
    """The pair that is kept for a passed-over request: the one it has already, else the nearest to having room."""
    decodes, prefills = _without_avoided(decodes, waiter), _without_avoided(prefills, waiter)
    pairs = [
        pair
        for decode in sorted(decodes, key=lambda worker: -worker.free_blocks)
        for prefill in sorted(prefills, key=lambda worker: worker.remaining_tokens)
        if _can_serve(pair := Pair(prefill=prefill, decode=decode), waiter) and prefill.is_ready and decode.is_ready
    ]
    for pair in pairs:
        if (pair.prefill.worker_id, pair.decode.worker_id) == waiter.held_pair:
            return pair
    return pairs[0] if pairs else None


def is_servable(waiter: Waiter, prefills: Sequence[Worker], decodes: Sequence[Worker]) -> bool:
    """Whether some ready pair could take the request when empty."""
    return any(
        prefill.is_ready and decode.is_ready and _can_serve(Pair(prefill=prefill, decode=decode), waiter)
        for prefill in prefills
        for decode in decodes
    )


def refusal(waiter: Waiter, prefills: Sequence[Worker], decodes: Sequence[Worker]) -> ServingError | None:
    """Why the request must not be admitted, or None.

    NEVER_FITS (with what it needs and what is there) only where no known pair could hold it, ready or not.
    """
    pairs = [
        Pair(prefill=prefill, decode=decode)
        for prefill in prefills
        for decode in decodes
        if prefill.facts.layout == decode.facts.layout
    ]
    if not any(pair.prefill.is_expected and pair.decode.is_expected for pair in pairs):
        return ServingError(ErrorCode.NO_CAPACITY, "no ready pair of prefill and decode workers")
    able = [pair for pair in pairs if _can_serve(pair, waiter)]
    if any(pair.prefill.is_expected and pair.decode.is_expected for pair in able):
        return None
    if able:
        return ServingError(ErrorCode.NO_CAPACITY, "no worker that is large enough is ready")
    by_decode = max((pair.decode for pair in pairs), key=lambda worker: worker.facts.num_blocks)
    by_prefill = max((pair.prefill for pair in pairs), key=lambda worker: worker.facts.num_blocks)
    needed = by_decode.facts.num_blocks_for(waiter.max_total_tokens)
    if needed > by_decode.facts.num_blocks:
        return _never_fits("prompt and max_tokens need", waiter.max_total_tokens, needed, by_decode)
    needed = by_prefill.facts.num_blocks_for(waiter.num_prompt_tokens)
    return _never_fits("the prompt needs", waiter.num_prompt_tokens, needed, by_prefill)


def _without_avoided(workers: Sequence[Worker], waiter: Waiter) -> Sequence[Worker]:
    """All of them again where no other is left."""
    if not waiter.avoided:
        return workers
    others = [worker for worker in workers if worker.ref not in waiter.avoided and _could_hold(worker, waiter)]
    return others or workers


def _never_fits(what: str, tokens: int, needed: int, worker: Worker) -> ServingError:
    facts = worker.facts
    available = facts.num_blocks * facts.block_size
    return ServingError(
        ErrorCode.NEVER_FITS,
        f"{what} {needed} KV blocks ({tokens} tokens); the largest {facts.role.value} pool has "
        f"{facts.num_blocks} blocks ({available} tokens)",
    )


def _can_serve(pair: Pair, waiter: Waiter) -> bool:
    prefill, decode = pair.prefill, pair.decode
    return prefill.facts.layout == decode.facts.layout and _could_hold(prefill, waiter) and _could_hold(decode, waiter)


def _could_hold(worker: Worker, waiter: Waiter) -> bool:
    """An empty pool could: prefill's the prompt, decode's the longest answer too."""
    facts = worker.facts
    tokens = waiter.num_prompt_tokens if facts.role is Role.PREFILL else waiter.max_total_tokens
    return facts.num_blocks_for(tokens) <= facts.num_blocks


def _decode_has_room(worker: Worker, waiter: Waiter, now: float) -> bool:
    if not worker.is_ready or not worker.has_place:
        return False
    told = waiter.refusals.get(worker.worker_id)
    if told is not None:
        free_then, refused_at = told
        has_more = (
            worker.capacity is not None
            and worker.capacity_at > refused_at
            and worker.capacity.available_blocks > free_then
        )
        if not has_more and now - refused_at < REFUSAL_MEMORY_S:
            return False
    facts = worker.facts
    needed = facts.num_blocks_at_start(waiter.num_tokens_at_start, waiter.max_total_tokens)
    # It keeps a block for each sequence that runs, and refuses what would take them.
    needed += 0 if worker.capacity is None else worker.capacity.sequences.get(SequenceState.RUNNING, 0)
    return _could_hold(worker, waiter) and needed <= worker.free_blocks


def _prefill_has_room(worker: Worker, waiter: Waiter) -> bool:
    if not worker.has_place or worker.facts.num_blocks_for(waiter.num_prompt_tokens) > worker.free_blocks:
        return False
    remaining = worker.remaining_tokens
    budget = PREFILL_BUDGETS_AHEAD * worker.facts.token_budget
    return remaining == 0 or remaining + waiter.num_prompt_tokens <= budget

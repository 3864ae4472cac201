"""What is refused or dropped and counted: late, doubled, foreign or damaged input, and what an older start still says.

Each kind is a label of `firsttoken_refused_total`; none of what is counted here changes a row, or is in an answer. A
request that the scheduler does not admit is counted there too, by its `ErrorCode`. Who says again by design what was
not answered (commands, events, a Start) is answered again, and is not refused.
"""

from enum import StrEnum


class RefusedKind(StrEnum):
    """All kinds; each is driven through its service by a test (`tests/unit/shared/domain/test_refusals.py` looks)."""

    # ---- any message of a scheduler that has been replaced; counted by workers and gateways
    STALE_EPOCH = "stale_epoch"

    # ---- commands, at a worker
    UNKNOWN_COMMAND = "unknown_command"
    """Of another role, or of a newer scheduler."""
    LATE_RESERVE = "late_reserve"
    """Of an attempt that has ended here, maybe by an Abort that overtook it."""
    LATE_PREFILL = "late_prefill"

    # ---- the hand-over, at decode but for the handshake
    HANDSHAKE = "handshake"
    """Unlike layouts or numerics, or another start of decode; counted at both ends."""
    STAGING = "staging"
    """A segment that cannot be opened, is another transfer's, or a transport that is not offered."""
    TRANSFER = "transfer"
    """Another start of one of the two, another transfer, or a start that has not said hello."""
    UNKNOWN_TRANSFER = "unknown_transfer"
    LATE_TRANSFER = "late_transfer"
    """A word of the sender for an attempt that has ended here: a frame, a sign of life, a new stream, token 1."""
    LATE_FRAME = "late_frame"
    """Its sender had given the segment up when it was read."""
    DOUBLED_FRAME = "doubled_frame"
    FRAME = "frame"
    """Damaged, out of range, or of a stream that a newer one has replaced."""
    DOUBLED_FIRST_TOKEN = "doubled_first_token"

    # ---- readers: of what a gateway says to decode, and decode to a gateway
    BAD_TICKET = "bad_ticket"
    STALE_SESSION = "stale_session"
    """A newer session of the resumable answer has attached."""
    LATE_READER = "late_reader"
    """Of an attempt that has ended, or that another stream reads now."""
    LATE_ACK = "late_ack"
    DETACHED_TOKENS = "detached_tokens"
    """Tokens of an attempt that the gateway has closed."""

    # ---- what the scheduler hears
    OLD_SESSION = "old_session"
    """Of a worker start, or a connection, that another one has replaced."""
    DUPLICATE_EVENT = "duplicate_event"
    UNKNOWN_REQUEST = "unknown_request"
    STALE_ATTEMPT = "stale_attempt"
    LATE_EVENT = "late_event"
    """Overtaken by what was known before; the table names each such pair."""
    ILLEGAL_EVENT = "illegal_event"
    """A bug of a peer."""

    # ---- no input: what the scheduler will not do
    UNLIKE_LAYOUT = "unlike_layout"
    """A pair of workers that is never used."""
    RETRY_BUDGET = "retry_budget"
    """One more attempt."""
    OUTCOME_WRITE = "outcome_write"
    """An outcome, given up: Redis was away for too many of them."""

"""Every Redis key, channel and time to live; built here only.

The braces are Redis Cluster's hash tag: keys that one script touches share it, and so one node. No key lives for ever.
"""

from shared.domain.ids import RequestId

PREFIX = "firsttoken:1:"
REQUEST_PATTERN = f"{PREFIX}request:{{*}}"
CANCEL_PATTERN = f"{PREFIX}cancel:{{*}}:*"
CANCEL_CHANNEL = f"{PREFIX}cancels"

KEY_HASH_FIELD = "key_hash"  # of a record: whose request it is

LEASE = f"{PREFIX}lease:{{scheduler}}"
EPOCH = f"{PREFIX}epoch:{{scheduler}}"

LIVE_REQUEST_TTL_MS = 24 * 3600 * 1000  # its scheduler reaps it long before; this is for records without one
ENDED_REQUEST_TTL_MS = 10 * 60 * 1000
CANCEL_TTL_MS = 10 * 60 * 1000
LIVE_LOG_TTL_MS = 3600 * 1000  # renewed with each token; its gateway writes it again if it waited longer for one
ENDED_LOG_TTL_MS = 10 * 60 * 1000  # so long a finished answer can be read again
LEASE_TTL_MS = 3000  # three missed renewals
EPOCH_TTL_MS = 7 * 24 * 3600 * 1000  # renewed with the lease; after a week of silence the wall clock is far ahead of it


def request_key(request_id: RequestId) -> str:
    """Hash: the record of a request."""
    return f"{PREFIX}request:{{{request_id}}}"


def cancel_key(request_id: RequestId, key_hash: str) -> str:
    """String: the reason of a cancel, as the client with this key asked for it; what another asked for stands apart."""
    return f"{PREFIX}cancel:{{{request_id}}}:{key_hash}"


def log_key(request_id: RequestId) -> str:
    """Stream: prompt and tokens of a resumable answer, and of no other."""
    return f"{PREFIX}log:{{{request_id}}}"


def request_id_of(key: str) -> RequestId:
    """Of a request's key or a cancel's. Raises ValueError for any other."""
    kind, brace, behind = key.partition("{")
    request_id, end, _ = behind.partition("}")
    if not kind.startswith(PREFIX) or not brace or not end:
        raise ValueError(f"not a key of a request: {key}")
    return RequestId(request_id)

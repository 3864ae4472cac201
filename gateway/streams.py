"""Reading a resumable answer on: from which token, by whom, and what then serves it."""

from collections.abc import Mapping
from dataclasses import replace

from gateway.intake import IntakeReader
from gateway.journal import Journal
from gateway.replay import Replay
from gateway.request_id import Identity, key_hash, unknown_request
from gateway.served_form import ServedForm
from gateway.services import Resumption, Services
from gateway.session import Session
from gateway.sessions import Sessions
from gateway.timeouts import deadline_from_unix_ms
from shared.domain.errors import ErrorCode, ServingError
from shared.obs.logs import get_logger
from shared.state.client import state_unavailable

_MAX_INDEX_DIGITS = 10  # token numbers have 32 bits
_log = get_logger("streams")


class Streams:
    """Takes answers over, whichever gateway served them before."""

    def __init__(self, services: Services, sessions: Sessions, reader: IntakeReader) -> None:
        self._services = services
        self._sessions = sessions
        self._reader = reader

    async def resume(
        self, identity: Identity, headers: Mapping[str, str], query: Mapping[str, str], journal: Journal
    ) -> Session | Replay:
        """To be started at once: the answer has no other reader any more.

        Raises REQUEST_NOT_FOUND, also for another's; STATE_UNAVAILABLE while it cannot be resumed.
        """
        from_index = wanted_from(headers, query)
        request_id = identity.request_id
        logs = self._services.logs
        here = self._sessions.of_request(request_id)
        if logs is None or any(session.log is not None and session.log.is_behind for session in here):
            raise state_unavailable()
        asked_by = key_hash(headers)
        logged = await logs.take_over(request_id, asked_by)
        if logged is None:
            raise unknown_request()
        if logged.outcome is None:
            for older in self._sessions.of_request(request_id):
                older.supersede(by=logged.session)
        try:
            served = ServedForm.from_bytes(logged.head.served)
        except (KeyError, TypeError, ValueError):
            _log.warning("unreadable served form", request_id=request_id)
            raise unknown_request() from None
        intake = served.revive(self._reader, logged.head.spec)
        journal.num_prompt_tokens = len(intake.prompt_ids)
        resumption = Resumption(logged=logged, from_index=from_index)
        if logged.outcome is None:
            deadline = deadline_from_unix_ms(logged.head.deadline_unix_ms, self._services.clock)
            intake = replace(intake, deadline=deadline)
            return Session(self._services, intake, identity, journal, key_hash=asked_by, resumption=resumption)
        return Replay(
            intake,
            identity,
            journal,
            served,
            model=self._services.served_model_name,
            resumption=resumption,
            outcome=logged.outcome,
        )


def wanted_from(headers: Mapping[str, str], query: Mapping[str, str]) -> int:
    """The client has the text of so many tokens. What the browser says itself counts before what its URL says.

    Raises INVALID_REQUEST.
    """
    text = headers.get("last-event-id") or query.get("from") or "0"
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_INDEX_DIGITS):
        raise ServingError(ErrorCode.INVALID_REQUEST, "from: must be the number of a token", param="from")
    return int(text)

"""The canonical line of a request."""

from typing import Any

import pytest

from gateway.journal import Journal
from gateway.request_id import Identity
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import RequestId, WorkerId
from shared.domain.request import CancelReason, RequestState, Usage
from shared.obs.metrics import Metrics


class SteppingClock:
    """Each look is 10 ms later."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        """Seconds."""
        self._now += 0.01
        return self._now

    def unix_ms(self) -> int:
        """Not asked."""
        return 0


class Lines:
    """Takes the place of the logger."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def info(self, event: str, **fields: Any) -> None:
        """One line."""
        self.lines.append((event, fields))


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Lines:
    """What is logged."""
    written = Lines()
    monkeypatch.setattr("gateway.journal._log", written)
    return written


def journal(metrics: Metrics) -> Journal:
    """Of a request with a name of the client's."""
    identity = Identity(request_id=RequestId("R"), client_request_id="mine")
    return Journal(SteppingClock(), metrics, identity, "/v1/chat/completions")


def test_one_line_has_everything(lines: Lines) -> None:
    """Phases in ms from the receipt, each marked once; the counts; the workers; why it was cancelled."""
    metrics = Metrics("gateway", "g")
    subject = journal(metrics)
    subject.num_prompt_tokens, subject.num_ignored_fields = 5, 2
    subject.mark_queued()
    subject.mark_placed(WorkerId("p"), WorkerId("d"))
    subject.mark_first_token()
    subject.mark_first_text_sent(is_stream=True)
    subject.mark_first_text_sent(is_stream=True)
    subject.usage = Usage(prompt_tokens=5, completion_tokens=7, cached_tokens=1)
    subject.cancel_reason = CancelReason.DISCONNECT
    subject.write(RequestState.CANCELLED, ServingError(ErrorCode.CANCELLED, "the client left"))
    page = metrics.render().decode()
    metrics.close()

    assert [
        (
            "request",
            {
                "request_id": "R",
                "client_request_id": "mine",
                "route": "/v1/chat/completions",
                "outcome": "cancelled",
                "code": "CANCELLED",
                "param": None,
                "cancel_reason": "disconnect",
                "queued_ms": 10.0,
                "placed_ms": 20.0,
                "first_token_ms": 30.0,
                "first_text_sent_ms": 40.0,
                "end_ms": 50.0,
                "prompt_tokens": 5,
                "completion_tokens": 7,
                "cached_tokens": 1,
                "ignored_fields": 2,
                "prefill_worker": "p",
                "decode_worker": "d",
            },
        )
    ] == lines.lines
    assert "gen_ai_server_time_to_first_token_seconds_count 1.0" in page


def test_a_whole_answer_has_no_time_to_first_token(lines: Lines) -> None:
    """Its first text is sent with its last."""
    metrics = Metrics("gateway", "g")
    subject = journal(metrics)
    subject.mark_first_text_sent(is_stream=False)
    subject.write(RequestState.FINISHED, None)
    page = metrics.render().decode()
    metrics.close()

    assert "time_to_first_token_seconds_count" not in page
    assert (None, "finished") == (lines.lines[0][1]["code"], lines.lines[0][1]["outcome"])

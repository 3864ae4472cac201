"""The gateway's own patience, as long as a machine that tests may stand still."""

import pytest

PATIENCE_S = 60.0
LIMITS = (
    "gateway.answer._LINGER_S",
    "gateway.clients.scheduler._CANCEL_TIMEOUT_S",
    "gateway.control.ADMISSION_WAIT_S",
    "gateway.control.GRACE_S",
    "gateway.fleet._STATUS_TIMEOUT_S",
    "gateway.listener._MAX_WAIT_S",
    "gateway.session._OUTCOME_WAIT_S",
    "gateway.sessions._LAST_WORDS_S",
)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits against peers that are away. A test that is about one of them sets it itself."""
    for limit in LIMITS:
        monkeypatch.setattr(limit, PATIENCE_S)

"""The gateway's own settings."""

import pytest

from gateway.config import GatewayConfig
from shared.settings import SettingsError, load


def test_the_defaults_are_those_of_the_decisions() -> None:
    """Port 8000 with the admin port beside it, bodies of 4 MiB within 30 s, a keep-alive each 15 s, 60 s for a stall."""
    config = load(GatewayConfig, {"FIRSTTOKEN_SCRIPTED": "1"})

    assert (8000, 9000) == (config.port, config.chosen_admin_port)
    assert (4 * 1024 * 1024, 30.0) == (config.max_body_bytes, config.body_timeout_s)
    assert (15.0, 60.0) == (config.keep_alive_s, config.stall_timeout_s)
    assert "scripted" == config.served_model_name


def test_all_that_is_wrong_is_named_at_once() -> None:
    """A bound below anything useful, a time that is none, no model."""
    with pytest.raises(SettingsError) as caught:
        load(GatewayConfig, {"FIRSTTOKEN_MAX_BODY_BYTES": "1", "FIRSTTOKEN_KEEP_ALIVE_S": "0"})

    named = {problem.split(":")[0] for problem in caught.value.problems}
    assert {"FIRSTTOKEN_MAX_BODY_BYTES", "FIRSTTOKEN_KEEP_ALIVE_S", "FIRSTTOKEN_SCRIPTED"} == named

"""Settings of a decode worker."""

import pytest

from decode_worker.config import DecodeConfig
from shared.settings import SettingsError, load


def test_defaults_stand_without_variables() -> None:
    """Outbox and port as decided."""
    config = load(DecodeConfig, {"FIRSTTOKEN_SCRIPTED": "1"})

    assert (config.port, config.outbox_tokens, config.outbox_bytes, config.block_size) == (7200, 256, 65536, 16)


def test_an_outbox_without_room_is_refused() -> None:
    """It would hold every sequence for ever."""
    with pytest.raises(SettingsError, match="FIRSTTOKEN_OUTBOX_TOKENS"):
        load(DecodeConfig, {"FIRSTTOKEN_SCRIPTED": "1", "FIRSTTOKEN_OUTBOX_TOKENS": "0"})

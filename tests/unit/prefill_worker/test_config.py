"""Settings of a prefill worker."""

import pytest

from prefill_worker.config import PrefillConfig
from shared.settings import SettingsError, load


def test_defaults_stand_without_variables() -> None:
    """Chunk, budget and port as decided."""
    config = load(PrefillConfig, {"FIRSTTOKEN_SCRIPTED": "1"})

    assert (config.port, config.prefill_chunk_tokens, config.token_budget, config.block_size) == (7100, 64, 256, 16)


def test_a_chunk_that_ends_inside_a_block_is_refused() -> None:
    """By the name of its variable, beside every other mistake."""
    with pytest.raises(SettingsError) as caught:
        load(PrefillConfig, {"FIRSTTOKEN_PREFILL_CHUNK_TOKENS": "24", "FIRSTTOKEN_TOKEN_BUDGET": "x"})

    named = {problem.split(":")[0] for problem in caught.value.problems}
    assert named == {"FIRSTTOKEN_PREFILL_CHUNK_TOKENS", "FIRSTTOKEN_TOKEN_BUDGET", "FIRSTTOKEN_SCRIPTED"}

"""A model that cannot be prepared is a sentence, not a traceback."""

from pathlib import Path

import pytest

from cli.prepare import prepare_model
from cli.problem import EXIT_FAILED, CommandProblem


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    """What was typed is in the sentence."""
    with pytest.raises(CommandProblem) as caught:
        prepare_model("/no/such/model.gguf", tmp_path, lambda _: None)

    assert EXIT_FAILED == caught.value.exit_code
    assert "/no/such/model.gguf" in caught.value.sentence


def test_a_damaged_model_is_named(tmp_path: Path) -> None:
    """A file that only has the name of a model."""
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + b"\0" * 100)

    with pytest.raises(CommandProblem) as caught:
        prepare_model(str(damaged), tmp_path / "home", lambda _: None)

    assert "damaged" in caught.value.sentence

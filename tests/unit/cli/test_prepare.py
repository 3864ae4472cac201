"""A model that cannot be prepared is a sentence, not a traceback."""

from pathlib import Path

import pytest

from cli.prepare import ModelChoice, prepare_model
from cli.problem import EXIT_FAILED, EXIT_USAGE, CommandProblem
from shared.model.numerics import NumericMode
from tests.support.tiny_models import TinyModel, write_hf


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    """What was typed is in the sentence."""
    with pytest.raises(CommandProblem) as caught:
        prepare_model(ModelChoice.of("/no/such/model.gguf", None, {}), tmp_path, lambda _: None)

    assert EXIT_FAILED == caught.value.exit_code
    assert "/no/such/model.gguf" in caught.value.sentence


def test_a_damaged_model_is_named(tmp_path: Path) -> None:
    """A file that only has the name of a model."""
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + b"\0" * 100)

    with pytest.raises(CommandProblem) as caught:
        prepare_model(ModelChoice.of(str(damaged), None, {}), tmp_path / "home", lambda _: None)

    assert "damaged" in caught.value.sentence


def test_modes_come_from_the_command_line_then_from_the_settings() -> None:
    """What is typed wins over the deployment's setting; what roles were given of their own is prepared too."""
    around = {"FIRSTTOKEN_NUMERIC_MODE": "q8a16", "FIRSTTOKEN_DECODE_NUMERIC_MODE": "f32"}
    typed, found = (ModelChoice.of(None, mode, around) for mode in ("q4a8", None))

    assert (NumericMode.Q4A8, (NumericMode.F32,)) == (typed.numeric_mode, typed.role_modes)
    assert NumericMode.Q8A16 == found.numeric_mode
    assert ModelChoice(source=None, numeric_mode=None) == ModelChoice.of(None, None, {})
    assert ModelChoice.of(None, None, {"FIRSTTOKEN_BACKEND": "torch"}).is_for_torch


def test_an_unknown_mode_is_wrong_usage() -> None:
    """And the sentence lists those that there are."""
    with pytest.raises(CommandProblem, match="f32, q4f32, q4a16, q4a8, q8a16, bf16") as caught:
        ModelChoice.of(None, "fp8", {})

    assert EXIT_USAGE == caught.value.exit_code


def test_a_mode_that_the_model_cannot_have_is_one_sentence(tmp_path: Path) -> None:
    """A folder in float32 has no 4-bit weights; what it can have is named."""
    folder = write_hf(TinyModel().build(), tmp_path / "tiny")

    with pytest.raises(CommandProblem, match=r"tiny has no 4-bit weights .*choose f32 or q8a16") as caught:
        prepare_model(ModelChoice.of(str(folder), "q4a16", {}), tmp_path / "home", lambda _: None)

    assert EXIT_FAILED == caught.value.exit_code

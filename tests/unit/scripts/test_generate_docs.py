"""Parts of documents that follow from the code."""

import ast
import importlib.util
import io
import tokenize
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "generate_docs.py"


@pytest.fixture(scope="module")
def docs() -> ModuleType:
    """The script."""
    spec = importlib.util.spec_from_file_location("generate_docs", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_only_the_part_between_the_marks_changes(docs: ModuleType) -> None:
    """What people wrote stays; filling again changes nothing."""
    text = "before\n<!-- x:begin -->\nold\n<!-- x:end -->\nafter\n"

    filled = docs.fill(text, "x", "new")

    assert "before\n<!-- x:begin -->\nnew\n<!-- x:end -->\nafter\n" == filled
    assert filled == docs.fill(filled, "x", "new")


@pytest.mark.parametrize("text", ["", "<!-- x:begin -->", "<!-- x:end --> <!-- x:begin -->"])
def test_missing_marks_are_an_error(docs: ModuleType, text: str) -> None:
    """Else a part would silently be left out."""
    with pytest.raises(ValueError, match="x:begin"):
        docs.fill(text, "x", "new")


SETTINGS = """
class Config:
    plain: int = 1
    beside: int = 2  # because of this
    # Because of that,
    # and of more.
    above: int = 3
"""


def test_a_setting_is_explained_by_its_comment(docs: ModuleType) -> None:
    """The one beside it, else the ones right above it; not a neighbour's."""
    comments = [
        token for token in tokenize.generate_tokens(io.StringIO(SETTINGS).readline) if token.type == tokenize.COMMENT
    ]
    (node,) = ast.parse(SETTINGS).body

    assert {
        "beside": "because of this",
        "above": "Because of that, and of more.",
    } == docs.comments_of_fields(node, comments)


def test_every_setting_and_state_is_there(docs: ModuleType) -> None:
    """A look at the real ones: each service's own, a secret without a value, all states and codes."""
    settings, lifecycle, errors = docs.settings_table(), docs.lifecycle(), docs.errors()

    for name in ("FIRSTTOKEN_MAX_BODY_BYTES", "FIRSTTOKEN_TOKEN_BUDGET", "FIRSTTOKEN_OUTBOX_TOKENS"):
        assert f"`{name}`" in settings
    assert "| `FIRSTTOKEN_CLUSTER_TOKEN` | - | all |" in settings
    assert "DECODING --> FINISHED: SequenceDone" in lifecycle
    assert "| `STATE_UNAVAILABLE` | UNAVAILABLE | 503 |" in errors

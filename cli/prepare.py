"""Models for the command line: prepared if they are not yet, with a sentence where that is not possible."""

from collections.abc import Callable
from pathlib import Path

from cli.problem import CommandProblem
from shared.model.prepare import prepare
from shared.model.prepared import PreparationError, PreparedModel


def prepare_model(source: str | None, home: Path, report: Callable[[str], None]) -> PreparedModel:
    """`source` None = the default model. Blocks: half a minute the first time, then not. Raises CommandProblem."""
    try:
        return PreparedModel.load(prepare(source, home, report))
    except PreparationError as error:
        raise CommandProblem(str(error)) from None

"""Models for the command line: prepared if they are not yet, with a sentence where that is not possible."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cli.problem import EXIT_USAGE, CommandProblem
from shared.model.numerics import NumericMode
from shared.model.prepare import prepare, prepare_mode
from shared.model.prepared import PreparationError, PreparedModel
from shared.settings import ENV_PREFIX


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """What to prepare. `source` None = the default model; `numeric_mode` None = the model's own default."""

    source: str | None
    numeric_mode: NumericMode | None
    is_for_torch: bool = False
    role_modes: tuple[NumericMode, ...] = ()
    """Of single roles, beside or instead of `numeric_mode`."""

    @staticmethod
    def of(source: str | None, numeric_mode: str | None, around: Mapping[str, str]) -> "ModelChoice":
        """From the command line and the settings around it; CommandProblem for a mode that there is not."""
        names = ("PREFILL_NUMERIC_MODE", "DECODE_NUMERIC_MODE")
        of_roles = [text for name in names if (text := around.get(ENV_PREFIX + name))]
        deployment = numeric_mode or around.get(f"{ENV_PREFIX}NUMERIC_MODE")
        return ModelChoice(
            source=source,
            numeric_mode=_mode(deployment) if deployment else None,
            is_for_torch=around.get(f"{ENV_PREFIX}BACKEND") == "torch",
            role_modes=tuple(_mode(text) for text in of_roles),
        )


def prepare_model(choice: ModelChoice, home: Path, report: Callable[[str], None]) -> PreparedModel:
    """Blocks: half a minute or more the first time, then not. Raises CommandProblem."""
    try:
        prepared = PreparedModel.load(prepare(choice.source, home, report))
        if not choice.is_for_torch:
            for mode in {choice.numeric_mode or prepared.default_mode, *choice.role_modes}:
                prepare_mode(prepared, mode, home, report)
    except PreparationError as error:
        raise CommandProblem(str(error)) from None
    return prepared


def _mode(text: str) -> NumericMode:
    try:
        return NumericMode(text)
    except ValueError:
        names = ", ".join(NumericMode)
        raise CommandProblem(f"{text} is no numeric mode; there are {names}", exit_code=EXIT_USAGE) from None

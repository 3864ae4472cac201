"""What happens to the members of a step that breaks, and when an engine counts as broken itself."""

import logging
from collections.abc import Callable
from typing import TypeVar

from shared.engine.executor import SequenceFault, internal_fault

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

# A step that breaks costs its members. Three in a row without a good one between mean that the executor is not usable
# any more (out of memory, a lost device): then the thread ends, the process is not alive, and a fresh one takes its
# place.
MAX_BROKEN_STEPS_IN_A_ROW = 3


class StepGuard:
    """Runs steps; turns an unexpected exception into a fault of every member, up to a limit in a row."""

    def __init__(self) -> None:
        self._num_broken_in_a_row = 0

    def run(self, step: Callable[[], list[_Result]], num_members: int) -> list[_Result] | list[SequenceFault]:
        """The step's results, or a fault a member. Raises what the step raised when it breaks once too often."""
        try:
            results = step()
        except Exception:  # survives because a step touches only the blocks and state of its members, which all end now
            self._num_broken_in_a_row += 1
            if self._num_broken_in_a_row >= MAX_BROKEN_STEPS_IN_A_ROW:
                raise
            _log.exception("engine step failed")
            return [internal_fault() for _ in range(num_members)]
        if len(results) != num_members:
            raise RuntimeError(f"a step over {num_members} sequences gave {len(results)} results")
        self._num_broken_in_a_row = 0
        return results

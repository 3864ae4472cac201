"""Workers in processes of their own that are killed while KV moves through shared memory: the survivor keeps nothing."""

import gc
import os
import signal
from pathlib import Path

import pytest

from shared.transfer.staging import SEGMENT_NAME
from tests.support import processes
from tests.support.polling import eventually
from tests.support.worker_pair import expected_ids, key_of, scripted_spec, worker_pair
from tests.support.worker_process import worker_process

PREFILL_MS = 20_000  # the kill comes in the middle of it
WITHIN_S = 60.0  # a sender gives up after 10 s without any answer


def _mapped(pid: int) -> int:
    """Segments in the memory of a process. None has a name that could stay in a folder when all processes have gone."""
    maps = [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if SEGMENT_NAME in line]
    assert all(f"/memfd:{SEGMENT_NAME}" in line for line in maps), maps
    return len(maps)


def _opened(pid: int) -> int:
    """Segments and proofs among the open files of a process."""
    return sum(SEGMENT_NAME in name for name in processes.open_file_names(pid))


async def _seen(pid: int) -> tuple[int, int]:
    return _mapped(pid), _opened(pid)


@pytest.fixture(autouse=True)
def without_remains() -> None:  # pyright: ignore[reportUnusedFunction]
    """What earlier tests of this process left to the garbage collector is not ours to count."""
    gc.collect()


@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_a_killed_worker_leaves_nothing_with_the_other(victim: str) -> None:
    """SIGKILL while frames move: the survivor unmaps and closes the segment, which never had a name in a folder."""
    us, before = os.getpid(), await _seen(os.getpid())
    spec = scripted_spec("r", num_prompt_tokens=1_000, prefill_ms=PREFILL_MS)
    async with (
        worker_pair(with_prefill=victim != "prefill", with_decode=victim != "decode") as pair,
        worker_process(pair, victim) as child,
    ):
        idle = await _seen(us)
        await pair.place(spec)
        for pid, expected in ((child.pid, 1), (us, before[0] + 1)):
            await eventually(
                lambda pid=pid: _seen(pid),
                lambda seen, expected=expected: seen[0] == expected,
                within_s=WITHIN_S,
                what="both have it mapped",
            )
        child.send_signal(signal.SIGKILL)
        await child.wait()
        await eventually(lambda: _seen(us), lambda seen: seen == idle, within_s=WITHIN_S, what="unmapped and closed")
    assert await _seen(us) == before


async def test_an_answer_across_two_processes_leaves_nothing() -> None:
    """The ordinary end: the receiver has nothing mapped, the sender a segment for the next transfer and its proof."""
    us, before = os.getpid(), await _seen(os.getpid())
    spec = scripted_spec("r", ["a", "b"], repeat=20, num_prompt_tokens=300)
    async with worker_pair(with_prefill=False) as pair, worker_process(pair, "prefill") as child:
        reserved = await pair.place(spec)
        gateway = await pair.gateway()
        await gateway.attach(key_of("r"), reserved.attach_ticket)
        await gateway.ended(key_of("r"))

        assert expected_ids(spec) == gateway.ids["r"]
        await eventually(lambda: _seen(us), lambda seen: seen == before, within_s=WITHIN_S, what="unmapped and closed")
        assert (await _seen(child.pid))[0] <= 1

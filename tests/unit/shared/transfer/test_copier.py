"""The copy thread."""

import asyncio
import threading

from shared.transfer.copier import Copier


async def test_work_runs_in_order_on_one_other_thread() -> None:
    """Results come back to the loop; two pieces never overlap."""
    copier = Copier()
    threads: list[int] = []

    def work(number: int) -> int:
        threads.append(threading.get_ident())
        return number

    futures = [copier.submit(lambda number=number: work(number)) for number in range(5)]
    assert [await future for future in futures] == [0, 1, 2, 3, 4]
    copier.close()

    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()


async def test_close_waits_for_the_work_at_hand() -> None:
    """A copy that has begun has returned when `close` has."""
    copier = Copier()
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait(60)
        ended.set()

    future = copier.submit(work)
    await asyncio.to_thread(begun.wait, 60)
    threading.Timer(0.02, may_end.set).start()
    copier.close()

    assert ended.is_set()
    await future

import asyncio

import pytest

from shared.aio.scope import cancel_and_wait, spawn, stop_when


async def test_spawned_task_has_its_name() -> None:
    """A stuck task can be told by its name."""
    async with asyncio.TaskGroup() as group:
        task = spawn(group, asyncio.sleep(0), name="request 01J")

    assert "request 01J" == task.get_name()


async def test_cancel_and_wait_lets_cleanup_end() -> None:
    """It returns after the task's `finally`, also where that waits; again does no harm."""
    steps: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            steps.append("cleaned")

    async with asyncio.TaskGroup() as group:
        task = spawn(group, work(), name="work")
        await asyncio.sleep(0)
        await cancel_and_wait(task)
        steps.append("returned")
        await cancel_and_wait(task)

    assert ["cleaned", "returned"] == steps


async def test_event_stops_the_body() -> None:
    """The body is cancelled, the code behind it goes on, and the task counts no cancellation."""
    event = asyncio.Event()
    asyncio.get_running_loop().call_soon(event.set)
    async with stop_when(event) as scope:
        await asyncio.Event().wait()

    task = asyncio.current_task()
    assert task is not None
    assert (True, 0) == (scope.was_stopped, task.cancelling())
    await asyncio.sleep(0)


async def test_event_set_before_stops_at_first_await() -> None:
    """Work that needs no waiting is done; the first wait ends it."""
    event = asyncio.Event()
    event.set()
    reached: list[str] = []
    async with stop_when(event) as scope:
        reached.append("start")
        await asyncio.sleep(0)
        reached.append("not reached")

    assert (["start"], True) == (reached, scope.was_stopped)


async def test_body_without_a_wait_leaks_nothing() -> None:
    """The event is set already and the body never waits: what comes behind it is not cancelled."""
    event = asyncio.Event()
    event.set()
    async with stop_when(event) as scope:
        pass
    await asyncio.sleep(0)

    assert not scope.was_stopped


async def test_body_that_ends_by_itself() -> None:
    """Nothing is cancelled, then or when the event is set later."""
    event = asyncio.Event()
    async with stop_when(event) as scope:
        await asyncio.sleep(0)
    event.set()
    await asyncio.sleep(0)

    assert not scope.was_stopped


async def test_error_of_the_body_comes_through() -> None:
    """Only the own cancellation is taken in."""
    with pytest.raises(ValueError, match="broken"):
        async with stop_when(asyncio.Event()):
            raise ValueError("broken")


async def test_cancellation_from_elsewhere_comes_through() -> None:
    """A task that is cancelled ends cancelled, even if the event is set at the same moment."""
    event = asyncio.Event()

    async def work() -> None:
        async with stop_when(event):
            await asyncio.Event().wait()

    async with asyncio.TaskGroup() as group:
        task = spawn(group, work(), name="work")
        await asyncio.sleep(0)
        event.set()
        await cancel_and_wait(task)

    assert task.cancelled()


async def test_nested_scopes_stop_one_by_one() -> None:
    """The inner event ends the inner body alone."""
    outer, inner = asyncio.Event(), asyncio.Event()
    inner.set()
    reached: list[str] = []
    async with stop_when(outer) as outer_scope:
        async with stop_when(inner):
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        reached.append("behind the inner body")

    assert (["behind the inner body"], False) == (reached, outer_scope.was_stopped)

import asyncio
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.aio.channel import Channel, ChannelClosed
from shared.aio.scope import cancel_and_wait, spawn

STEPS = st.lists(
    st.sampled_from(["put", "try_put", "get", "cancel_put", "cancel_get", "settle"]), min_size=20, max_size=80
)


async def play(max_items: int, steps: Sequence[str]) -> tuple[list[int], list[int], int]:
    """Writers and readers that come and are cancelled as told; then closed and drained. Gives put, got, largest length."""
    channel: Channel[int] = Channel(max_items)
    put: list[int] = []
    got: list[int] = []
    longest = 0

    async def write(item: int) -> None:
        try:
            await channel.put(item)
        except ChannelClosed:
            return
        put.append(item)

    async def read() -> None:
        try:
            item = await channel.get()
        except ChannelClosed:
            return
        got.append(item)

    writers: list[asyncio.Task[None]] = []
    readers: list[asyncio.Task[None]] = []

    async def settle() -> None:
        for _ in range(2 * len(writers) + 2 * len(readers) + 2):
            await asyncio.sleep(0)
        assert not (len(channel) and any(not task.done() for task in readers)), "a reader waits beside an item"
        assert not (len(channel) < max_items and any(not task.done() for task in writers)), "a writer waits beside room"

    async with asyncio.TaskGroup() as group:
        for number, step in enumerate(steps):
            match step:
                case "put":
                    writers.append(spawn(group, write(number), name=f"write {number}"))
                case "try_put":
                    if channel.try_put(number):
                        put.append(number)
                case "get":
                    readers.append(spawn(group, read(), name=f"read {number}"))
                case "cancel_put" | "cancel_get":
                    for task in (writers if step == "cancel_put" else readers)[:1]:
                        await cancel_and_wait(task)
                case _:
                    await settle()
            writers, readers = ([task for task in tasks if not task.done()] for tasks in (writers, readers))
            longest = max(longest, len(channel))
        await settle()
        channel.close()
    got.extend([item async for item in channel])
    return put, got, longest


@settings(max_examples=300, deadline=None)  # a loaded machine is no failure
@given(max_items=st.integers(1, 3), steps=STEPS)
def test_nothing_lost_nothing_doubled(max_items: int, steps: list[str]) -> None:
    """What was put comes out, once each; the bound holds; nobody waits for what is there."""
    with asyncio.Runner() as runner:
        put, got, longest = runner.run(play(max_items, steps))

    assert sorted(put) == sorted(got)
    assert longest <= max_items

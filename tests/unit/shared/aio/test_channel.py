import asyncio

import pytest

from shared.aio.channel import Channel, ChannelClosed
from shared.aio.scope import cancel_and_wait, spawn


async def let_others_run() -> None:
    """Enough turns of the loop for every task that can go on."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_items_come_out_in_order() -> None:
    """First in, first out, and the length says what waits."""
    channel: Channel[int] = Channel(3)
    for item in (1, 2, 3):
        await channel.put(item)

    assert 3 == len(channel)
    assert [1, 2, 3] == [await channel.get() for _ in range(3)]


async def test_full_channel_refuses_or_waits() -> None:
    """`try_put` says no at once; `put` waits until a reader makes room."""
    channel: Channel[int] = Channel(1)
    assert channel.try_put(1)
    assert not channel.try_put(2)
    async with asyncio.TaskGroup() as group:
        writer = spawn(group, channel.put(3), name="writer")
        await let_others_run()
        assert not writer.done()

        assert 1 == await channel.get()
        assert 3 == await channel.get()


async def test_closed_channel_drains_then_ends() -> None:
    """Readers get what is left; writers, also a waiting one, are refused; the iteration ends."""
    channel: Channel[int] = Channel(2)
    await channel.put(1)
    await channel.put(2)
    async with asyncio.TaskGroup() as group:
        writer = spawn(group, put_or_closed(channel, 3), name="writer")
        await let_others_run()
        channel.close()
        channel.close()

    assert "closed" == writer.result()
    assert not channel.try_put(4)
    assert channel.is_closed
    assert [1, 2] == [item async for item in channel]
    with pytest.raises(ChannelClosed):
        await channel.get()


async def put_or_closed(channel: Channel[int], item: int) -> str:
    """Tells how the put ended."""
    try:
        await channel.put(item)
    except ChannelClosed:
        return "closed"
    return "put"


async def test_waiting_readers_end_on_close() -> None:
    """Every reader that waits hears of the close."""
    channel: Channel[int] = Channel(1)

    async def read_all() -> list[int]:
        return [item async for item in channel]

    async with asyncio.TaskGroup() as group:
        readers = [spawn(group, read_all(), name=f"reader {n}") for n in range(3)]
        await let_others_run()
        channel.close()

    assert [[], [], []] == [reader.result() for reader in readers]


@pytest.mark.parametrize("woken_first", [True, False])
async def test_cancelled_reader_loses_no_item(woken_first: bool) -> None:
    """A reader cancelled in the very moment of its turn passes the turn on."""
    channel: Channel[int] = Channel(1)
    async with asyncio.TaskGroup() as group:
        first = spawn(group, channel.get(), name="first")
        second = spawn(group, channel.get(), name="second")
        await let_others_run()
        if woken_first:
            channel.try_put(7)
            await cancel_and_wait(first)
        else:
            await cancel_and_wait(first)
            channel.try_put(7)

        assert 7 == await second


async def test_cancelled_writer_passes_its_turn_on() -> None:
    """The room that a cancelled writer was woken for goes to the next writer, and its own item is not put."""
    channel: Channel[int] = Channel(1)
    channel.try_put(0)
    async with asyncio.TaskGroup() as group:
        first = spawn(group, channel.put(1), name="first")
        second = spawn(group, channel.put(2), name="second")
        await let_others_run()
        assert 0 == await channel.get()
        await cancel_and_wait(first)
        await second

    assert 2 == await channel.get()


def test_needs_room() -> None:
    """A channel without room could never pass anything."""
    with pytest.raises(ValueError, match="max_items"):
        Channel[int](0)

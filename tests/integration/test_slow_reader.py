"""A reader that does not read stops its own computing and nobody else's; when it reads again nothing is missing."""

from tests.support.cancelling import live, wait_for_state
from tests.support.chat import CHAT_PATH, collect, stream_chat
from tests.support.cluster import Cluster
from tests.support.http_client import open_request
from tests.support.metrics import Scrape
from tests.support.polling import eventually
from tests.support.script import Script, counting

COMPUTED = "firsttoken_tokens_computed_total"
OUTBOX_TOKENS = 256
BIG = "0123456789abcdef" * 256  # 4 KiB, so that the socket buffers on the way hold few tokens
NUM_TOKENS = 2_400
NUM_LOOKS = 12


async def decode_metrics(cluster: Cluster) -> Scrape:
    """Of the only decode worker."""
    (metrics,) = await cluster.role_metrics("decode")
    return metrics


async def wait_until_stalled(cluster: Cluster) -> float:
    """Tokens computed, once the counter has stood still over some looks.

    Each look is a turn of gateway and decode worker. They are few, since a sequence that is parked gives its blocks back
    after ten seconds, which may be forty looks on a busy machine.
    """
    seen: list[float] = []

    async def look() -> list[float]:
        seen.append((await decode_metrics(cluster)).total(COMPUTED))
        return seen[-NUM_LOOKS:]

    await eventually(
        look, lambda last: len(last) == NUM_LOOKS and len(set(last)) == 1, within_s=60.0, what="a stalled decode"
    )
    return seen[-1]


async def test_a_full_outbox_stops_computing(cluster: Cluster) -> None:
    """R15: the tokens computed for a stopped reader are bounded; others go on; read again, the text is complete."""
    script = Script(pieces=[f"{i}:{BIG}" for i in range(12)], repeat=NUM_TOKENS // 12)
    body = {**script.body(), "stream": True}
    before = (await decode_metrics(cluster)).total(COMPUTED)
    async with open_request(cluster.port, "POST", CHAT_PATH, body=body, receive_buffer=8_192) as stream:
        record = await collect(stream, until_deltas=1)

        stalled_at = await wait_until_stalled(cluster) - before
        metrics = await decode_metrics(cluster)
        assert stalled_at < NUM_TOKENS / 2, "the worker has computed far ahead of its reader"
        assert 0 < metrics.total("firsttoken_outbox_tokens") <= OUTBOX_TOKENS
        assert metrics.total("firsttoken_kv_blocks", state="active") > 0, "a stopped sequence keeps its blocks"

        other = counting(100)
        assert other.text() == (await stream_chat(cluster.port, other.body())).text
        assert stalled_at + 101 == (await decode_metrics(cluster)).total(COMPUTED) - before + 1

        await collect(stream, record=record)
    assert script.text() == record.text
    assert "stop" == record.finish_reason


async def test_cancel_of_a_stopped_reader(cluster: Cluster) -> None:
    """A client that stopped reading and then went away leaves nothing (by the fixture), whatever was in its buffers."""
    script = Script(pieces=[BIG], repeat=NUM_TOKENS)
    body = {**script.body(), "stream": True}
    async with open_request(cluster.port, "POST", CHAT_PATH, body=body, receive_buffer=8_192) as stream:
        await collect(stream, until_deltas=1)
        await wait_until_stalled(cluster)
        stream.cut()


async def test_delete_of_a_stopped_reader(cluster: Cluster) -> None:
    """DELETE frees the blocks of a stream that cannot be written to, without waiting for its reader."""
    script = Script(pieces=[BIG], repeat=NUM_TOKENS)
    body = {**script.body(), "stream": True}
    async with open_request(cluster.port, "POST", CHAT_PATH, body=body, receive_buffer=8_192) as stream:
        await collect(stream, until_deltas=1)
        await wait_until_stalled(cluster)
        answer = await eventually(  # 202 where the blocks are free only after 2 s
            lambda: cluster.delete(stream.headers["x-firsttoken-request"]),
            lambda answer: answer.status != 202,
            within_s=40.0,
            what="the blocks are free",
        )
        assert 200 == answer.status, answer.body
        assert answer.json()["blocks_freed"] > 0
        assert 0 == (await decode_metrics(cluster)).total("firsttoken_kv_blocks", state="active")


async def test_a_reader_with_stop_strings_is_followed_closely(cluster: Cluster) -> None:
    """With stop strings at most 4 tokens are computed ahead of what the client has taken, and the text is still whole."""
    script = counting(300)

    async with live(cluster, script, stop=["never said"]) as stream:
        await wait_for_state(cluster, "decoding")
        record = await collect(stream)

    assert script.text() == record.text

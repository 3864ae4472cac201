"""Several answers to one question through the whole line: exact, one usage, and nothing left behind however it ends."""

from tests.support.cancelling import live, outcomes, wait_blocks_free, wait_for_state, wait_outcomes
from tests.support.chat import ask
from tests.support.cluster import Cluster
from tests.support.http_client import exchange
from tests.support.polling import eventually
from tests.support.script import counting


async def test_whole_answers_are_exact(cluster: Cluster) -> None:
    """Four choices in order, each with the whole text; the tokens of all, the prompt's once."""
    script = counting(40)

    answer = await ask(cluster.port, script.body(n=4))

    assert [(number, script.text(), "stop") for number in range(4)] == [
        (choice["index"], choice["message"]["content"], choice["finish_reason"]) for choice in answer["choices"]
    ]
    assert (script.num_prompt_tokens, 4 * 41) == (
        answer["usage"]["prompt_tokens"],
        answer["usage"]["completion_tokens"],
    )


async def test_a_closed_connection_cancels_every_answer(cluster: Cluster) -> None:
    """Blocks of all are free long before their ends; the scheduler counts each as cancelled."""
    before = await outcomes(cluster)
    async with live(cluster, counting(3_000, step_ms=20), n=3) as stream:
        await wait_for_state(cluster, "decoding", 3)
        stream.cut()
        await wait_blocks_free(cluster, within_s=40.0)

    await wait_outcomes(cluster, before, cancelled=3)


async def test_a_delete_cancels_every_answer(cluster: Cluster) -> None:
    """By the one id that the client knows; 200 when the blocks of all are free."""
    before = await outcomes(cluster)
    async with live(cluster, counting(3_000, step_ms=20), n=3) as stream:
        await wait_for_state(cluster, "decoding", 3)
        request_id = stream.headers["x-firsttoken-request"]
        answer = await eventually(  # 202 where that takes longer than 2 s
            lambda: exchange(cluster.port, "DELETE", f"/v1/requests/{request_id}"),
            lambda answer: answer.status != 202,
            within_s=40.0,
            what="the blocks of all are free",
        )
        blocks = [block.data or "" async for block in stream.blocks() if block.data is not None]

    assert (200, True, "cancelled") == (answer.status, answer.json()["released"], answer.json()["outcome"])
    assert answer.json()["blocks_freed"] >= 3
    assert ['"cancelled"' in blocks[-2], "[DONE]"] == [True, blocks[-1]]
    await wait_outcomes(cluster, before, cancelled=3)


async def test_one_that_breaks_ends_the_others(cluster: Cluster) -> None:
    """All of them fail at their third token: one error event, one end, no finish reason of any."""
    async with live(cluster, counting(40, fail_at=3), n=3) as stream:
        blocks = [block.data or "" async for block in stream.blocks() if block.data is not None]

    assert 1 == sum('"error"' in block for block in blocks)
    assert "[DONE]" == blocks[-1]
    assert 0 == sum('"finish_reason": "' in block for block in blocks)

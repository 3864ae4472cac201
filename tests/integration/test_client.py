"""The client of `cli.client` against real processes: cut connections and killed gateways do not show in the text."""

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from cli.client import Answer, Client
from tests.support.audited import audited
from tests.support.cluster import Cluster, ClusterPlan
from tests.support.script import Script, counting
from tests.support.tcp_proxy import tcp_proxy

NUM_WORDS = 150
SCRIPT = counting(NUM_WORDS, step_ms=20)
pytestmark = pytest.mark.timeout(600)


def _read(urls: list[str], script: Script, on_text: Callable[[Answer], None]) -> Answer:
    """A whole answer; `on_text` after each piece."""
    with (
        Client(*urls) as client,
        client.ask([{"role": "user", "content": script.message}], max_tokens=script.num_pieces + 1) as answer,
    ):
        for _ in answer:
            on_text(answer)
    return answer


async def test_cut_connections_do_not_show(cluster: Cluster) -> None:
    """Cut up to ten times in mid-answer: every token is there once, and the usage is that of one answer."""
    for step_ms in (20, 100, 500):  # on a busy machine an answer may be over before it has been cut twice
        if await num_resumed(cluster, counting(NUM_WORDS, step_ms=step_ms)) >= 2:
            return
    raise AssertionError("none of three answers was resumed twice")


async def num_resumed(cluster: Cluster, script: Script) -> int:
    """How often an answer that is cut wherever it may was resumed."""
    loop = asyncio.get_running_loop()
    async with tcp_proxy(cluster.port) as proxy:

        def cut_all() -> None:
            proxy.cut()
            proxy.restore()

        seen = {0}

        def cut_now_and_then(answer: Answer) -> None:
            part = answer.token_index // 15
            if part not in seen:
                seen.add(part)
                loop.call_soon_threadsafe(cut_all)

        url = f"http://127.0.0.1:{proxy.port}"
        answer = await asyncio.to_thread(_read, [url], script, cut_now_and_then)

    assert (script.text(), "stop") == (answer.text, answer.finish_reason)
    assert answer.usage is not None
    assert (script.num_prompt_tokens, script.num_pieces + 1) == (
        answer.usage.prompt_tokens,
        answer.usage.completion_tokens,
    )
    return answer.num_resumed


async def test_an_answer_outlives_its_gateway() -> None:
    """Killed in mid-answer: the other gateway goes on behind what the client has."""
    with ClusterPlan().scripted().gateways(2).start() as system:
        async with audited(system) as cluster:
            pid = (await cluster.status()).one("gateway").live_pid
            is_killed = False

            def kill_once(answer: Answer) -> None:
                nonlocal is_killed
                if answer.token_index >= 30 and not is_killed:
                    is_killed = True
                    os.kill(pid, signal.SIGKILL)

            urls = [cluster.base_url, f"http://127.0.0.1:{cluster.port + 1}"]
            answer = await asyncio.to_thread(_read, urls, SCRIPT, kill_once)

    assert is_killed
    assert (SCRIPT.text(), "stop", True) == (answer.text, answer.finish_reason, answer.num_resumed >= 1)

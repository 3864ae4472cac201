"""PDX-02: prompt lengths around block and chunk borders, and answers that end there."""

import asyncio
from dataclasses import replace

import pytest

from tests.support.chat import stream_chat
from tests.support.cluster import Cluster
from tests.support.script import Script, padded

BLOCK, CHUNK, BUDGET = 16, 64, 256
SHORTEST_PROMPT = 31  # the bytes of such a script with its shortest pieces
MULTIPLES = [k * BLOCK for k in range(2, 8)] + [k * CHUNK for k in range(2, 6)] + [2 * BUDGET, 4 * BUDGET]


def script_of(num_prompt_tokens: int) -> Script:
    """Its prompt has exactly this length; its answer is as long as the prompt makes its last piece, and two words."""
    return padded(["a ", "b", "c "], num_prompt_tokens=num_prompt_tokens)


@pytest.mark.parametrize("offset", [-1, 0, 1])
async def test_prompt_lengths(either: Cluster, offset: int) -> None:
    """One less, equal and one more than k blocks, chunks and budgets: exact text, and the prompt counted exactly."""
    lengths = sorted({multiple + offset for multiple in MULTIPLES})
    assert lengths[0] >= SHORTEST_PROMPT
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(stream_chat(either.port, script_of(length).body(stream_options={"include_usage": True})))
            for length in lengths
        ]
    for length, task in zip(lengths, tasks, strict=True):
        record = task.result()
        assert script_of(length).text() == record.text
        assert record.usage is not None
        assert length == record.usage["prompt_tokens"]


async def test_answers_that_end_at_a_border(either: Cluster) -> None:
    """With a prompt of whole blocks: the last token in the first, the last and no slot of a block."""
    script = padded(["a ", "b"], num_prompt_tokens=8 * BLOCK, eos=False)
    for max_tokens in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1):
        record = await stream_chat(either.port, script.body(max_tokens=max_tokens))

        assert replace(script, repeat=BLOCK + 1).text(max_tokens) == record.text
        assert "length" == record.finish_reason

"""Greedy answers of a `Model` without an engine around it: prompts in chunks, answers in one batch."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shared.kv.memory import KvMemory
from shared.model.model import Model, Segment

BLOCK_SIZE = 16


def greedy_answers(
    model: Model, prompts: Sequence[Sequence[int]], num_tokens: int, *, chunk: int = 64, kv_dtype: str = "float32"
) -> list[list[int]]:
    """`num_tokens` tokens after each prompt, whatever they are; each prompt's blocks lie in falling order."""
    layout = model.layout(BLOCK_SIZE, kv_dtype)
    tables: list[npt.NDArray[np.int64]] = []
    num_blocks = 0
    for prompt in prompts:
        end = num_blocks + layout.num_blocks_for(len(prompt) + num_tokens)
        tables.append(np.arange(num_blocks, end)[::-1].copy())
        num_blocks = end
    memory = KvMemory(layout, num_blocks)
    answers: list[list[int]] = []
    for prompt, table in zip(prompts, tables, strict=True):
        starts = range(0, len(prompt), chunk)
        segments = [
            Segment(token_ids=prompt[at : at + chunk], start=at, block_table=table, want_logits=at == starts[-1])
            for at in starts
        ]
        logits = [model.forward(memory, [segment]) for segment in segments][-1]
        answers.append([int(logits[0].argmax())])
    for index in range(1, num_tokens):
        segments = [
            Segment(token_ids=answer[-1:], start=len(prompt) + index - 1, block_table=table, want_logits=True)
            for prompt, answer, table in zip(prompts, answers, tables, strict=True)
        ]
        for answer, row in zip(answers, model.forward(memory, segments), strict=True):
            answer.append(int(row.argmax()))
    return answers

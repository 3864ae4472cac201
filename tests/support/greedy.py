"""Greedy answers of a `Model` without an engine around it: prompts in chunks, answers in one batch."""

from collections.abc import Sequence

import numpy as np

from shared.kv.memory import KvMemory
from shared.model.model import Model, Segment

BLOCK_SIZE = 16


def greedy_answers(
    model: Model, prompts: Sequence[Sequence[int]], num_tokens: int, *, chunk: int = 64, kv_dtype: str = "float32"
) -> list[list[int]]:
    """`num_tokens` tokens after each prompt, whatever they are; each prompt's blocks lie in falling order."""
    counts = [-(-(len(prompt) + num_tokens) // BLOCK_SIZE) for prompt in prompts]
    ends = np.cumsum(counts)
    tables = [np.arange(end - count, end)[::-1].copy() for end, count in zip(ends, counts, strict=True)]
    memory = KvMemory(model.layout(BLOCK_SIZE, kv_dtype), int(ends[-1]))
    answers: list[list[int]] = []
    for prompt, table in zip(prompts, tables, strict=True):
        for start in range(0, len(prompt), chunk):
            ids = prompt[start : start + chunk]
            is_last = start + len(ids) == len(prompt)
            segment = Segment(token_ids=ids, start=start, block_table=table, want_logits=is_last)
            logits = model.forward(memory, [segment])
        answers.append([int(logits[0].argmax())])
    for index in range(1, num_tokens):
        segments = [
            Segment(token_ids=answer[-1:], start=len(prompt) + index - 1, block_table=table, want_logits=True)
            for prompt, answer, table in zip(prompts, answers, tables, strict=True)
        ]
        for answer, row in zip(answers, model.forward(memory, segments), strict=True):
            answer.append(int(row.argmax()))
    return answers

"""Which chunks share a prefill step."""

from collections.abc import Iterable


def pack_chunks(num_tokens: Iterable[int], *, token_budget: int, max_sequences: int) -> list[int]:
    """Places of the chunks to take, given their lengths from the oldest prompt to the youngest.

    The first is always taken, however long, so that the oldest prompt moves on in every step. Each later one is taken
    if it fits into what is left: a short chunk may pass a long one, which loses nothing by it, for it would not have
    fitted.
    """
    picked: list[int] = []
    left = token_budget
    for place, length in enumerate(num_tokens):
        if len(picked) == max_sequences:
            break
        if not picked or length <= left:
            picked.append(place)
            left -= length
    return picked

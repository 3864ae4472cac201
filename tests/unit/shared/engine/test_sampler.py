"""Tests of `shared.engine.sampler`: a step of rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shared.domain.errors import ErrorCode
from shared.domain.ids import Attempt, RequestId, RequestKey, TokenId
from shared.domain.request import RequestSpec
from shared.domain.sampling import SamplingParams
from shared.engine.drawing import draw
from shared.engine.executor import SampledToken, SequenceFault
from shared.engine.logprobs import token_logprobs
from shared.engine.sampler import Sampler, SamplingRow

EOS = TokenId(0)
SEEDED: dict[str, Any] = {"seed": 1}


def _row(
    name: str = "r", *, index: int = 1, prompt: Sequence[int] = (1,), outputs: Sequence[int] = (), **sampling: Any
) -> SamplingRow:
    spec = RequestSpec(
        request_id=RequestId(name),
        prompt_ids=tuple(map(TokenId, prompt)),
        max_tokens=10_000,
        sampling=SamplingParams(**(SEEDED | sampling)),
    )
    key = RequestKey(RequestId(name), Attempt(1))
    return SamplingRow(key=key, spec=spec, index=index, outputs=list(map(TokenId, outputs)))


def _matrix(*rows: Sequence[float]) -> npt.NDArray[np.float32]:
    return np.array(rows, dtype=np.float32)


def _ids(results: Sequence[SampledToken | SequenceFault]) -> list[int]:
    """Of results that are all tokens."""
    return [int(result.token_id) for result in results if isinstance(result, SampledToken)]


def test_greedy_takes_the_lowest_of_equals() -> None:
    """Temperature 0 is argmax, row by row; seed and index do not matter."""
    logits = _matrix([1, 5, 5, 4], [7, 7, 7, 7], [-3, -2, -1, -1])
    rows = [_row(str(place), temperature=0, seed=place, index=place + 1) for place in range(3)]

    assert [1, 0, 2] == _ids(Sampler({EOS}).sample_batch(logits, rows))


def test_greedy_and_drawn_rows_share_a_step() -> None:
    """Each row is what it would be by itself."""
    logits = np.random.default_rng(5).normal(0, 2, (3, 900)).astype(np.float32)
    rows = [_row("a", temperature=0), _row("b", seed=9, index=4), _row("c", seed=7, index=2, top_p=0.8)]

    assert [
        int(logits[0].argmax()),
        draw(logits[1], rows[1].spec.sampling, 4),
        draw(logits[2], rows[2].spec.sampling, 2),
    ] == _ids(Sampler({EOS}).sample_batch(logits, rows))


def test_the_logits_are_left_as_they_were() -> None:
    """The caller's array is not scratch space, also where a row is bent."""
    logits = _matrix([1, 5, 2], [1, 5, 2])
    rows = [_row("a"), _row("b", temperature=0, logit_bias=((TokenId(0), 9.0),), min_tokens=3)]
    Sampler({EOS}).sample_batch(logits, rows)

    assert [[1, 5, 2], [1, 5, 2]] == logits.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_are_a_fault_of_their_row(bad: float, temperature: float) -> None:
    """A broken row fails its own sequence, greedy or not; its neighbours get what they always get."""
    good = [0.0, 90.0, 1.0]
    rows = [_row(name, temperature=temperature) for name in "abc"]
    before, broken, after = Sampler({EOS}).sample_batch(_matrix(good, [1.0, bad, 2.0], good), rows)

    assert isinstance(broken, SequenceFault)
    assert ErrorCode.INTERNAL is broken.code
    assert [1, 1] == _ids([before, after])


def test_no_rows_are_no_work() -> None:
    """A step of prompts that are not at their end."""
    assert [] == Sampler({EOS}).sample_batch(np.zeros((0, 5), dtype=np.float32), [])


@pytest.mark.parametrize("kind", ["presence_penalty", "frequency_penalty"])
def test_smp_02_the_prompt_is_not_punished_by_presence_and_frequency(kind: str) -> None:
    """X = Y, X the lower id and in the prompt: X until it was generated, then Y."""
    sampler = Sampler({EOS})
    logits = _matrix([0, 5, 5, 0])
    penalties: dict[str, Any] = {kind: 2.0, "temperature": 0.0}
    (first,) = _ids(sampler.sample_batch(logits, [_row(prompt=(1, 1), **penalties)]))
    (second,) = _ids(sampler.sample_batch(logits, [_row(prompt=(1, 1), index=2, outputs=[first], **penalties)]))

    assert [1, 2] == [first, second]


def test_smp_02_repetition_counts_the_prompt_from_the_first_token() -> None:
    """X = Y, X in the prompt: Y at once, then X again, as both are in the sequence by then."""
    sampler = Sampler({EOS})
    logits = _matrix([0, 5, 5, 0])
    (first,) = _ids(sampler.sample_batch(logits, [_row(repetition_penalty=2.0, temperature=0)]))
    row = _row(index=2, outputs=[first], repetition_penalty=2.0, temperature=0)

    assert [2, 1] == [first, *_ids(sampler.sample_batch(logits, [row]))]


def test_split_roles_go_on_where_the_other_has_stopped() -> None:
    """SMP-02: token 1 by one sampler, the others by another that is told the output: the tokens of one sampler."""
    logits = np.random.default_rng(8).normal(0, 1, (12, 30)).astype(np.float32)
    sampling: dict[str, Any] = {
        "presence_penalty": 1.0,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "temperature": 0.5,
    }

    def answer(samplers: Sequence[Sampler]) -> list[int]:
        outputs: list[int] = []
        for place, sampler in enumerate(samplers):
            row = _row(index=place + 1, prompt=(3, 4, 5), outputs=outputs, **sampling)
            outputs += _ids(sampler.sample_batch(logits[place : place + 1], [row]))
        return outputs

    one, prefill, decode = Sampler({EOS}), Sampler({EOS}), Sampler({EOS})

    assert answer([one] * 12) == answer([prefill, *[decode] * 11])


def test_min_tokens_puts_the_end_off() -> None:
    """EOS and the request's own end token are the likeliest; neither comes before token 3."""
    logits = _matrix([9, 1, 8, 2])
    sampler = Sampler({EOS})
    rows = [
        _row(index=index, outputs=[3] * (index - 1), temperature=0, min_tokens=2, stop_token_ids=(TokenId(2),))
        for index in (1, 2, 3)
    ]

    assert [3, 3, 0] == [token for row in rows for token in _ids(sampler.sample_batch(logits, [row]))]


def test_nothing_but_end_tokens_is_a_fault() -> None:
    """A vocabulary of which `min_tokens` leaves nothing."""
    (result,) = Sampler({EOS}).sample_batch(_matrix([1, 2]), [_row(min_tokens=1, stop_token_ids=(TokenId(1),))])

    assert isinstance(result, SequenceFault)
    assert ErrorCode.INVALID_REQUEST is result.code


def test_logprobs_are_of_the_bent_logits_before_temperature() -> None:
    """The same at every temperature; None where nobody asked."""
    logits = _matrix([1, 5, 2], [1, 5, 2], [1, 5, 2])
    rows = [
        _row("a", temperature=0, top_logprobs=2, logit_bias=((TokenId(2), 4.0),)),
        _row("b", temperature=0.1, top_k=1, top_logprobs=2, logit_bias=((TokenId(2), 4.0),)),
        _row("c", temperature=0),
    ]
    expected = token_logprobs(np.array([1, 5, 6], dtype=np.float32), TokenId(2), 2)
    results = Sampler({EOS}).sample_batch(logits, rows)

    assert [expected, expected, None] == [result.logprobs for result in results if isinstance(result, SampledToken)]


def test_a_released_sequence_is_forgotten() -> None:
    """The next one under its key begins anew: nothing of the old output is counted."""
    sampler = Sampler({EOS})
    logits = _matrix([0, 5, 5])
    sampler.sample_batch(logits, [_row(index=2, outputs=[1], presence_penalty=2.0, temperature=0)])
    sampler.release(_row().key)
    sampler.release(_row("unknown").key)

    assert [1] == _ids(sampler.sample_batch(logits, [_row(presence_penalty=2.0, temperature=0)]))

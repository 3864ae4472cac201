"""Tests of `shared.engine.executor`."""

from dataclasses import replace

import pytest

from shared.domain.errors import ErrorCode
from shared.domain.ids import Attempt, BlockId, RequestId, RequestKey, TokenId
from shared.domain.request import FinishReason, RequestSpec
from shared.domain.sampling import SamplingParams
from shared.engine.executor import DecodeRow, finish_reason, internal_fault
from shared.kv.block_table import BlockTable

EOS = TokenId(2)


def _spec(*, ignore_eos: bool = False) -> RequestSpec:
    return RequestSpec(
        request_id=RequestId("r"),
        prompt_ids=(TokenId(1),) * 5,
        max_tokens=3,
        sampling=SamplingParams(seed=0),
        ignore_eos=ignore_eos,
    )


@pytest.mark.parametrize(
    ("index", "token", "ignore_eos", "expected"),
    [
        (1, 7, False, None),
        (1, EOS, False, FinishReason.STOP),
        (1, EOS, True, None),
        (3, 7, False, FinishReason.LENGTH),
        (3, EOS, False, FinishReason.STOP),
        (3, EOS, True, FinishReason.LENGTH),
    ],
)
def test_how_a_sequence_ends(index: int, token: int, ignore_eos: bool, expected: FinishReason | None) -> None:
    """By its end token unless that is ignored, else by its length; the end token wins."""
    assert expected == finish_reason(_spec(ignore_eos=ignore_eos), index=index, token_id=TokenId(token), eos_ids={EOS})


@pytest.mark.parametrize(
    ("index", "token", "ignore_eos", "expected"),
    [
        (2, 9, False, None),
        (2, EOS, False, None),
        (3, 9, False, FinishReason.STOP),
        (3, 9, True, FinishReason.STOP),
        (3, EOS, True, None),
        (4, 8, False, FinishReason.STOP),
        (10, 7, False, FinishReason.LENGTH),
        (10, 9, False, FinishReason.STOP),
    ],
)
def test_the_requests_own_end_tokens(index: int, token: int, ignore_eos: bool, expected: FinishReason | None) -> None:
    """They end it like EOS, and count where that is ignored; nothing but the length ends it before `min_tokens`."""
    sampling = SamplingParams(seed=0, min_tokens=2, stop_token_ids=(TokenId(9), TokenId(8)))
    spec = replace(_spec(ignore_eos=ignore_eos), sampling=sampling, max_tokens=10)

    assert expected == finish_reason(spec, index=index, token_id=TokenId(token), eos_ids={EOS})


def test_position_of_a_fed_token() -> None:
    """Token 1 follows the prompt directly; it is fed to get token 2."""
    row = DecodeRow(
        key=RequestKey(RequestId("r"), Attempt(1)),
        spec=_spec(),
        block_table=BlockTable((BlockId(0),), 16),
        input_tokens=(TokenId(7),),
        index=2,
        outputs=(TokenId(7),),
    )

    assert 5 == row.position


def test_an_internal_fault_says_nothing() -> None:
    """What broke is for the log alone."""
    assert (ErrorCode.INTERNAL, "internal error") == (internal_fault().code, internal_fault().message)

"""Parts of the torch backend: products and attention that give a row the same bits in any batch, rounding."""

from typing import Any

import pytest
import torch

from shared.model.torch_layers import Linear, PackedLinear, RoundedLinear, TiledLinear, attend, make_linear, rounded


@pytest.mark.parametrize(
    ("kind", "dtype", "num_out", "num_in"),
    [
        (PackedLinear, torch.float32, 576, 1536),
        (PackedLinear, torch.float32, 960, 576),
        (TiledLinear, torch.float32, 960, 576),
        (TiledLinear, torch.bfloat16, 960, 576),
    ],
)
def test_a_row_s_product_does_not_depend_on_the_batch(
    kind: type[Any], dtype: torch.dtype, num_out: int, num_in: int
) -> None:
    """Small and larger batches, at either end of the batch, on one thread and on two."""
    generator = torch.Generator().manual_seed(3)
    weight = (torch.randn(num_out, num_in, generator=generator) * 0.02).to(dtype)
    rows = torch.randn(64, num_in, generator=generator)
    multiply: Linear = kind(weight)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = multiply(rows)
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            for size in (1, 2, 3, 5, 6, 7, 9, 10, 11, 12, 17, 33, 64):
                assert torch.equal(multiply(rows[:size]), expected[:size]), size
                assert torch.equal(multiply(rows[-size:].contiguous()), expected[-size:]), size
    finally:
        torch.set_num_threads(before)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(expected, rows @ weight.float().T, rtol=tolerance, atol=tolerance)


def test_rounding_to_integers_with_a_scale_a_group() -> None:
    """By hand: largest magnitude over largest integer is the scale, halves go to the even integer, zeros stay."""
    rows = torch.zeros(1, 64)
    rows[0, :4] = torch.tensor([127.0, -2.5, 3.5, 0.25])

    eight = rounded(rows, 8)
    sixteen = rounded(rows, 16)

    assert torch.equal(eight[0, :4], torch.tensor([127.0, -2.0, 4.0, 0.0]))
    assert 0 == eight[0, 4:].abs().max()
    torch.testing.assert_close(sixteen, rows, rtol=0, atol=127 / 32767 / 2)
    assert not torch.equal(sixteen, rows)


def test_a_rounded_product_is_the_product_of_rounded_rows() -> None:
    """And the mode's bits decide which product is made."""
    generator = torch.Generator().manual_seed(4)
    weight, rows = torch.randn(48, 64, generator=generator), torch.randn(3, 64, generator=generator)
    multiply, plain = make_linear(weight, 8), make_linear(weight, None)

    assert isinstance(multiply, RoundedLinear)
    assert not isinstance(plain, RoundedLinear)
    assert torch.equal(plain(rounded(rows, 8)), multiply(rows))


def test_attention_is_that_of_torch() -> None:
    """Grouped heads, a chunk that begins in the middle: each row sees itself and what is before it."""
    generator = torch.Generator().manual_seed(5)
    queries = torch.randn(5, 6, 16, generator=generator)
    keys, values = torch.randn(2, 12, 16, generator=generator), torch.randn(2, 12, 16, generator=generator)
    mask = torch.ones(5, 12, dtype=torch.bool).tril(7)

    ours = attend(queries, keys.transpose(1, 2), values, start=7, scale=0.25)
    expected = torch.nn.functional.scaled_dot_product_attention(
        queries.transpose(0, 1), keys.repeat_interleave(3, 0), values.repeat_interleave(3, 0), mask, scale=0.25
    )

    torch.testing.assert_close(ours, expected.transpose(0, 1).reshape(5, -1), rtol=1e-5, atol=1e-5)

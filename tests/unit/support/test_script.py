"""The tests' own view of a script is the product's."""

import pytest

from shared.text.script import Script as ServedScript
from tests.support.script import Script, counting, padded


@pytest.mark.parametrize(
    "script",
    [
        counting(7),
        Script(pieces=["a", b"\xe6\xb0", b"\xb4", "\u2028", '"'], repeat=3, step_ms=5, prefill_ms=7, fail_at=4),
        Script(pieces=["x"], eos=False),
    ],
)
def test_the_served_script_plays_what_the_test_expects(script: Script) -> None:
    """The same bytes in the same order, and the end token after the last piece if the script has one."""
    served = ServedScript.parse(script.message)

    played = [served.token_bytes(served.token_id(i)) for i in range(1, script.num_pieces + 1)]

    assert script.text() == b"".join(played).decode(errors="replace")
    settings = (served.repeat, served.step_ms, served.prefill_ms, served.eos, served.fail_at)
    assert (script.repeat, script.step_ms, script.prefill_ms, script.eos, script.fail_at) == settings
    assert script.num_prompt_tokens == len(script.message.encode())


@pytest.mark.parametrize("length", [31, 64, 257])
def test_padding_to_a_length(length: int) -> None:
    """The prompt has exactly the wanted number of tokens; a shorter one than the script itself is refused."""
    assert length == padded(["a ", "b", "c "], num_prompt_tokens=length).num_prompt_tokens
    with pytest.raises(ValueError, match="needs"):
        padded(["a ", "b", "c "], num_prompt_tokens=20)

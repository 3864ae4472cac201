import re
from importlib import resources

import pytest

from shared.domain.ids import RequestId
from shared.state.keys import EPOCH, LEASE, cancel_key, log_key, request_id_of, request_key

SCRIPTS = sorted(
    file.name for file in (resources.files("shared.state") / "lua").iterdir() if file.name.endswith(".lua")
)
# The keys that each script is called with; a script without a row fails the test.
KEYS_OF = {
    "acquire_lease.lua": [LEASE, EPOCH],
    "append_stream_log.lua": [log_key(RequestId("01J"))],
    "end_stream_log.lua": [log_key(RequestId("01J"))],
    "release_lease.lua": [LEASE, EPOCH],
    "renew_lease.lua": [LEASE, EPOCH],
    "store_request.lua": [request_key(RequestId("01J"))],
    "take_over_stream_log.lua": [log_key(RequestId("01J"))],
    "write_stream_log.lua": [log_key(RequestId("01J"))],
}


def hash_tag(key: str) -> str:
    """What Redis Cluster hashes: the text between the first brace and the next closing one."""
    found = re.search(r"\{([^}]+)\}", key)
    assert found is not None
    return found.group(1)


@pytest.mark.parametrize("script", SCRIPTS)
def test_keys_of_a_script_share_one_hash_tag(script: str) -> None:
    """So that a cluster has them on one node (RED-03)."""
    assert 1 == len({hash_tag(key) for key in KEYS_OF[script]})


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_touch_only_the_keys_they_are_given(script: str) -> None:
    """Every redis.call but for the time names a KEYS entry, every entry is documented, and no key is built inside (RED-03)."""
    text = (resources.files("shared.state") / "lua" / script).read_text()
    targets = re.findall(r"redis\.call\(\s*'[A-Z]+'\s*,\s*([^,)\s]+)", text)
    given = {f"KEYS[{number}]" for number in range(1, len(KEYS_OF[script]) + 1)}

    assert given == set(targets)
    assert len(targets) == text.count("redis.call") - text.count("redis.call('TIME')")
    assert all(f"-- {key}" in text for key in given)


def test_request_id_comes_back_out_of_its_keys() -> None:
    """Literal braces and all; other keys are refused."""
    request_id = RequestId("01J0000000000000000000000A.3")

    assert "firsttoken:1:request:{01J0000000000000000000000A.3}" == request_key(request_id)
    assert "firsttoken:1:cancel:{01J0000000000000000000000A.3}:0a1b" == cancel_key(request_id, "0a1b")
    assert [request_id] * 2 == [request_id_of(request_key(request_id)), request_id_of(cancel_key(request_id, "0a1b"))]
    for foreign in ("other:{x}", "firsttoken:1:request:x"):
        with pytest.raises(ValueError, match="not a key"):
            request_id_of(foreign)

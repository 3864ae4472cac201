import importlib
import pkgutil
import re
from importlib import resources

import pytest

from shared import state
from shared.domain.ids import RequestId
from shared.state.client import Script
from shared.state.keys import EPOCH, LEASE, cancel_key, request_id_of, request_key

FILES = sorted(file.name for file in (resources.files("shared.state") / "lua").iterdir() if file.name.endswith(".lua"))
REQUEST_ID = RequestId("01J")


def scripts() -> dict[str, Script]:
    """By the name of the file: all that the modules of shared.state have, with the keys that each is called with."""
    modules = [importlib.import_module(f"shared.state.{found.name}") for found in pkgutil.iter_modules(state.__path__)]
    return {
        f"{value.name}.lua": value for module in modules for value in vars(module).values() if isinstance(value, Script)
    }


SCRIPTS = scripts()


def hash_tag(key: str) -> str:
    """What Redis Cluster hashes: the text between the first brace and the next closing one."""
    found = re.search(r"\{([^}]+)\}", key)
    assert found is not None
    return found.group(1)


def test_every_script_belongs_to_a_module() -> None:
    """So that the tests here see its keys."""
    assert sorted(SCRIPTS) == FILES


@pytest.mark.parametrize("script", FILES)
def test_keys_of_a_script_share_one_hash_tag(script: str) -> None:
    """So that a cluster has them on one node (RED-03). A client runs it with these keys and no others."""
    assert 1 == len({hash_tag(key) for key in SCRIPTS[script].keys_of(REQUEST_ID)})


def test_a_script_about_a_request_needs_one() -> None:
    """Its key would be that of none."""
    with pytest.raises(ValueError, match="about one request"):
        SCRIPTS["store_request.lua"].keys_of(None)
    assert [LEASE, EPOCH] == SCRIPTS["renew_lease.lua"].keys_of(None)


@pytest.mark.parametrize("script", FILES)
def test_scripts_touch_only_the_keys_they_are_given(script: str) -> None:
    """Every redis.call but for the time names a KEYS entry, every entry is documented, and no key is built inside (RED-03)."""
    text = (resources.files("shared.state") / "lua" / script).read_text()
    targets = re.findall(r"redis\.call\(\s*'[A-Z]+'\s*,\s*([^,)\s]+)", text)
    given = {f"KEYS[{number}]" for number in range(1, len(SCRIPTS[script].keys_of(REQUEST_ID)) + 1)}

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

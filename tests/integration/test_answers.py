"""Every text exact: streamed and whole, alone and in a crowd, whatever way its bytes are cut."""

import asyncio
import random
from typing import Any

from tests.support.chat import ChatRecord, ask, stream_chat
from tests.support.cluster import Cluster
from tests.support.script import Script, counting

CORPUS = "The river 川の流れ は\u3000絶えず 😀👨‍👩‍👧🇯🇵 한국어 naïve — zażółć gęślą jaźń \t中文测试。"


def cut_at_random(text: str, rng: random.Random) -> list[bytes]:
    """The text's bytes in pieces of 1 to 4."""
    raw, pieces, place = text.encode(), list[bytes](), 0
    while place < len(raw):
        size = rng.randint(1, 4)
        pieces.append(raw[place : place + size])
        place += size
    return pieces


def content(answer: dict[str, Any]) -> str:
    """The text of a whole answer."""
    (choice,) = answer["choices"]
    assert "assistant" == choice["message"]["role"]
    return choice["message"]["content"]


async def test_streamed_and_whole_are_the_same_exact_text(cluster: Cluster) -> None:
    """Text, finish reason and usage are those of the script; both forms carry the id that the header names."""
    script = counting(40)

    whole = await ask(cluster.port, script.body())
    streamed = await stream_chat(cluster.port, script.body(stream_options={"include_usage": True}))

    assert script.text() == content(whole)
    assert script.text() == streamed.text
    assert "stop" == whole["choices"][0]["finish_reason"] == streamed.finish_reason
    usage = {"prompt_tokens": script.num_prompt_tokens, "completion_tokens": 41}
    usage["total_tokens"] = script.num_prompt_tokens + 41
    assert usage == {name: whole["usage"][name] for name in usage}
    assert streamed.usage is not None
    assert usage == {name: streamed.usage[name] for name in usage}
    assert {f"chatcmpl-{streamed.request_id}"} == {chunk["id"] for chunk in streamed.chunks}
    assert "chat.completion" == whole["object"]
    assert {"chat.completion.chunk"} == {chunk["object"] for chunk in streamed.chunks}


async def test_max_tokens_ends_with_length(cluster: Cluster) -> None:
    """Both names of the limit; exactly so many tokens, finish reason length."""
    script = counting(40)
    for name in ("max_tokens", "max_completion_tokens"):
        body = script.body(stream_options={"include_usage": True})
        del body["max_tokens"]

        record = await stream_chat(cluster.port, {**body, name: 5})

        assert script.text(5) == record.text
        assert "length" == record.finish_reason
        assert record.usage is not None
        assert 5 == record.usage["completion_tokens"]


async def test_one_token(cluster: Cluster) -> None:
    """Token 1 is made by prefill; an answer may end with it, by length or by the end token."""
    assert "w0 " == (await stream_chat(cluster.port, counting(3).body(max_tokens=1))).text
    empty = await stream_chat(cluster.port, Script(pieces=[]).body(max_tokens=4))

    assert ("", "stop") == (empty.text, empty.finish_reason)


async def test_without_max_tokens(cluster: Cluster) -> None:
    """An answer may use what is left of the window; it ends where the script ends."""
    script = counting(20)
    body = script.body()
    del body["max_tokens"]

    assert script.text() == (await stream_chat(cluster.port, body)).text


async def test_ignore_eos(cluster: Cluster) -> None:
    """With ignore_eos the end token ends nothing and has no text."""
    script = counting(3)

    record = await stream_chat(
        cluster.port, script.body(ignore_eos=True, max_tokens=9, stream_options={"include_usage": True})
    )

    assert (script.text(), "length") == (record.text, record.finish_reason)
    assert record.usage is not None
    assert 9 == record.usage["completion_tokens"]


async def test_split_characters(cluster: Cluster) -> None:
    """TXT-01, TXT-02: no broken character, none twice, whatever the cuts; streamed equals whole."""
    rng = random.Random(7)
    scripts = [Script(pieces=["Q ", bytes.fromhex("e4baba"), b"\xe6", b"\xb0", b"\xb4", "x"])]
    scripts += [Script(pieces=cut_at_random(CORPUS, rng)) for _ in range(8)]

    for script in scripts:
        streamed = await stream_chat(cluster.port, script.body())

        assert script.text() == streamed.text == content(await ask(cluster.port, script.body()))
        assert "\ufffd" not in streamed.text
    assert "Q 人水x" == scripts[0].text()


async def test_answer_cut_inside_a_character(cluster: Cluster) -> None:
    """At most one U+FFFD, at the very end."""
    script = Script(pieces=["a", b"\xf0\x9f", b"\x98\x80"], eos=False)

    assert "a\ufffd" == (await stream_chat(cluster.port, script.body(max_tokens=2))).text


async def test_line_separators_inside_text(cluster: Cluster) -> None:
    """SSE-05: whatever looks like a line end to someone stays inside one event."""
    script = Script(pieces=["p\u2028q", "\u2029r\u0085s", "\x0bt\r\n", "\n\n", "data: [DONE]\n\n", "u"])

    record = await stream_chat(cluster.port, script.body())

    assert script.text() == record.text
    assert script.text() == content(await ask(cluster.port, script.body()))


async def test_stop_strings(cluster: Cluster) -> None:
    """TXT-04: nothing of a stop string is sent, what only looked like one is released, the count ends at the match."""
    options = {"stop": ["two three"], "stream_options": {"include_usage": True}}
    stopped = Script(pieces=["one ", "tw", "o th", "ree", " four"])
    not_stopped = Script(pieces=["one ", "tw", "o th", "rill"])

    first = await stream_chat(cluster.port, stopped.body(**options))
    second = await stream_chat(cluster.port, not_stopped.body(**options))

    assert ("one ", "stop") == (first.text, first.finish_reason)
    assert first.usage is not None
    assert 4 == first.usage["completion_tokens"]
    assert ("one two thrill", "stop") == (second.text, second.finish_reason)
    assert "one " == content(await ask(cluster.port, stopped.body(stop="two three")))


async def test_held_text_is_released_at_the_end(cluster: Cluster) -> None:
    """TXT-05: a possible stop prefix is not lost when the answer ends, by the end token or by length."""
    script = Script(pieces=["gar", "den"])

    ended = await stream_chat(cluster.port, script.body(stop=["denial"]))
    cut = await stream_chat(cluster.port, script.body(stop=["denial"], max_tokens=2))

    assert [("garden", "stop"), ("garden", "length")] == [(r.text, r.finish_reason) for r in (ended, cut)]


async def test_a_stop_string_ends_the_computing(cluster: Cluster) -> None:
    """TXT-06: decode is told to end; at most 5 tokens more than delivered are computed of the 500 on offer."""
    script = Script(pieces=["a", "#", "##", *[f"n{i} " for i in range(500)]])
    (before,) = await cluster.role_metrics("decode")

    record = await stream_chat(cluster.port, script.body(stop=["###"], stream_options={"include_usage": True}))

    (after,) = await cluster.role_metrics("decode")
    assert ("a", "stop") == (record.text, record.finish_reason)
    assert record.usage is not None
    assert 3 == record.usage["completion_tokens"]
    name = "firsttoken_tokens_computed_total"
    assert after.total(name) - before.total(name) <= 3 + 5


def crowd_member(number: int) -> tuple[Script, dict[str, Any], str]:
    """A script unlike the others, its options, and the text that must come of it."""
    rng = random.Random(number)
    words = [f"r{number}.{i} " for i in range(rng.randint(5, 60))]
    if number % 3 == 0:
        script = Script(pieces=cut_at_random(f"{number}:{CORPUS}", rng), step_ms=rng.choice([0, 2]))
        return script, {}, script.text()
    if number % 3 == 1:  # takes its time in prefill, so that others can share the steps
        script = Script(pieces=[*words, "<en", "d>", "never "], prefill_ms=20)
        return script, {"stop": ["<end>"]}, "".join(words)
    script = Script(pieces=words, prefill_ms=20, step_ms=1, eos=False)
    return script, {"max_tokens": 2 * len(words)}, "".join(words) * 2


async def test_a_hundred_streams_at_once(either: Cluster) -> None:
    """Every text exact; several requests share a step in both roles; (by the fixture) every count idle afterwards."""
    members = [crowd_member(number) for number in range(100)]
    before = {role: await either.role_metrics(role) for role in ("prefill", "decode")}

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream_chat(either.port, script.body(**options))) for script, options, _ in members]

    records: list[ChatRecord] = [task.result() for task in tasks]
    assert [text for _, _, text in members] == [record.text for record in records]
    assert 100 == len({record.request_id for record in records})
    name = "firsttoken_step_sequences"
    for role, (earlier,) in before.items():
        (now,) = await either.role_metrics(role)
        assert now.above(name, 1.0) > earlier.above(name, 1.0), f"no {role} step with more than one sequence"


async def test_models(cluster: Cluster) -> None:
    """The served model is listed, and `default` is an alias of it."""
    answer = await cluster.get("/v1/models")

    assert 200 == answer.status
    ids = [model["id"] for model in answer.json()["data"]]
    assert "list" == answer.json()["object"]
    assert "scripted" in ids
    for model in ("scripted", "default"):
        assert "hi" == content(await ask(cluster.port, Script(pieces=["hi"]).body(model=model)))

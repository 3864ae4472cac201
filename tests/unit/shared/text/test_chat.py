"""Chat messages into prompt tokens: the template once, its refusals, scripts; and no torch in the process."""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import TokenId
from shared.text.chat import ChatMessage, ChatTokenizer
from shared.text.pieces import byte_level_alphabet
from shared.text.script import SCRIPTED_WINDOW

_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder with a byte-level tokenizer of 258 tokens that adds a begin token by default."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer: Any = Tokenizer(models.BPE(byte_level_alphabet(), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    tokenizer.enable_truncation(4)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    (folder / "firsttoken.json").write_text(json.dumps({"window": 512, "eos_ids": [257]}))
    return folder


def _say(text: str, role: str = "user") -> list[ChatMessage]:
    return [ChatMessage(role=role, content=text)]


def test_one_begin_token(model_dir: Path) -> None:
    """TPL-01: the template writes the begin token, the tokenizer adds none; nothing is cut."""
    chat = ChatTokenizer.load(model_dir)
    assert chat.render(_say("Hi")) == (256, *b"[user]Hi[assistant]")
    assert (chat.window, chat.eos_ids, chat.vocab_size) == (512, {257}, 258)


def test_a_refusing_template_is_the_client_s_error(model_dir: Path) -> None:
    """ERR-03: the template's own words reach the client, and the next request is served."""
    chat = ChatTokenizer.load(model_dir)
    with pytest.raises(ServingError) as caught:
        chat.render(_say("Be brief", role="system"))
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_REQUEST, "messages")
    assert "System role not supported" in caught.value.message
    assert chat.render(_say("Hi"))[0] == 256


def test_half_a_surrogate_is_the_client_s_error(model_dir: Path) -> None:
    """JSON can carry one; no tokenizer can read it."""
    for chat in (ChatTokenizer.load(model_dir), ChatTokenizer.scripted()):
        with pytest.raises(ServingError, match="half of a surrogate pair"):
            chat.render(_say("a\ud83d"))


def test_what_can_never_fit_is_refused_before_it_is_tokenised(model_dir: Path) -> None:
    """Even tokens as long as the longest would be too many; what might fit is tokenised and left to the caller."""
    chat = ChatTokenizer.load(model_dir)
    longest = len("</s>")
    around = len("<s>[user][assistant]")

    with pytest.raises(ServingError) as caught:
        chat.render(_say("x" * (longest * 512 - around + 1)))
    assert (ErrorCode.CONTEXT_TOO_LONG, "messages") == (caught.value.code, caught.value.param)
    assert "window of this model is 512 tokens; the prompt has at least 513" in caught.value.message
    assert len(chat.render(_say("x" * (longest * 512 - around)))) > 512


def test_tokenising_lets_others_run(model_dir: Path) -> None:
    """A large prompt is tokenised without the interpreter's lock: the event loop's thread goes on meanwhile.

    By the processor's time: a busy machine that runs neither of the two threads makes no pause.
    """
    chat = ChatTokenizer.load(model_dir)
    chat.window = 1_000_000
    turns = [time.process_time()]
    with ThreadPoolExecutor(1) as pool:
        rendering = pool.submit(chat.render, _say("some words " * 200_000))
        while not rendering.done():
            turns.append(time.process_time())

    assert len(rendering.result()) > 1_000_000
    longest_pause_s = max(after - before for before, after in pairwise(turns))
    assert longest_pause_s < 0.5 * (turns[-1] - turns[0])


def test_threads_render_at_once(model_dir: Path) -> None:
    """Long prompts in eight threads give each its own tokens."""
    chat = ChatTokenizer.load(model_dir)
    chat.window = 100_000
    texts = [f"{number} " * 2000 for number in range(16)]
    with ThreadPoolExecutor(8) as pool:
        prompts = list(pool.map(chat.render, map(_say, texts)))
    assert prompts == [(256, *f"[user]{text}[assistant]".encode()) for text in texts]


def test_end_tokens_have_no_text(model_dir: Path) -> None:
    """The way back: bytes give characters, the end gives nothing."""
    detokenizer = ChatTokenizer.load(model_dir).detokenizer((TokenId(256),), ["!"])
    assert detokenizer.feed([TokenId(each) for each in (*b"ok", 257)]).text == "ok"
    assert detokenizer.feed([TokenId(ord("!"))]).stop_index == 4


def test_tokens_without_text_have_names(model_dir: Path) -> None:
    """As the tokenizer writes them; what is no token has none, and neither have those of a script."""
    chat = ChatTokenizer.load(model_dir)

    assert ["<s>", "</s>", "", ""] == [
        *(chat.token_name(TokenId(token_id)) for token_id in (256, 257, 9999)),
        ChatTokenizer.scripted().token_name(TokenId(5)),
    ]


def test_scripted_prompt_is_the_last_user_message() -> None:
    """One token a byte; the answer's table comes from the prompt."""
    chat = ChatTokenizer.scripted()
    script = '{"pieces": ["人", {"hex": "e4"}]}'
    prompt = chat.render([*_say("ignored"), *_say(script), *_say("ignored", role="assistant")])
    assert bytes(prompt) == script.encode()
    assert chat.window == SCRIPTED_WINDOW
    detokenizer = chat.detokenizer(prompt)
    texts = [detokenizer.feed([TokenId(each)]).text for each in (256, 257, *chat.eos_ids)]
    assert [*texts, detokenizer.flush()] == ["人", "", "", "\ufffd"]


def test_a_bad_script_is_refused_at_the_edge() -> None:
    """No user message at all, or one that is no script."""
    chat = ChatTokenizer.scripted()
    with pytest.raises(ServingError, match="no user message"):
        chat.render(_say("{}", role="system"))
    with pytest.raises(ServingError, match="'pieces' is missing"):
        chat.render(_say("{}"))


def test_no_torch(model_dir: Path) -> None:
    """A process that renders and detokenises a real chat has not loaded torch."""
    program = (
        "import sys; from pathlib import Path; from shared.text.chat import ChatMessage, ChatTokenizer\n"
        "chat = ChatTokenizer.load(Path(sys.argv[1]))\n"
        "ids = chat.render([ChatMessage(role='user', content='Hi')])\n"
        "print(chat.detokenizer(ids).feed(ids).text, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(model_dir)], capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout == "[user]Hi[assistant] False\n"

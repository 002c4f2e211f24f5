"""Encode, decode, chat templates and token bytes, against transformers; several threads at once; torch blocked."""

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from replicas.model.default_model import prepare_default_model
from replicas.text.token_bytes import byte_level_bytes
from replicas.text.tokenizer import ChatTemplateError, TextTooLong, Tokenizer, TokenizerLoadError
from tests.prompts import tricky_strings
from tests.small_tokenizers import FAMILIES, small_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(prepare_default_model())


@pytest.fixture(scope="module")
def reference():
    return AutoTokenizer.from_pretrained(prepare_default_model())


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <| im_end > 你好"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]


def test_encode_equals_transformers(tokenizer, reference):
    for text in tricky_strings():
        assert tokenizer.encode(text) == reference.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_encode_equals_transformers_for_every_family(family):
    tokenizer = small_tokenizer(family)
    text = "the cats aren't 中 é</s> do"
    assert tokenizer.encode(text) == tokenizer._hf.encode(text)


def test_encode_lone_surrogate_is_refused_with_its_place(tokenizer):
    with pytest.raises(ValueError, match="lone surrogate at character 2"):
        tokenizer.encode("ab\ud800")


def test_encode_null_byte_is_text(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\0b")).startswith("a")


def test_decode_ids_without_a_token_add_nothing(tokenizer):
    ids = tokenizer.encode("hello")
    assert tokenizer.decode([*ids, tokenizer.vocab_size, 10**6]) == "hello"
    assert tokenizer.vocab_size == 49152


def test_decode_special_tokens_are_kept_on_request(tokenizer):
    assert tokenizer.decode([2], skip_special_tokens=False) == "<|im_end|>"
    assert tokenizer.decode([2]) == ""


def test_eos_ids_join_tokenizer_and_generation_config(tmp_path, tokenizer):
    assert tokenizer.eos_token_ids == {2}
    small_tokenizer("byte_level")._hf.save_pretrained(tmp_path)
    end = small_tokenizer("byte_level").encode("</s>", add_special_tokens=False)[0]
    assert Tokenizer.load(tmp_path).eos_token_ids == {end}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert Tokenizer.load(tmp_path).eos_token_ids == {end, 7, 8}


def test_load_folder_without_tokenizer_says_what_to_name(tmp_path):
    with pytest.raises(TokenizerLoadError, match="model must be a folder with a tokenizer, or a Hugging Face id") as error:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_chat_prompt_ids_equal_transformers(tokenizer, reference, add_generation_prompt):
    expected = reference.apply_chat_template(CONVERSATION, add_generation_prompt=add_generation_prompt, return_dict=False)
    assert tokenizer.chat_prompt_ids(CONVERSATION, add_generation_prompt=add_generation_prompt) == expected


def test_chat_prompt_continue_final_message_ends_with_it(tokenizer, reference):
    messages = [*CONVERSATION, {"role": "assistant", "content": "See you"}]
    expected = reference.apply_chat_template(messages, continue_final_message=True, return_dict=False)
    found = tokenizer.chat_prompt_ids(messages, add_generation_prompt=False, continue_final_message=True)
    assert found == expected
    assert tokenizer.decode(found).endswith("See you")


def templated(template):
    tokenizer = Tokenizer(AutoTokenizer.from_pretrained(prepare_default_model()))
    tokenizer._hf.chat_template = template
    return tokenizer


def test_chat_template_raising_gives_its_own_message():
    tokenizer = templated("{{ raise_exception('Roles must alternate') }}")
    with pytest.raises(ChatTemplateError, match="Roles must alternate"):
        tokenizer.chat_prompt_ids(CONVERSATION)


def test_chat_template_content_none_is_refused(tokenizer):
    with pytest.raises(ChatTemplateError, match="the chat template cannot render these messages"):
        tokenizer.chat_prompt_ids([{"role": "user", "content": None}])


@pytest.mark.parametrize("family", [*FAMILIES, "default"])
def test_text_far_over_the_limit_is_refused_and_no_other(tokenizer, family):
    chosen = tokenizer if family == "default" else small_tokenizer(family)
    for text in ("the cat sat. ", "a", " ", "中文é", "word\n\n"):
        long = text * (60_000 // len(text))
        num_tokens = len(chosen.encode(long))
        assert chosen.encode(long, limit=num_tokens) == chosen.encode(long)
        if num_tokens > 500:  # else it is one word that the vocabulary does not know
            with pytest.raises(TextTooLong):
                chosen.encode(long, limit=num_tokens // 50)


def test_chat_template_kwargs_reach_the_template():
    tokenizer = templated("{{ messages[0]['content'] }}{% if enable_thinking %} think{% endif %}")
    assert tokenizer.chat_prompt(CONVERSATION, template_kwargs={"enable_thinking": True}) == "Be brief. think"


def test_chat_template_kwargs_may_not_replace_the_template(tokenizer):
    with pytest.raises(ChatTemplateError, match="chat_template_kwargs must not hold chat_template, tokenize"):
        tokenizer.chat_prompt_ids(CONVERSATION, template_kwargs={"chat_template": "x", "tokenize": True, "fine": 1})


def test_chat_without_template_is_refused():
    tokenizer = small_tokenizer("byte_level")
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.chat_prompt_ids(CONVERSATION)


def test_chat_without_messages_is_refused(tokenizer):
    with pytest.raises(ChatTemplateError, match="at least one message"):
        tokenizer.chat_prompt_ids([])


def test_token_bytes_join_to_the_text(tokenizer):
    text = "Grüße 你好 🙂 e\u0301"
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in tokenizer.encode(text)) == text.encode()
    fallback = small_tokenizer("byte_fallback")
    ids = fallback.encode("a 中ü", add_special_tokens=False)
    assert b"".join(fallback.token_bytes(token_id) for token_id in ids) == "a 中ü".encode()


def test_token_bytes_of_special_and_missing_tokens(tokenizer):
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.token_text(2) == "<|im_end|>"


def test_token_bytes_of_metaspace_is_a_space():
    tokenizer = small_tokenizer("metaspace")
    assert tokenizer.token_bytes(tokenizer.encode("the", add_special_tokens=False)[0]) == b" the"


def test_byte_level_alphabet_equals_gpt2_bytes_to_unicode():
    """GPT-2's table is the space at U+0120, the newline at U+010A, and printable Latin-1 as itself."""
    assert byte_level_bytes("Ġa") == b" a"
    assert byte_level_bytes("Ċ") == b"\n"
    assert byte_level_bytes("Ã©") == "é".encode()
    assert byte_level_bytes("ĀŃ") == b"\x00\xad"
    assert byte_level_bytes("中") == "中".encode()


@pytest.mark.parametrize("family", ["default", "slow_bytes"])
def test_threads_share_one_tokenizer(tokenizer, family):
    shared = tokenizer if family == "default" else small_tokenizer(family)
    texts = [f"text {index} Grüße 你好 🙂" for index in range(40)]
    expected = [(shared.encode(text), shared.decode(shared.encode(text))) for text in texts]

    def work(text):
        ids = shared.encode(text)
        if family == "default":
            shared.chat_prompt_ids([{"role": "user", "content": text}])
        return ids, shared.decode(ids)

    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            assert list(pool.map(work, texts)) == expected


def test_text_package_runs_with_torch_blocked():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from replicas.text.tokenizer import Tokenizer\nfrom replicas.text.text_stream import TextStream\n"
        f"tokenizer = Tokenizer.load({str(prepare_default_model())!r})\n"
        "assert tokenizer.decode(tokenizer.encode('hello')) == 'hello'\n"
        "assert tokenizer.chat_prompt_ids([{'role': 'user', 'content': 'hi'}])\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_encode_of_a_long_text_lets_other_threads_run(tokenizer):
    encoder = threading.Thread(target=tokenizer.encode, args=("word " * 100_000,))
    encoder.start()
    num_turns = 0
    while encoder.is_alive():
        encoder.join(timeout=0.001)
        num_turns += 1
    assert num_turns > 10  # two or three when the encoder holds the interpreter lock

import threading
from typing import Any

import pytest

from cluster.models.served_model import SHORT_TEXT_CHARS, ServedModel
from replicas.model_description import ModelDescription

DESCRIPTION = ModelDescription(max_model_len=64, vocab_size=512, block_size=4, dtype="float32", tokenizer_source="none")


class Tokenizer:
    """Remembers which thread it was called in."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None

    def encode(self, text: str, add_special_tokens: bool, limit: int | None) -> list[int]:
        self.thread = threading.current_thread()
        return [len(text)]

    def chat_prompt_ids(self, messages: Any, **_: Any) -> list[int]:
        self.thread = threading.current_thread()
        return [len(messages)]


@pytest.mark.parametrize(("num_chars", "is_off_the_loop"), [(SHORT_TEXT_CHARS, False), (SHORT_TEXT_CHARS + 1, True)])
async def test_encode_only_short_text_is_tokenized_in_the_event_loop(num_chars: int, is_off_the_loop: bool) -> None:
    tokenizer = Tokenizer()
    model = ServedModel("m", DESCRIPTION, tokenizer, created_s=0)  # type: ignore[arg-type]
    assert await model.encode("x" * num_chars) == [num_chars]
    assert (tokenizer.thread is not threading.main_thread()) == is_off_the_loop


@pytest.mark.parametrize(
    ("messages", "template_kwargs", "is_off_the_loop"),
    [
        ([{"role": "user", "content": "Hello"}], None, False),
        ([{"role": "user", "content": "x" * (SHORT_TEXT_CHARS // 2)}] * 2, None, True),
        ([{"role": "user", "content": "Hello"}], {"documents": ["x" * 10_000]}, True),
    ],
)
async def test_chat_only_short_messages_are_rendered_in_the_event_loop(
    messages: list[dict[str, str]], template_kwargs: dict[str, Any] | None, is_off_the_loop: bool
) -> None:
    tokenizer = Tokenizer()
    model = ServedModel("m", DESCRIPTION, tokenizer, created_s=0)  # type: ignore[arg-type]
    assert await model.chat_prompt_ids(messages, template_kwargs=template_kwargs) == [len(messages)]
    assert (tokenizer.thread is not threading.main_thread()) == is_off_the_loop

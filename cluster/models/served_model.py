"""A model as the gateway sees it: its name, its tokenizer and the facts that its replicas told."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from cluster.models.grammar_gate import GrammarGate
from cluster.settings.latency_targets import LatencyTarget
from replicas.model_description import ModelDescription
from replicas.text.tokenizer import Tokenizer

SHORT_TEXT_CHARS = 1000
"""Up to here tokenizing takes less than the way to a thread and back, which is longest when the event loop is busy."""


class ServedModel:
    """Owns the tokenizer of one model. Work on text that is not short runs in a thread, off the event loop."""

    def __init__(
        self,
        name: str,
        description: ModelDescription,
        tokenizer: Tokenizer,
        created_s: int,
        targets: Sequence[LatencyTarget] = (),
        grammars: GrammarGate | None = None,
    ) -> None:
        """`targets` are in ascending order of their priorities. Without `grammars` this server takes none."""
        self.name = name
        self.description = description
        self.tokenizer = tokenizer
        self.created_s = created_s
        self.targets = tuple(targets)
        self.grammars = grammars
        facts = f"{name}:{description.tokenizer_source}:{description.dtype}:{description.weights_version}"
        self.fingerprint = f"fp_{hashlib.sha256(facts.encode()).hexdigest()[:12]}"

    async def encode(self, text: str, *, add_special_tokens: bool = True, limit: int | None = None) -> list[int]:
        """Raises TextTooLong for a text far over `limit` tokens, without tokenizing all of it."""
        encode = partial(self.tokenizer.encode, text, add_special_tokens, limit)
        return encode() if len(text) <= SHORT_TEXT_CHARS else await asyncio.to_thread(encode)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return await asyncio.to_thread(self.tokenizer.decode, token_ids, skip_special_tokens)

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token by itself."""
        return await asyncio.to_thread(lambda: [self.tokenizer.token_text(token_id) for token_id in token_ids])

    async def chat_prompt_ids(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        limit: int | None = None,
    ) -> list[int]:
        """Token ids of the rendered chat template. Raises ChatTemplateError with the template's own message, TextTooLong."""
        encode = partial(
            self.tokenizer.chat_prompt_ids,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs or {},
            limit=limit,
        )
        num_chars = sum(len(text) for message in messages for text in message.values())
        return encode() if num_chars <= SHORT_TEXT_CHARS and not template_kwargs else await asyncio.to_thread(encode)

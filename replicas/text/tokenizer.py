"""One model's tokenizer and chat template, safe to call from several threads. Runs without torch."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from replicas.text.control_tokens import ControlTokens, SpelledOut
from replicas.text.token_bytes import BYTE_TOKEN, DecoderKind, byte_level_bytes, byte_tokens, decoder_kind, space_markers

logger = logging.getLogger(__name__)

_FIXED_TEMPLATE_ARGUMENTS = frozenset(
    [
        "conversation",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "messages",
        "tokenizer_kwargs",
    ]
)
"""Arguments of transformers' `apply_chat_template` that a client may not set."""


_USUAL_CHARS = 8
"""Most characters per token of `limit` at which a text is tokenized whole, without counting piece by piece first."""
_PIECE_CHARS = 16_384


class TokenizerLoadError(ValueError):
    """The folder or id has no tokenizer that can be loaded; the message says what to name instead."""


class ChatTemplateError(ValueError):
    """The messages do not fit the model's chat template (the message is the template's own), or there is none."""


class ChatTemplateArgumentError(ChatTemplateError):
    """`chat_template_kwargs` cannot be used: reserved names, or values with which the template fails."""


class TextTooLong(ValueError):
    """The text has far more tokens than allowed. Not raised for a text slightly over the limit, which is tokenized."""


class Tokenizer:
    """Text to token ids and back.

    Hugging Face fast tokenizers fail with "Already borrowed" when one thread sets truncation while another encodes
    (transformers#47085). So a fast tokenizer is called below the layer that sets truncation; a slow one is behind a lock.
    """

    def __init__(self, hf: Any, eos_token_ids: frozenset[int] = frozenset()) -> None:
        """`hf` is a transformers tokenizer, owned by this object from now on."""
        self._hf = hf
        self._lock: AbstractContextManager[Any] = nullcontext()
        self._backend: Any = getattr(hf, "backend_tokenizer", None)
        decoder: Mapping[str, Any] | None = None
        if self._backend is None:
            self._lock = threading.Lock()
            self.decoder_kind = DecoderKind.UNKNOWN
            special = hf.all_special_ids
        else:
            self._backend.no_truncation()
            self._backend.no_padding()
            if self._backend.decoder is not None:
                decoder = json.loads(self._backend.decoder.__getstate__())
            self.decoder_kind = decoder_kind(decoder)
            special = [token_id for token_id, token in self._backend.get_added_tokens_decoder().items() if token.special]
        self.vocab_size = 1 + max(hf.get_vocab().values())
        """One more than the largest token id; a model may have more rows than that (padding)."""
        self._space_markers = space_markers(decoder)
        self.special_token_ids = frozenset(special)
        """Tokens without text under `skip_special_tokens`."""
        self._control_tokens: ControlTokens | None = None  # built for the first chat, like what follows
        self._joint_ids: list[int] | None = None
        own_eos = () if hf.eos_token_id is None else (int(hf.eos_token_id),)
        self.eos_token_ids = eos_token_ids | frozenset(own_eos)

    @classmethod
    def load(cls, model_dir_or_id: str | Path, trust_remote_code: bool = False) -> Tokenizer:
        """Reads the tokenizer of a folder or a Hugging Face id; EOS ids come from it and from generation_config.json.

        Imports transformers on first use, which takes seconds and imports torch if torch is installed.
        """
        from transformers import AutoTokenizer

        name = str(model_dir_or_id)
        try:
            hf = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise TokenizerLoadError(
                f"model must be a folder with a tokenizer, or a Hugging Face id that can be reached; {name!r}: {reason}"
            ) from error
        return cls(hf, _generation_eos(name))

    def definition(self) -> str:
        """The text of a tokenizer.json. Raises ValueError for a tokenizer that is not one of Hugging Face's fast ones."""
        if self._backend is None:
            raise ValueError("its tokenizer cannot be written as a tokenizer.json; give the model's folder one")
        return str(self._backend.to_str())

    @property
    def has_chat_template(self) -> bool:
        return bool(self._hf.chat_template)

    def encode(self, text: str, add_special_tokens: bool = True, limit: int | None = None) -> list[int]:
        """Token ids of `text`. Raises ValueError for lone surrogates, which UTF-8 cannot express.

        Raises TextTooLong if the text is far over `limit` tokens, without tokenizing all of it.
        """
        self._check_text(text, limit)
        return self._encode([text], add_special_tokens)[0]

    def _check_text(self, text: str, limit: int | None) -> None:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"text must be valid Unicode; it has a lone surrogate at character {error.start}") from error
        if limit is not None and len(text) > _USUAL_CHARS * limit and self._is_far_over(text, limit):
            raise TextTooLong(f"the text has more than {limit} tokens")

    def _encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        if self._backend is not None:
            # `encode` holds the GIL until it ends, seconds for a long prompt; the batch calls release it.
            return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]
        with self._lock:
            return [list(self._hf.encode(text, add_special_tokens=add_special_tokens)) for text in texts]

    def _is_far_over(self, text: str, limit: int) -> bool:
        """Counts tokens piece by piece. A cut changes only the tokens around it, so a count over `limit` by an eighth is certain."""
        num_left = limit + limit // 8 + 64
        for start in range(0, len(text), _PIECE_CHARS):
            num_left -= len(self.encode(text[start : start + _PIECE_CHARS], add_special_tokens=False))
            if num_left < 0:
                return True
        return False

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`. Ids without a token (padding rows of the model) add nothing.

        Uses the tokenizer's own decoder, without transformers' `clean_up_tokenization_spaces`, which rewrites text around
        punctuation.
        """
        ids = list(token_ids)
        if self._backend is not None:
            text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
            return text
        with self._lock:
            known = [token_id for token_id in ids if token_id < self.vocab_size]
            return str(self._hf.decode(known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False))

    def chat_prompt_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        limit: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation under the model's chat template.

        Only the template writes control tokens: text of `messages` and `template_kwargs` that spells one is encoded as text.
        `template_kwargs` reach the template as variables (`tools`, `enable_thinking`). Raises ChatTemplateError with the
        template's own message if it rejects the messages, and TextTooLong like `encode`.
        """
        pieces = self._chat_pieces(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
        )
        self._check_text("".join(pieces), limit)
        token_ids = self._encode_pieces(pieces)
        if not self._controls().are_only(pieces, token_ids):
            raise ChatTemplateError("the messages hold text that this model's tokenizer takes for a control token")
        return token_ids

    def _encode_pieces(self, pieces: list[str]) -> list[int]:
        """Token ids of parts of one prompt. The template writes the special tokens of its beginning."""
        ids = self._encode(pieces, add_special_tokens=False)
        joint = self._joint() if len(pieces) > 1 else []
        if joint:
            # At its start a text gets a space, which belongs behind control tokens but not between other pieces: those are encoded behind
            # a newline, taken off again.
            behind = self._encode([f"\n{piece}" for piece in pieces[1:]], add_special_tokens=False)
            for index, found in enumerate(behind, 1):
                if found[: len(joint)] == joint and not self._controls().is_at_end_of(pieces[index - 1]):
                    ids[index] = found[len(joint) :]
        spelled = (self._byte_ids(piece.encode()) if isinstance(piece, SpelledOut) else None for piece in pieces)
        return [token_id for own, of_bytes in zip(ids, spelled, strict=True) for token_id in of_bytes or own]

    def _byte_ids(self, text: bytes) -> list[int] | None:
        """One token id for each byte; None where the vocabulary lacks one."""
        tokens = byte_tokens(text, self.decoder_kind)
        if tokens is None:
            return None
        ids = [token_id for token in tokens if (token_id := self._backend.token_to_id(token)) is not None]
        return ids if len(ids) == len(tokens) else None

    def _joint(self) -> list[int]:
        """Token ids of a newline at the start of a text, for tokenizers that put a space there; empty for others."""
        if self._joint_ids is None:
            twice = [token_id for ids in self._encode(["x", "x"], add_special_tokens=False) for token_id in ids]
            self._joint_ids = [] if self.decode(twice) == "xx" else self._encode(["\n"], add_special_tokens=False)[0]
        return self._joint_ids

    def _controls(self) -> ControlTokens:
        if self._control_tokens is None:
            of_bytes = [token_id for byte in range(256) for token_id in self._byte_ids(bytes([byte])) or ()]
            self._control_tokens = ControlTokens.of(
                self._hf.added_tokens_decoder, str(self._hf.chat_template), {*of_bytes, self._hf.unk_token_id}
            )
        return self._control_tokens

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that `chat_prompt_ids` tokenizes; tokenized as a whole, it may have other control tokens."""
        return "".join(
            self._chat_pieces(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=template_kwargs,
            )
        )

    def _chat_pieces(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: Mapping[str, Any] | None,
    ) -> list[str]:
        """The rendered prompt, cut where text of the messages would make control tokens."""
        from jinja2 import TemplateError

        if not self.has_chat_template:
            raise ChatTemplateError("the model has no chat template; send a prompt instead of messages")
        if not messages:
            raise ChatTemplateError("messages must hold at least one message")
        if add_generation_prompt and continue_final_message:
            raise ChatTemplateError("add_generation_prompt and continue_final_message cannot both be true")
        controls = self._controls()
        variables = dict(template_kwargs or {})
        if refused := sorted(_FIXED_TEMPLATE_ARGUMENTS & variables.keys()):
            raise ChatTemplateArgumentError(f"chat_template_kwargs must not hold {', '.join(refused)}")
        try:
            with self._lock:
                rendered = self._hf.apply_chat_template(
                    controls.mark(list(messages)),
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    **{name: controls.mark(value) for name, value in variables.items()},
                )
        # A template fails on unexpected values with Python's errors: adding None to a string, indexing a missing key.
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            if type(error) is TemplateError:  # `raise_exception`, in the template's own words
                raise ChatTemplateError(f"the chat template refuses these messages: {error}") from error
            logger.info("a chat template failed with %s: %s", type(error).__name__, error)
            if variables:
                names = ", ".join(sorted(variables))[:200]
                raise ChatTemplateArgumentError(f"the chat template cannot work with these chat_template_kwargs ({names})") from error
            if continue_final_message:
                raise ChatTemplateError(
                    "the chat template alters the final message, so continue_final_message cannot go on from it"
                ) from error
            raise ChatTemplateError("the chat template cannot render these messages: check their roles, order and content") from error
        return controls.pieces(str(rendered))

    def token(self, token_id: int) -> str | None:
        """The vocabulary's string for a token; None for an id without a token."""
        if self._backend is not None:
            found: str | None = self._backend.id_to_token(token_id)
            return found
        with self._lock:
            return str(self._hf.convert_ids_to_tokens(token_id)) if token_id < self.vocab_size else None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for in the middle of a text (the `bytes` of a logprob); may be part of a character.

        Special tokens give their own text. In vocabularies whose tokens depend on their neighbours (WordPiece) the token is
        decoded alone.
        """
        token = self.token(token_id)
        if token is None:
            return b""
        if token_id in self.special_token_ids:
            return token.encode()
        if self.decoder_kind is DecoderKind.BYTE_LEVEL:
            return byte_level_bytes(token)
        if self.decoder_kind is DecoderKind.BYTE_FALLBACK and BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        if self._space_markers:
            for marker in self._space_markers:
                token = token.replace(marker, " ")
            return token.encode()
        return self.decode([token_id], skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, with U+FFFD for incomplete UTF-8."""
        return self.token_bytes(token_id).decode(errors="replace")


def _generation_eos(name: str) -> frozenset[int]:
    """EOS ids of generation_config.json, which for many chat models lists more than the tokenizer (end of turn)."""
    from transformers import GenerationConfig

    try:
        eos = GenerationConfig.from_pretrained(name).eos_token_id
    except OSError:
        logger.debug("%s has no generation_config.json", name)
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos or ())

"""Tiny tokenizers with chat templates in the manner of well-known families: the same control tokens, the same joints. The framed ones
are in no family's manner: their control tokens have one character."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from replicas.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFamily:
    """What a family's tokenizer has on top of bytes."""

    special: tuple[str, ...]
    template: str
    is_sentencepiece: bool = False
    """Bytes as `<0x41>`, and a space before every text; otherwise GPT-2's alphabet."""
    plain: tuple[str, ...] = ()
    """Added tokens that are not special."""


_FRAMED = (
    "{% for message in messages %}{{ '\x01' + message['role'] }}{% if message['name'] is defined %}※{{ message['name'] }}{% endif %}"
    "{{ '\x1e' + message['content'] + '\x02' }}{% endfor %}"
    "{% if tools is defined and tools %}※{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}\x01assistant\x1e{% endif %}"
)
_FRAMES = ("<|end|>", "\x01", "\x02", "\x1e", "※", "※\x01")

_TOOLS = "{% if tools is defined and tools %}{{ tools | tojson }}{% endif %}"

CHAT_FAMILIES = {
    "chatml": ChatFamily(
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        plain=("<tool_call>", "</tool_call>"),
        template=(
            "{% if tools is defined and tools %}<|im_start|>system\n<tool_call>{{ tools | tojson }}</tool_call><|im_end|>\n{% endif %}"
            "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
            "{% if message['name'] is defined %}<{{ message['name'] }}>{% endif %}"
            "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        ),
    ),
    "llama3": ChatFamily(
        special=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
        template=(
            "<|begin_of_text|>{% for message in messages %}"
            "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
            + _TOOLS
            + "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
        ),
    ),
    "mistral": ChatFamily(
        special=("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        is_sentencepiece=True,
        template=(
            "<s>{% for message in messages %}"
            "{% if message['role'] == 'assistant' %}{{ ' ' + message['content'] + '</s>' }}"
            "{% else %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
            "{% if tools is defined and tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
        ),
    ),
    "gemma": ChatFamily(
        special=("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        is_sentencepiece=True,
        template=(
            "<bos>{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
            "{{ '<start_of_turn>' + role + '\n' + (message['content'] | trim) + '<end_of_turn>\n' }}{% endfor %}"
            + _TOOLS
            + "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
        ),
    ),
    "phi3": ChatFamily(
        special=("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        is_sentencepiece=True,
        template=(
            "{% for message in messages %}{{ '<|' + message['role'] + '|>' + '\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
            + _TOOLS
            + "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
        ),
    ),
    "framed": ChatFamily(special=_FRAMES, template=_FRAMED),
    "framed_pieces": ChatFamily(special=_FRAMES, template=_FRAMED, is_sentencepiece=True),
}  # fmt: skip


def chat_tokenizer(family: str) -> Tokenizer:
    described = CHAT_FAMILIES[family]
    backend = _sentencepiece() if described.is_sentencepiece else _byte_level()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in described.special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in described.plain])
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=described.special[1])
    hf.chat_template = described.template
    return Tokenizer(hf)


def _byte_level() -> Backend:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece() -> Backend:
    """As Llama 2's: a normalizer that puts a space before every text between control tokens."""
    pieces = ["▁", "▁a", "a", "s", "end", "|", "<", ">", "\n"]
    vocab = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256)), *((piece, -3.0) for piece in pieces)]
    backend = Backend(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return backend

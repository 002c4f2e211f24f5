"""Small tokenizers of every family, built with the `tokenizers` library; its own decode is the reference."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from replicas.text.tokenizer import Tokenizer
from tests.prompts import tricky_strings

FAMILIES = ("byte_level", "byte_fallback", "metaspace", "wordpiece", "bpe_suffix", "no_decoder", "slow_bytes")

_PIECES = ["▁", "▁▁", "▁the", "▁a", "a", "b", "é", "▁中", "文", "ة", "ि", "\u0301", "🙂", "\ufffd", "\n", "ing", ".", "</s>x"]


@cache
def small_tokenizer(family: str) -> Tokenizer:
    """A tokenizer with special tokens <s> and </s> (EOS); `slow_bytes` is a Python one with those that it has."""
    if family == "slow_bytes":
        return Tokenizer(ByT5Tokenizer())
    backend = _backend(family)
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))


def _backend(family: str) -> Backend:
    if family == "byte_level":
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
        backend.train_from_iterator(tricky_strings(), trainer)
        return backend
    if family == "byte_fallback":  # as Llama 2
        vocab = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256)), *((piece, -3.0) for piece in _PIECES)]
        backend = Backend(models.Unigram(vocab, unk_id=0, byte_fallback=True))
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        return backend
    if family == "metaspace":  # as T5 and XLM-R
        backend = Backend(models.Unigram([("<unk>", 0.0), *((piece, -3.0) for piece in _PIECES)], unk_id=0))
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
        return backend
    if family == "wordpiece":  # as BERT
        words = ["[UNK]", "the", "cat", "##s", "##ing", ".", ",", "'", "n't", "do", "not", "中", "é", "\u0301", "##\u0301", "!"]
        backend = Backend(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece()
        return backend
    if family == "bpe_suffix":  # as the first GPT and CLIP
        tokens = ["a", "b", "a</w>", "b</w>", "é", "é</w>", ".</w>"]
        backend = Backend(models.BPE({token: index for index, token in enumerate(tokens)}, []))
        backend.decoder = decoders.BPEDecoder()
        return backend
    return Backend(models.WordLevel({"[UNK]": 0, "one": 1, "two": 2, "é": 3}, unk_token="[UNK]"))

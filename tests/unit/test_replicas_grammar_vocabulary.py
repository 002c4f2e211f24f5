"""Vocabularies of several families under a grammar; their own decode is the reference."""

from __future__ import annotations

import json
from typing import Any

import pytest

from replicas.grammar.compiler import GrammarError
from replicas.grammar.llguidance_compiler import LLGuidanceCompiler
from replicas.grammar.vocabulary import special_token_names, without_special_names
from replicas.grammar_spec import GrammarKind, GrammarSpec
from tests.grammar_masks import allowed_tokens
from tests.small_tokenizers import small_tokenizer

CHOICES = ["</s>", "a <s> b", "é文"]


def backend_of(family: str) -> Any:
    return small_tokenizer(family)._backend


def compiler_of(family: str) -> LLGuidanceCompiler:
    backend = backend_of(family)
    return LLGuidanceCompiler(backend.to_str(), backend.get_vocab_size() + 3, {backend.token_to_id("</s>")})


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("family", ["byte_level", "byte_fallback"])
def test_text_with_names_of_special_tokens_is_written_without_them(family: str, choice: str) -> None:
    backend, compiler = backend_of(family), compiler_of(family)
    special = {backend.token_to_id("<s>"), backend.token_to_id("</s>")}
    matcher = compiler.matcher(GrammarSpec(kind=GrammarKind.CHOICE, text=json.dumps([choice])))
    ids: list[int] = []
    while not matcher.must_end:
        allowed = allowed_tokens(matcher, backend.get_vocab_size() + 3)
        assert allowed.isdisjoint(special)
        assert max(allowed) < backend.get_vocab_size()
        ids.append(max(allowed))
        assert matcher.accept(ids[-1])
    assert backend.decode(ids, skip_special_tokens=False) == choice
    compiler.close()


@pytest.mark.parametrize("family", ["metaspace", "wordpiece", "bpe_suffix", "no_decoder"])
def test_tokenizer_without_bytes_is_refused_in_one_line(family: str) -> None:
    compiler = compiler_of(family)
    with pytest.raises(GrammarError, match=r"this model's tokenizer cannot be used with grammars: .*decoder"):
        compiler.matcher(GrammarSpec(kind=GrammarKind.JSON_OBJECT))
    compiler.close()


@pytest.mark.parametrize("family", ["byte_level", "byte_fallback", "wordpiece"])
def test_renaming_changes_special_tokens_alone_and_no_id(family: str) -> None:
    before, after = (json.loads(text) for text in (backend_of(family).to_str(), without_special_names(backend_of(family).to_str())))
    for token, renamed in zip(before["added_tokens"], after["added_tokens"], strict=True):
        assert token["id"] == renamed["id"]
        assert (token["content"] != renamed["content"]) == token["special"]
    assert special_token_names(json.dumps(before)).keys() == {token["id"] for token in before["added_tokens"] if token["special"]}
    assert without_special_names(json.dumps(before)) != json.dumps(after)  # other names each time: nobody can guess them


def test_special_token_within_the_vocabulary_is_renamed_there_too() -> None:
    state = {
        "added_tokens": [{"id": 1, "content": "<end>", "special": True}, {"id": 0, "content": "<tool>", "special": False}],
        "model": {"type": "BPE", "vocab": {"<tool>": 0, "<end>": 1, "a": 2}, "merges": [], "unk_token": "<end>"},
    }
    renamed = json.loads(without_special_names(json.dumps(state)))
    (name,) = {token["content"] for token in renamed["added_tokens"]} - {"<tool>"}
    assert renamed["model"]["vocab"] == {"<tool>": 0, name: 1, "a": 2}
    assert renamed["model"]["unk_token"] == name
    assert name != "<end>"

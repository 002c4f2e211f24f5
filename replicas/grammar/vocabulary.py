"""A tokenizer.json in which text can never become a control token."""

from __future__ import annotations

import json
import secrets
from typing import Any


def without_special_names(tokenizer_json: str) -> str:
    """The tokenizer with its special tokens renamed beyond guessing; all ids stay.

    Hugging Face's tokenizers read the text `<|im_end|>` as the token of that name, and llguidance tokenizes forced text with them: a
    schema with that constant would force the control token instead of ten characters. Processing behind the tokenizing model goes too
    (it adds special tokens that nobody asks for here).
    """
    state = json.loads(tokenizer_json)
    names = {}  # name of a special token -> its new name
    for token in state.get("added_tokens") or ():
        if token["special"]:
            names[token["content"]] = token["content"] = f"<{secrets.token_hex(16)}>"
    _rename(state["model"], names)
    state.update(post_processor=None, truncation=None, padding=None)
    return json.dumps(state)


def special_token_names(tokenizer_json: str) -> dict[int, str]:
    """Id -> name of each special token."""
    tokens = json.loads(tokenizer_json).get("added_tokens") or ()
    return {int(token["id"]): str(token["content"]) for token in tokens if token["special"]}


def _rename(model: dict[str, Any], names: dict[str, str]) -> None:
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): token_id for piece, token_id in vocab.items()}
    elif isinstance(vocab, list):  # unigram: the id is the place
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]

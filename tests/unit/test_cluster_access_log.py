"""The access log: one line of JSON, without text of users unless asked for."""

from __future__ import annotations

import json
import logging

import pytest

from cluster.settings.gateway_config import GatewayConfig
from cluster.telemetry.access_log import log_access
from cluster.telemetry.request_record import RequestRecord
from replicas.text.tokenizer import Tokenizer
from tests.unit.in_process_cluster import MODEL, TEXT, client_of, running_cluster


def record(**fields: object) -> RequestRecord:
    made = RequestRecord(request_id="r", method="POST", path=TEXT, started_s=10.0)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_line_holds_what_was_served_in_milliseconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="manta.access")
    log_access(
        record(status=200, tenant="t", model="m", first_token_s=10.25, finished_s=11.5, finish_reasons=["stop"], replicas=["a", "b"])
    )
    line = json.loads(caplog.messages[0])
    assert (line["ttft_ms"], line["duration_ms"]) == (250.0, 1500.0)
    assert (line["tenant"], line["model"], line["finish_reason"], line["replica"]) == ("t", "m", "stop", "a,b")


def test_pair_that_had_to_begin_anew_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="manta.access")
    log_access(record(recomputes=["prefill_lost", "first_token_differs"]))
    assert json.loads(caplog.messages[0])["recomputes"] == "prefill_lost,first_token_differs"


def test_routine_questions_are_logged_for_debugging_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="manta.access")
    log_access(record(path="/health", status=200))
    assert caplog.messages == []
    log_access(record(path="/health", status=503))
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("log_prompts", [False, True])
async def test_prompt_text_is_logged_only_when_configured(
    default_tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, log_prompts: bool
) -> None:
    caplog.set_level(logging.INFO, logger="manta.access")
    config = GatewayConfig(log_prompts=log_prompts)
    async with running_cluster(default_tokenizer, config=config) as cluster, client_of(cluster) as client:
        await client.post(TEXT, json={"model": MODEL, "prompt": "a secret", "max_tokens": 3})
    logged = [message for name, _, message in caplog.record_tuples if name == "manta.access"]
    assert len(logged) == 1
    assert ("a secret" in logged[0]) is log_prompts

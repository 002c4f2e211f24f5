"""The paths of test data: the repository's own, and public files that a machine may also have."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

OWN_DATA = Path(__file__).resolve().parent / "data"
PUBLIC_DATA = Path(os.environ.get("MANTA_SHARED_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")
"""Folder of the public files below; it need not exist."""

MOONCAKE_CONVERSATION = "traces/mooncake_conversation_trace.jsonl"
MOONCAKE_SYNTHETIC = "traces/mooncake_synthetic_trace.jsonl"
AZURE_CONVERSATION = "traces/azure_llm_2023_conv.csv"
OPENAI_DESCRIPTION = "api/openai_openapi_core.json"
OPENAI_EXAMPLES = "api/openai_examples.jsonl"
MASKBENCH = "json_schema/maskbench_sample.jsonl"
JSON_SCHEMA_SUITE = "json_schema/json-schema-test-suite/tests/draft2020-12/type.json"

_SOURCES = {
    MOONCAKE_CONVERSATION: "FAST25-release/traces/conversation_trace.jsonl of github.com/kvcache-ai/Mooncake",
    MOONCAKE_SYNTHETIC: "FAST25-release/traces/synthetic_trace.jsonl of github.com/kvcache-ai/Mooncake",
    AZURE_CONVERSATION: "data/AzureLLMInferenceTrace_conv.csv of github.com/Azure/AzurePublicDataset",
    OPENAI_DESCRIPTION: "the OpenAPI description of github.com/openai/openai-openapi, as JSON",
    OPENAI_EXAMPLES: "the example exchanges of the same description: path, method, title, request, response",
    MASKBENCH: "maskbench/data of github.com/guidance-ai/jsonschemabench, one JSON object a line: id, schema, tests",
    JSON_SCHEMA_SUITE: "tests/draft2020-12 of github.com/json-schema-org/JSON-Schema-Test-Suite, all its files",
}


def has_public(name: str) -> bool:
    return (PUBLIC_DATA / name).is_file()


def needs_public(name: str) -> pytest.MarkDecorator:
    """Skips a test where the public file is not there, and says what to get and where to put it."""
    reason = f"needs {_SOURCES[name]}, as {name} in ../shared/data or in the folder that MANTA_SHARED_DATA names"
    return pytest.mark.skipif(not has_public(name), reason=reason)

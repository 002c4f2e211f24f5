"""The engine. Names of the offline API are imported on first use, so that bookkeeping modules need no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replicas.grammar_spec import GrammarKind, GrammarSpec
    from replicas.llm import LLM
    from replicas.llm_output import CompletionOutput, RequestOutput
    from replicas.sampling_params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "GrammarKind", "GrammarSpec", "RequestOutput", "SamplingParams"]

_MODULES = {
    "LLM": "replicas.llm",
    "CompletionOutput": "replicas.llm_output",
    "GrammarKind": "replicas.grammar_spec",
    "GrammarSpec": "replicas.grammar_spec",
    "RequestOutput": "replicas.llm_output",
    "SamplingParams": "replicas.sampling_params",
}  # name -> the module that has it


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)

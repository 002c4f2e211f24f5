"""The gate through which every client's grammar goes, before any replica sees it."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from cluster.failures import BadRequest
from cluster.settings.structured_output import StructuredOutputConfig, Unsupported
from replicas.grammar.checking.checks import CheckedGrammar
from replicas.grammar.compiler import GrammarError
from replicas.grammar_spec import GrammarSpec
from replicas.response_format import AskedGrammar


class GrammarChecks(Protocol):
    """Checks grammars within bounds of time and memory, whatever they are."""

    async def admit(self, spec: GrammarSpec, *, tenant: str, drops_unsupported: bool) -> CheckedGrammar:
        """Raises GrammarError for one that cannot be enforced, Unavailable while too many checks wait. With `drops_unsupported` a schema's
        keywords that cannot be enforced are dropped instead."""
        ...


class GrammarGate:
    """One model's rules for grammars, over the checks that all models share."""

    def __init__(self, config: StructuredOutputConfig, checks: GrammarChecks) -> None:
        self._config = config
        self._checks = checks

    async def admit(
        self, asked: AskedGrammar, *, tenant: str, unsupported: Unsupported | None = None, begins_after: str | None = None
    ) -> CheckedGrammar:
        """`unsupported` and `begins_after` are the request's own wishes; an empty `begins_after` means at once. Raises BadRequest naming
        the field, Unavailable."""
        wanted = self._config.begins_after if begins_after is None else begins_after
        spec = replace(asked.spec, begins_after=wanted or None)
        drops = (unsupported or self._config.unsupported) == "warn" and not asked.is_strict
        try:
            return await self._checks.admit(spec, tenant=tenant, drops_unsupported=drops)
        except GrammarError as error:
            raise BadRequest(f"Invalid value for '{asked.param}': {error}.", param=asked.param, code="invalid_grammar") from error

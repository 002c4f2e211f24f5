"""Checks of grammars without any compiler."""

from __future__ import annotations

from dataclasses import replace

from cluster.failures import Unavailable
from replicas.grammar.checking.checks import CheckedGrammar
from replicas.grammar.compiler import GrammarError
from replicas.grammar_spec import GrammarSpec

DROPPED = ("#/properties/größe/uniqueItems", "#/not")


class FakeGrammarChecks:
    """Refuses texts with "refused" in them, is busy at "busy", and drops `DROPPED` from texts with "reducible" where it may."""

    def __init__(self) -> None:
        self.asked: list[tuple[GrammarSpec, str, bool]] = []

    async def admit(self, spec: GrammarSpec, *, tenant: str, drops_unsupported: bool) -> CheckedGrammar:
        self.asked.append((spec, tenant, drops_unsupported))
        if "busy" in spec.text:
            raise Unavailable("The checks of grammars are busy.", retry_after_s=3.2)
        if "reducible" in spec.text and drops_unsupported:
            return CheckedGrammar(spec=replace(spec, text="{}"), dropped=DROPPED)
        if "refused" in spec.text or "reducible" in spec.text:
            raise GrammarError("#/items/uniqueItems cannot be enforced")
        return CheckedGrammar(spec=spec)

"""What becomes of a client's grammar before any engine sees it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from replicas.grammar.checking.limits import GrammarLimits, check_regex, check_sizes
from replicas.grammar.checking.reduction import Reduction, described
from replicas.grammar.checking.schema_checks import check_schema, parse_schema
from replicas.grammar.checking.trial import Trial
from replicas.grammar.compiler import GrammarError
from replicas.grammar.languages.structural_tags import parse_tags
from replicas.grammar.llguidance_text import grammar_text, lark_of_gbnf, parse_choices, refusal
from replicas.grammar_spec import GrammarKind, GrammarSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedGrammar:
    """A grammar that can be compiled and enforced."""

    spec: GrammarSpec
    """The client's, or what is left of it without `dropped`."""
    dropped: tuple[str, ...] = ()
    """Keywords of the client's schema that are not enforced, each with its path."""


class GrammarChecker:
    """Checks grammars, one at a time. A check may take any time and memory, and an overflow of the stack ends the process: clients'
    grammars are checked in processes that may be killed (cluster/grammar), on a big stack."""

    def __init__(self, limits: GrammarLimits | None = None) -> None:
        self._limits = limits or GrammarLimits()
        self._trial = Trial()

    def checked(self, spec: GrammarSpec, *, drops_unsupported: bool = False) -> CheckedGrammar:
        """Raises GrammarError: one line that names the fault and, in a schema, keyword and path.

        `drops_unsupported`: a JSON schema loses the keywords that cannot be enforced instead.
        """
        check_sizes(spec, self._limits)
        dropped: tuple[str, ...] = ()
        match spec.kind:
            case GrammarKind.JSON_SCHEMA:
                spec, dropped = self._checked_schema(spec, drops_unsupported)
            case GrammarKind.REGEX:
                check_regex(spec.text, self._limits, "the regex")
            case GrammarKind.CHOICE:
                self._check_choices(spec)
            case GrammarKind.STRUCTURAL_TAG:
                for tag in parse_tags(spec.text):
                    check_schema(parse_schema(json.dumps(tag.schema), self._limits), self._limits)
            case GrammarKind.GBNF:
                # Converted once, here: the conversion would hold up an engine.
                spec = replace(spec, kind=GrammarKind.LARK, text=lark_of_gbnf(spec.text))
        reason = self._trial.refusal(grammar_text(spec))
        if reason is not None:
            raise GrammarError(reason)
        return CheckedGrammar(spec=spec, dropped=dropped)

    def _checked_schema(self, spec: GrammarSpec, drops_unsupported: bool) -> tuple[GrammarSpec, tuple[str, ...]]:
        schema = parse_schema(spec.text, self._limits)
        check_schema(schema, self._limits)
        reason = refusal(grammar_text(spec))
        if reason is None:
            return spec, ()

        def refused(part: dict[str, Any]) -> str | None:
            return refusal(grammar_text(replace(spec, text=json.dumps(part))))

        reduction = Reduction(refused)
        if not drops_unsupported:
            raise GrammarError(reduction.explained(schema, reason))
        reduced, dropped = reduction.reduced(schema, reason)
        return replace(spec, text=json.dumps(reduced)), described(dropped)

    def _check_choices(self, spec: GrammarSpec) -> None:
        for choice in parse_choices(spec.text):
            num_bytes = len(choice.encode())
            if num_bytes > self._limits.max_literal_bytes:
                raise GrammarError(f"a choice must be at most {self._limits.max_literal_bytes} bytes, got {num_bytes}")

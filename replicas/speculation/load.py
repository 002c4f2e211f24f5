"""From the configuration to proposers."""

from __future__ import annotations

from replicas.model.rank_model import RankModel
from replicas.speculation.ngram import NgramProposer
from replicas.speculation.prediction import PredictionProposer
from replicas.speculation.proposer import Proposer
from replicas.speculation.suffix import SuffixProposer
from replicas.speculation_config import SpeculationConfig


def load_proposers(config: SpeculationConfig, rank: RankModel) -> list[Proposer]:
    """The proposers of an engine in the order in which they are asked; none if speculation is off.

    `rank` is the target; its runner is made afterwards, and may take over its weights. Raises ValueError with one line that names the fix.
    """
    if config.method == "none":
        return []
    proposers: list[Proposer] = [PredictionProposer()]
    if config.method == "ngram":
        proposers.append(NgramProposer())
    elif config.method in ("suffix", "auto"):
        proposers.append(SuffixProposer(config.max_suffix_tokens))
    else:
        raise ValueError(f"speculation method {config.method!r} is not supported by this version; use 'auto', 'suffix' or 'ngram'")
    if config.method == "auto" and config.model:
        raise ValueError(f"speculation model {config.model!r} is of no method that this version supports; leave it out")
    return proposers

"""From the configuration to proposers."""

from __future__ import annotations

from replicas.model.rank_model import RankModel
from replicas.speculation.drafting.load import Drafting
from replicas.speculation.ngram import NgramProposer
from replicas.speculation.prediction import PredictionProposer
from replicas.speculation.proposer import Proposer
from replicas.speculation.suffix import SuffixProposer
from replicas.speculation_config import SpeculationConfig


def load_proposers(config: SpeculationConfig, rank: RankModel, drafting: Drafting | None) -> list[Proposer]:
    """The proposers of an engine in the order in which they are asked; none if speculation is off. `drafting` is `read_drafting` of the
    configuration.

    `rank` is the target; its runner is made afterwards, and may take over its weights. Raises ValueError with one line that names the fix.
    """
    if config.method == "none":
        return []
    proposers: list[Proposer] = [PredictionProposer()]
    if config.method == "ngram":
        proposers.append(NgramProposer())
    elif config.method in ("suffix", "auto"):
        proposers.append(SuffixProposer(config.max_suffix_tokens))
    if drafting is not None:
        proposers.append(drafting.proposer(rank))
    return proposers

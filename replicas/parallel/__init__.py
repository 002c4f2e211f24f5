"""One model over several ranks: who holds what, how they talk, and how they live and die together."""

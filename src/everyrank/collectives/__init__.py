"""What ranks tell each other outside the timed steps. Each works in a world of one, too."""

from everyrank.collectives.gather import all_equal, exchange, fingerprint, from_rank, gather, sum_over_ranks

__all__ = ["all_equal", "exchange", "fingerprint", "from_rank", "gather", "sum_over_ranks"]

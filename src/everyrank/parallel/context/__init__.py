"""Context parallel: every rank holds the whole model and a part of each sequence; attention reaches over all of them.

    sequence   │ 0 │ 1 │ 2 │ 3 │        2 ranks, 4 chunks: a head and a tail each, so that a causal mask
    rank         0   1   1   0          leaves all ranks the same work

Holds     parameters, gradients and optimizer state in full; of activations the part of its positions
Travels   per micro-batch and attention, with N ranks: forward N-1 times keys and values to the next rank, backward N-1
          times keys and values and N times their gradients (method=ring); or four all-to-alls forward and four
          backward (method=ulysses: query, key, value, output). Per update one all-reduce of the gradients, in buckets,
          overlapped with backward; the count of loss terms rides in it as two more elements
Use when  sequences are too long for one device: activations, not parameters, are what does not fit
Exact     yes, where positions are a part of the input and only attention looks from one position at another
Source    Liu, Zaharia and Abbeel 2023 (ring); Jacobs et al. 2023 (Ulysses); Brandon et al. 2023 (head and tail)

Keys: method=ring or ulysses (then the heads have to divide by the ranks). `Workload.sequence_dim` says which dimension
of the input is the sequence.
"""

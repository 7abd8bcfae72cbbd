"""Context parallel: every rank holds the whole model and a part of each sequence; attention spans all parts.

    sequence   │ 0 │ 1 │ 2 │ 3 │        2 ranks, 4 chunks: a head and a tail each, so that a causal mask
    rank         0   1   1   0          leaves all ranks the same work

Memory         parameters, gradients and optimizer state in full; activations only for its positions
Communication  per micro-batch and attention, with N ranks: forward N-1 times keys and values to the next rank, backward
               N-1 times keys and values and N times their gradients (method=ring); or four all-to-alls forward and four
               backward (method=ulysses: query, key, value, output). Per update one all-reduce of the gradients, in
               buckets, overlapped with backward; and the loss's (sum, count) as two more elements
Use when       the activations of long sequences do not fit on one device
Exact          yes, if positions are a part of the input and only attention combines different positions
Source         Liu, Zaharia and Abbeel 2023 (ring); Jacobs et al. 2023 (Ulysses); Brandon et al. 2023 (head and tail)

Keys: method=ring or ulysses (which needs a multiple of the ranks as heads). `Workload.sequence_dim` is the dimension
of the sequence in the input.
"""

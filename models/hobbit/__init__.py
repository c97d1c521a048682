"""Experts in two precisions, and a cache of them beside a larger memory (HOBBIT, Tang et al. 2024, arXiv:2411.01433).

The paper's code is not published. So thresholds, the scores of the cache and the reach of prefetching are ours; each says so.

- `tiers`: which precision a token's experts have, by their gates, and matrices that are kept in both.
- `cache`: which experts lie on the device, as a pure state machine. No decoding step uses it; it counts bytes.
- `routing`: which experts the tokens of a text chose, and which their gates foretold.
"""

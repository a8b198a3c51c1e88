"""The commands of `lit-layers`, and the codes that they end with."""

FAILED, REFUSED, DIVERGED, INTERRUPTED, READER_GONE, TERMINATED = 1, 2, 3, 130, 141, 143

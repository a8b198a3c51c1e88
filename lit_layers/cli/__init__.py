"""The commands of `lit-layers`, and the codes that they end with."""

FAILED, REFUSED, DIVERGED, INTERRUPTED, TERMINATED = 1, 2, 3, 130, 143

"""The `lit-layers` command line and its exit codes."""

FAILED, REFUSED, DIVERGED, INTERRUPTED, READER_GONE, TERMINATED = 1, 2, 3, 130, 141, 143

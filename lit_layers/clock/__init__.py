"""The emergence clock: when each metric of a run changes, in which order, and with what certainty."""

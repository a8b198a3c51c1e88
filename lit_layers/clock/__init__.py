"""The emergence clock: when each number of a run changes, in which order, and how sure that is."""

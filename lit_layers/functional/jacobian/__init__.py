"""Block Jacobians: how they are computed, by reverse mode and by a faster route."""

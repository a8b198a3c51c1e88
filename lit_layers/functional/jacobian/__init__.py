"""Block Jacobians, by reverse mode and by a faster route."""

"""Jacobians of transformer blocks between tokens, by reverse mode and by a faster route that is also exact."""

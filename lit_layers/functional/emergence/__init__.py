"""Emergence of a curve over training steps: whether and when, from samples of the posterior given its values."""

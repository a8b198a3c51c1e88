"""Decide whether and when a metric emerges in training, from random curves drawn through its noisy values."""

"""Probes of features: logistic and linear regressions of all layers at once, and one that chooses among tokens."""

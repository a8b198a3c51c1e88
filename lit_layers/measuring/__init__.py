"""Analyses on models: at once, on one checkpoint, on a series, over machines, and what that will cost."""

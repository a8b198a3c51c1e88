"""Probes of each layer: for labels, next tokens and downstream tasks."""

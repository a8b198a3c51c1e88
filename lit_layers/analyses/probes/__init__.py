"""Probes: what can be read off each layer, on rows with labels, next tokens or downstream tasks."""

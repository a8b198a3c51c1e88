"""Metrics: pure functions from tensors to tensors. Import them from their modules."""

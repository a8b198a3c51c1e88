"""Fronts of the package for trainers of other libraries."""

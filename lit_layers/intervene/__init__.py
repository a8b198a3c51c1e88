"""Models whose blocks run in another order: what tasks, speed and training make of them."""

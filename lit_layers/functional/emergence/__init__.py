"""Whether and when a curve over training steps emerges, from curves drawn from the posterior given its values."""

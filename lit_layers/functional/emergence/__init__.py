"""Whether and when a curve over training steps emerges, from random curves drawn given its noisy values."""

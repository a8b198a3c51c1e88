"""When a curve over training steps emerges: verdict and times, from curves drawn from a posterior given its values."""

"""When a curve over training steps emerges: verdict and times, from curves drawn given its values."""

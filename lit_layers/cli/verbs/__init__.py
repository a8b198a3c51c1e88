"""The commands of `lit-layers`, a file each: a function whose signature and docstring are its options."""

"""The commands of `lit-layers`: one module each, with a function whose signature and docstring define the options."""

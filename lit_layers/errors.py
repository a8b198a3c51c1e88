"""The one exception that means: the user's input is at fault."""


class InputError(ValueError):
    """Raised for input that only the user can mend: a field, a file, a folder, a combination of options.

    Its message is one sentence: what was expected, what came (field and value), what to do. The command line
    prints that sentence and exits with code 2, without a traceback.
    """

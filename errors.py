"""The one exception that means «your input is wrong», so that the CLI can tell it from a bug.

The message names what was found, what was wanted and the way out, in one sentence.
"""


class InputError(ValueError):
    """Bad input from the user: the CLI prints the message alone and exits with status 1."""

"""The one exception that a person is meant to read."""


class UserError(Exception):
    """A mistake in what was asked for, or a bad file.

    The message is one sentence that says what is wrong and how to mend it. The command line
    prints it without a traceback (``kaiyuan --debug`` shows that) and exits with code 2.
    """

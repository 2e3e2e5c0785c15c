"""What bad input gets: one sentence that names the key, says what is wrong and ends in what to type instead."""


class Refusal(Exception):
    """Bad input. Its text is the whole message: no traceback is shown for it."""

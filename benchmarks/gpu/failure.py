"""What a failure says."""


def text_of(error: BaseException) -> str:
    """Return what an error says; of a group, what its first error says."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}".removesuffix(": ")

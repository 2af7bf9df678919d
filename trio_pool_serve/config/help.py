"""Descriptions of options that are not settings of the server, for ``--help``."""

from cyclopts import Parameter


def help_(text: str, *, default: str | None = None, negative: tuple[()] | None = None) -> Parameter:
    """Return the parameter of an option; ``default`` describes a default whose value alone is unclear."""
    return Parameter(help=text, negative=negative, show_default=default and (lambda _: default))


def switch(text: str) -> Parameter:
    """Return the parameter of a flag that has no ``--no-`` form."""
    return help_(text, negative=())

"""Messages for arguments that are wrong: the place of the value, the value, and the accepted values."""

from collections.abc import Mapping
from typing import Any, get_args

from cyclopts import (
    Argument,
    CoercionError,
    MissingArgumentError,
    Token,
    UnknownOptionError,
    UnusedCliTokensError,
    ValidationError,
)
from cyclopts.exceptions import UnknownCommandError

from trio_pool_serve.config.setting import did_you_mean, plain_message

ACCEPTED: Mapping[Any, str] = {bool: "true or false", int: "a whole number", float: "a number"}


def usage_message(error: Exception) -> str:
    """Return the message for the user of an error in arguments or settings."""
    match error:
        case UnknownOptionError(token=token, argument_collection=arguments):
            flag = (token.keyword or token.value).partition("=")[0]
            known = [name for argument in arguments if argument.show for name in argument.names]
            return f"Unknown flag {flag}{did_you_mean(flag, known, '; --help-all lists all flags.')}"
        case UnknownCommandError(unused_tokens=[name, *_] as tokens, app=app):
            commands = [each for each in app or () if not each.startswith("-")]
            model = " ".join(tokens).removeprefix("--model-id").lstrip(" =")
            serve = f" To serve a model: trio-pool-serve serve {model}" if "serve" in commands else ""
            return f"Unknown command {name}{did_you_mean(name, commands, f'; --help lists all commands.{serve}')}"
        case UnusedCliTokensError(unused_tokens=[value, *_]):
            return f"Unexpected argument `{value}`."
        case MissingArgumentError(argument=argument, keyword=None) if argument is not None:
            return f"{argument.name if argument.index is None else argument.name.lstrip('-').upper()} is missing."
        case MissingArgumentError(keyword=flag):
            return f"{flag} needs a value."
        case CoercionError(token=Token() as token, argument=Argument() as argument):
            return _wrong_value(error, token, argument)
        case ValidationError():
            return error.exception_message
        case ValueError():
            return plain_message(error)
        case _:
            return str(error)


def _wrong_value(error: CoercionError, token: Token, argument: Argument) -> str:
    place = token.keyword or argument.name.lstrip("-").upper()
    if place.startswith("["):  # a key of the TOML file
        place = f"{token.source}: {place.strip('[]')}"
    if error.msg is not None:
        return f"{place}: {error.msg}"
    choices = ", ".join(map(str, get_args(error.target_type)))
    accepted = f"accepted: {choices}" if choices else f"it must be {ACCEPTED.get(error.target_type, 'a text')}"
    return f"{place} is `{token.value}`; {accepted}."

"""The limit on how many inputs, messages and parts one request may have."""

from collections.abc import Sized

from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.errors import InvalidRequestError


def require_few(inputs: Sized, network: NetworkConfig, *, param: str) -> None:
    """Raise ``InvalidRequestError`` for more inputs than ``--max-inputs-per-request``."""
    require_few_parts(len(inputs), "inputs", network, param)


def require_few_parts(count: int, what: str, network: NetworkConfig, param: str) -> None:
    """Raise ``InvalidRequestError`` for more than a request may have inputs: each costs as much as one."""
    if count > network.max_inputs_per_request:
        raise InvalidRequestError(
            f"{count} {what} are more than the {network.max_inputs_per_request} that a request may have "
            "(--max-inputs-per-request).",
            param=param,
        )

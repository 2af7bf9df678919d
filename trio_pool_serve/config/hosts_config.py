"""Settings of engines on other machines."""

from pathlib import Path
from typing import Annotated

from attrs import field, frozen
from attrs.validators import matches_re
from cyclopts import Group, Parameter

from trio_pool_serve.config.help import help_

ZONE = r"[A-Za-z0-9._-]{0,63}"
"""As the values of Kubernetes labels."""


@Parameter(name="*", group=Group("Engines on other machines", sort_key=4))
@frozen(kw_only=True)
class HostsConfig:
    """Which engines on other machines are used, and how."""

    engine_hosts: Annotated[
        str,
        help_(
            "Engines on other machines, each started by `trio-pool-serve engine`: `HOST:PORT,HOST:PORT`, or a file "
            "with one in each line, which SIGHUP has read again. A name with several addresses stands for an engine at "
            "each. They compute alone, or beside local ones with `--engine process`.",
            default="none",
        ),
    ] = ""
    key_file: Annotated[
        Path | None,
        help_(
            "File with the secret key, of at least 32 characters, that proves an engine and this server to each other. "
            "In place of one key it may have several lines: the first is used, and the others are accepted too. SIGHUP "
            "has it read again.",
            default="none",
        ),
    ] = None
    zone: Annotated[
        str,
        help_("The zone of this process: inputs go to engines of other zones only if that is faster.", default="none"),
    ] = field(default="", validator=matches_re(ZONE))

"""Settings of engines on other machines."""

from pathlib import Path
from typing import Annotated

from attrs import field, frozen

from trio_pool_serve.config.setting import Setting, matches

ZONE = r"[A-Za-z0-9._-]{0,63}"
"""As the values of Kubernetes labels."""


@frozen(kw_only=True)
class HostsConfig:
    """Which engines on other machines are used, and how."""

    engine_hosts: Annotated[
        str,
        Setting(
            "Engines on other machines: `HOST:PORT,HOST:PORT`, or a file with one in each line. `trio-pool-serve "
            "engine` starts one. A name with several addresses stands for an engine at each. Send SIGHUP to reload the "
            "file. They compute alone, or beside local ones with `--engine process`.",
            default="none",
        ),
    ] = ""
    key_file: Annotated[
        Path | None,
        Setting(
            "File with the secret key, of at least 32 characters, by which an engine and this server know each other. "
            "If it has several lines, the first key is used, and the others are accepted, too. Send SIGHUP to reload "
            "the file.",
            default="none",
        ),
    ] = None
    zone: Annotated[
        str,
        Setting(
            "The zone of this process: inputs go to engines of other zones only after waiting for 50 ms.",
            default="none",
        ),
    ] = field(default="", validator=matches(ZONE, "a zone: up to 63 letters, digits, `.`, `_` and `-`"))

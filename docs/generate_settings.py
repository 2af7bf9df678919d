"""Writes docs/settings.md from the classes that declare the settings: ``python docs/generate_settings.py``."""

from pathlib import Path
from typing import get_args, get_type_hints

import attrs
from cyclopts import Parameter

from trio_pool_serve.cli import ENVIRONMENT_PREFIX
from trio_pool_serve.config import Config

TARGET = Path(__file__).parent / "settings.md"

HEAD = f"""# Settings

Made by `docs/generate_settings.py` from `trio_pool_serve/config.py`. Each is a flag of `trio-pool-serve serve`, an
environment variable (`{ENVIRONMENT_PREFIX}` and the name in capitals) and a key of the TOML file that `--config` or
`{ENVIRONMENT_PREFIX}CONFIG` names. Flags win over variables, and those over the file.
"""


def settings_page() -> str:
    """Return the page."""
    parts = [HEAD]
    for group in attrs.fields(Config):
        if not attrs.has(group.type):
            continue
        title = group.type.__name__.removesuffix("Config")
        parts.append(f"\n## {title}\n{group.type.__doc__}\n\n| flag | default | meaning |\n| --- | --- | --- |\n")
        hints = get_type_hints(group.type, include_extras=True)
        for setting in attrs.fields(group.type):
            (parameter,) = (extra for extra in get_args(hints[setting.name])[1:] if isinstance(extra, Parameter))
            meaning, _, default = parameter.help.removesuffix("]").partition(" [default: ")
            shown = default or (
                {False: "off", True: "on"}[setting.default]
                if isinstance(setting.default, bool)
                else f"`{setting.default}`"
            )
            parts.append(f"| `--{setting.name.replace('_', '-')}` | {shown} | {meaning} |\n")
    return "".join(parts)


if __name__ == "__main__":
    TARGET.write_text(settings_page())

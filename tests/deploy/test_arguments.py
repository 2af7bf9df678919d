"""The commands accept the arguments that pods give them."""

import pytest

from tests.deploy.manifests import VARIANTS, needs_tools, rendered
from trio_pool_serve.command_line.server_commands import read_settings

pytestmark = needs_tools


def arguments(zone: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for manifest in (manifest for variant in VARIANTS for manifest in rendered(variant)):
        if manifest["kind"] == "Deployment":
            (container,) = manifest["spec"]["template"]["spec"]["containers"]
            given = [argument.replace("$(ZONE)", zone) for argument in container["args"]]
            assert found.setdefault(given[0], given) == given
    return found


@pytest.mark.parametrize("zone", ["", "europe-west4-a"])
@pytest.mark.parametrize("command", ["serve", "engine"])
def test_the_commands_accept_the_arguments_of_pods(command, zone):
    given = arguments(zone)
    assert set(given) == {"serve", "engine"}
    settings = read_settings(command, given[command][1:])
    assert (settings if command == "serve" else settings.config).hosts.zone == zone

"""Machines made of network namespaces: each has interfaces of its own, and a cable to the other that can be cut."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from attrs import define

API, ENGINE = "10.213.77.1", "10.213.77.2"
"""Addresses in a network of their own, which no other namespace can reach."""


@define
class Machines:
    """Two namespaces, by name, and the interface of each."""

    api: str
    engine: str

    def command_on(self, namespace: str, *command: str) -> list[str]:
        return ["ip", "netns", "exec", namespace, *command]

    def cut(self) -> None:
        """Cut the cable: what is sent from now on is lost, and neither end is told."""
        ip("-n", self.engine, "link", "set", "cable", "down")

    def mend(self) -> None:
        ip("-n", self.engine, "link", "set", "cable", "up")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def two_machines() -> Iterator[Machines]:
    """Make two machines with a cable between them; skip the test where the kernel forbids it."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` here")
    machines = Machines(f"tps-{os.getpid()}-api", f"tps-{os.getpid()}-engine")
    try:
        ip("netns", "add", machines.api)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"the kernel forbids network namespaces: {error.stderr.decode().strip()}")
    try:
        ip("netns", "add", machines.engine)
        peer = ("peer", "name", "cable", "netns", machines.engine)
        ip("-n", machines.api, "link", "add", "cable", "type", "veth", *peer)
        for namespace, address in ((machines.api, API), (machines.engine, ENGINE)):
            ip("-n", namespace, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", namespace, "link", "set", "cable", "up")
            ip("-n", namespace, "link", "set", "lo", "up")
        yield machines
    finally:
        for namespace in (machines.api, machines.engine):
            subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)

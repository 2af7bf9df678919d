"""Programs of Debian's packages that tests run: a browser, proxies, Prometheus. `scripts/test` installs them."""

import grp
import os
import pwd
import shutil
from pathlib import Path

import pytest

CHROMIUM_FLAGS = [
    "--no-sandbox",  # tests run as root in CI
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

NGINX = """
daemon off;
user {user} {group};
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/nginx-error.log;
events {{ }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/site.conf;
}}
"""
"""Around a site: what a distribution's own nginx.conf has, with paths of a test."""


def debian_program(name: str) -> str:
    """Return the path of an installed program; skip the test where there is none, except in CI."""
    path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if path is None:
        if os.environ.get("CI"):
            pytest.fail(f"{name} is not installed, though scripts/test installs it")
        pytest.skip(f"{name} is not installed")
    return path


def nginx_command(folder: Path, site: str) -> list[str]:
    """Return the command that runs nginx with a site, whose configuration is written into a folder of the test."""
    user, group = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(os.getgid()).gr_name
    (folder / "site.conf").write_text(site)
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder, user=user, group=group))
    return [debian_program("nginx"), "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", "stderr"]

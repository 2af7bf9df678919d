"""``--help`` is short, ``--help-all`` has every setting, and neither breaks a word."""

import io
import re

import attrs
import pytest
from rich.console import Console

from trio_pool_serve.cli import make_app
from trio_pool_serve.command_line.flags import COMMON, GROUPS
from trio_pool_serve.config import Config

pytestmark = pytest.mark.unit
SETTINGS = [setting.name for group in GROUPS for setting in attrs.fields(attrs.fields_dict(Config)[group].type)]


def help_of(*, shows_all: bool, columns: int = 80) -> str:
    written = io.StringIO()
    make_app(shows_all=shows_all).help_print(["serve"], console=Console(file=written, width=columns))
    return written.getvalue()


def flags_in(text: str) -> list[str]:
    """Return the names of settings at the beginnings of lines, in their order."""
    return [flag.replace("-", "_") for flag in re.findall(r"^  --(?:\[no-\])?([\w-]+)", text, re.MULTILINE)]


def test_no_more_than_sixty_two_settings_face_whoever_starts_a_server():
    assert len(SETTINGS) + len(["models"]) <= 62


def test_the_short_help_fits_on_a_screen_of_sixty_lines():
    shown = help_of(shows_all=False)
    lines = shown.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80
    assert set(flags_in(shown)) == {*COMMON, "config"}
    assert "--help-all" in shown


def test_the_long_help_has_every_setting_in_the_order_of_the_groups():
    groups = [field.name for field in attrs.fields(Config) if attrs.has(field.type) and field.name != "tables"]
    assert list(GROUPS) == groups
    assert len(GROUPS) == len(set(GROUPS.values()))
    shown = help_of(shows_all=True)
    assert [flag for flag in flags_in(shown) if flag != "config"] == SETTINGS
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_no_word_is_broken_whatever_the_width(columns):
    narrow, wide = (set(help_of(shows_all=True, columns=width).split()) for width in (columns, 120))
    assert narrow == wide

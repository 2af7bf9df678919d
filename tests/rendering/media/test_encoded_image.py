"""Images within URLs, and in files."""

import base64
import os
import tracemalloc
from pathlib import Path

import pytest

from tests.rendering.media.images import data_url, encoded
from trio_pool_serve.errors import InvalidRequestError, MediaError
from trio_pool_serve.rendering.media.encoded_image import BASE64_SLICE, read_data_url, read_file_url

pytestmark = pytest.mark.unit
IMAGE = encoded()
LIMIT = 2**20


@pytest.mark.parametrize("media_type", ["image/png", "image/jpeg", "text/plain;charset=utf-8", ""])
def test_the_media_type_is_not_believed(media_type):
    assert read_data_url(data_url(IMAGE, media_type), LIMIT) == IMAGE
    assert read_data_url(data_url(IMAGE, media_type).replace("data:", "DATA:").replace("base64", "BASE64"), LIMIT)


SLICE = BASE64_SLICE // 4 * 3
"""Bytes that are decoded per call."""


@pytest.mark.parametrize("length", [0, 1, 2, 3, SLICE - 1, SLICE, SLICE + 1, 2 * BASE64_SLICE])
def test_base64_of_any_length_is_decoded(length):
    content = os.urandom(length)
    assert read_data_url(data_url(content), 4 * BASE64_SLICE) == content


@pytest.mark.parametrize(
    "url", ["data:,hello", "data:image/png,hello", "data:image/png;base64", "data:", "data:" + "x" * 999]
)
def test_a_data_url_without_base64_is_not_allowed(url):
    with pytest.raises(InvalidRequestError, match="base64"):
        read_data_url(url, LIMIT)


FORGIVEN = {
    "aa": b"i",
    "ab": b"i",
    "aaa": b"i\xa6",
    "aa\n==": b"i",
    " \t\r\n\faa a\r\na ": b"i\xa6\x9a",
    "aa-_": b"i\xaf\xbf",
    "-_+/": b"\xfb\xff\xbf",
    "aaa%3D": b"i\xa6",
    "aa%2b%2F": b"i\xaf\xbf",
    "%61aa%0D%0Aa": b"i\xa6\x9a",
    "%20": b"",
}


@pytest.mark.parametrize("payload", FORGIVEN)
@pytest.mark.parametrize("header", ["data:;base64", "data:image/png; base64", "data:image/png;BASE64 "])
def test_base64_is_decoded_as_browsers_decode_it(header, payload):
    assert read_data_url(f"{header},{payload}", LIMIT) == FORGIVEN[payload]


def test_base64_in_lines_is_decoded_in_several_pieces():
    content = os.urandom(2 * SLICE + 1)
    lines = base64.encodebytes(content).decode()
    assert read_data_url(f"data:;base64,{lines}", len(content)) == content
    assert read_data_url(f"data:;base64,{lines.replace('+', '%2B')}", len(content)) == content
    with pytest.raises(MediaError, match="larger than"):
        read_data_url(f"data:;base64,{lines}", len(content) - 1)


WRONG = ["a", "aaaa=", "aa=", "aa=a", "aa==aa==", "a b=", "aaa\v", "ä" * 4, "%C3%A4aa", "====", "aaaa,aaaa", "aaaaa"]
WRONG += ["aaa%", "aaa%3", "aaa%zz", "aaa%253D", "aaa\0", "a\xa0aa"]
PADDED = f"{'a' * (BASE64_SLICE - 2)}==aaaa"
"""With padding where the decoder begins anew."""


@pytest.mark.parametrize("wrong", [*WRONG, PADDED], ids=lambda wrong: wrong[:9])
def test_base64_that_browsers_do_not_decode_is_refused(wrong):
    with pytest.raises(MediaError, match="not valid base64"):
        read_data_url(f"data:;base64,{wrong}", LIMIT)


def test_base64_of_too_many_bytes_is_refused_before_it_is_decoded():
    assert len(read_data_url(data_url(bytes(100)), 100)) == 100
    for length in (101, 102, 10_000_000):
        url = data_url(bytes(length))
        tracemalloc.start()
        with pytest.raises(MediaError, match="larger than 100 bytes"):
            read_data_url(url, 100)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 100_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "allowed"
    for path in ("allowed/image.png", "allowed/ä b%.png", "secret.png", "allowed too/image.png"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(IMAGE)
    return folder


def test_files_in_the_folder_are_read(folder):
    (folder / "inner").mkdir()
    (folder / "inner" / "link.png").symlink_to(folder / "image.png")
    (folder.parent / "link").symlink_to(folder)
    for path in ("image.png", "ä b%.png", "inner/link.png"):
        assert read_file_url((folder / path).as_uri(), folder, LIMIT) == IMAGE
    assert read_file_url(f"file://localhost{folder}/inner/../image.png", folder, LIMIT) == IMAGE
    for link in (folder, folder.parent / "link"):  # by which the allowed folder may be named
        assert read_file_url((link / "image.png").as_uri(), folder.parent / "link", LIMIT) == IMAGE


OUTSIDE = {
    "another": "/../secret.png",
    "one that is not there": "/../nothing.png",
    "upwards in disguise": "/%2e%2e/secret.png",
    "another folder that begins alike": " too/image.png",
    "a link": "/link.png",
    "a folder that is a link": "/up/secret.png",
    "the folder": "",
}


def test_files_elsewhere_are_refused_alike_be_they_there_or_not(folder):
    (folder / "link.png").symlink_to(folder.parent / "secret.png")
    (folder / "up").symlink_to(folder.parent)
    urls = [f"file://{folder}{rest}" for rest in OUTSIDE.values()]
    for url in (*urls, f"file://{folder.parent}/secret.png", "file:///etc/passwd", "file:///proc/self/environ"):
        with pytest.raises(
            InvalidRequestError,
            match=r"^The file of the image is outside the permitted folder \(--allowed-media-path\)\.$",
        ):
            read_file_url(url, folder, LIMIT)
    with pytest.raises(InvalidRequestError, match="This server reads no images from files"):
        read_file_url((folder / "image.png").as_uri(), None, LIMIT)


@pytest.mark.parametrize("url", ["file:image.png", "file:", "file://host/image.png", "file:///a%00b", "file://[/a"])
def test_file_urls_must_have_an_absolute_path(folder, url):
    with pytest.raises(InvalidRequestError, match="absolute path"):
        read_file_url(url, folder, LIMIT)


def test_only_plain_files_are_read_and_nothing_is_waited_for(folder):
    os.mkfifo(folder / "pipe")
    (folder / "inner").mkdir()
    (folder / "loop").symlink_to(folder / "loop")
    plain = "not a regular file"
    for path, told in {"pipe": plain, "inner": plain, "nothing": "read", "loop": "read", "/dev/zero": plain}.items():
        with pytest.raises(MediaError, match=told):
            read_file_url((folder / path).as_uri(), Path("/dev") if path == "/dev/zero" else folder, LIMIT)


def test_a_file_of_too_many_bytes_is_refused_whatever_it_says_of_its_length(folder):
    """Files of the system have a length of 0, whatever is in them."""
    (folder / "large.png").write_bytes(bytes(11))
    for path, allowed in ((folder / "large.png", folder), (Path("/proc/version"), Path("/proc"))):
        with pytest.raises(MediaError, match="larger than 10 bytes"):
            read_file_url(path.as_uri(), allowed, 10)

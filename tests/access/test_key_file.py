"""Files of API keys: what is understood, and that no message quotes a key."""

from hashlib import sha256
from pathlib import Path

import pytest

from trio_pool_serve.access.key_file import ApiKey, digest_of, read_key_file, warn_of_readers

pytestmark = pytest.mark.unit

KEY = "SECRET-KEY"
DIGEST = sha256(KEY.encode()).hexdigest()


def read(tmp_path: Path, text: str | bytes) -> dict[bytes, ApiKey]:
    path = tmp_path / "keys.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(0o600)
    return read_key_file(path, ["minilm", "bge"])


def test_a_table_is_a_key_with_its_limits(tmp_path):
    limits = {
        "requests_per_minute": 600,
        "tokens_per_minute": 1_000_000,
        "max_concurrent_requests": 8,
        "max_body_bytes": 1048576,
        "may_outrank": True,
        "admin": True,
    }
    written = "".join(f"{name} = {str(value).lower()}\n" for name, value in limits.items())
    of_other = f'[indexing-2]\nsha256 = "{sha256(b"other").hexdigest().upper()}"\nmodels = ["bge"]\n'
    keys = read(tmp_path, f'[search]\nkey = "{KEY}"\n{of_other}{written}')
    assert keys[digest_of(KEY)] == ApiKey(name="search")
    assert keys[digest_of("other")] == ApiKey(name="indexing-2", models=frozenset({"bge"}), **limits)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[a", "end of document"),
        (b"\xff" + KEY.encode(), "not UTF-8"),
        (f"key = '{KEY}'", r"\[key\] Expected `object`"),
        ("[a]", "either key or sha256"),
        (f"[a]\nkey = '{KEY}'\nsha256 = '{DIGEST}'", "either key or sha256"),
        (f"[a]\nsha256 = '{KEY}'", "sha256"),
        ("[a]\nkey = ''", "length >= 1"),
        (f"[a]\nkey = '{KEY}'\n[b]\nsha256 = '{DIGEST}'", r"\[a\] and \[b\] have the same key"),
        (f"[a]\nkey = '{KEY}'\nrequests_per_second = 3", "unknown field `requests_per_second`"),
        (f"[a]\nkey = '{KEY}'\nrequests_per_minute = 0", ">= 1"),
        (f"[a]\nkey = '{KEY}'\nrequests_per_minute = 1.5", "requests_per_minute"),
        (f"[a]\nkey = '{KEY}'\nmodels = []", "length >= 1"),
        (f"[a]\nkey = '{KEY}'\nmodels = ['gpt']", "minilm, bge"),
        (f"['a b']\nkey = '{KEY}'", "letters, digits"),
    ],
)
def test_an_invalid_file_is_refused_without_quoting_a_key(tmp_path, text, told):
    with pytest.raises(ValueError, match=told) as caught:
        read(tmp_path, text)
    assert KEY not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_file_that_is_not_there_is_an_error_and_one_without_an_end_is_not_read_to_it(tmp_path):
    with pytest.raises(OSError, match=r"none\.toml"):
        read_key_file(tmp_path / "none.toml", [])
    with pytest.raises(ValueError, match="line 1"):
        read_key_file(Path("/dev/zero"), [])


def test_a_file_that_others_can_read_is_told(tmp_path, caplog):
    read(tmp_path, f"[a]\nkey = '{KEY}'")
    warn_of_readers(tmp_path / "keys.toml")
    assert not caplog.records
    (tmp_path / "keys.toml").chmod(0o640)
    warn_of_readers(tmp_path / "keys.toml")
    (record,) = caplog.records
    assert "mode 640" in record.getMessage()

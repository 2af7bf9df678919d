"""URLs in the place of paths."""

from hashlib import sha256
from urllib.parse import urlsplit, urlunsplit

from trio_pool_serve.errors import BulkInputError


def is_url(path_or_url: str) -> bool:
    """Return whether something is a URL rather than a path, as vLLM decides it."""
    return path_or_url.startswith(("http://", "https://"))


def without_secrets(url: str) -> str:
    """Return a URL without what may be secret in it: the user's password, and the query with a signature."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def digest_of_url(url: str) -> str:
    """Return twelve letters and digits for a URL, the same whatever its secrets are."""
    return sha256(without_secrets(url).encode()).hexdigest()[:12]


def check_path_or_url(path_or_url: str) -> None:
    """Raise ``BulkInputError`` for a URL without a host, or one that cannot be read."""
    if not is_url(path_or_url):
        return
    try:
        host = urlsplit(path_or_url).hostname
    except ValueError as error:
        raise BulkInputError(f"{path_or_url!r} is not a URL: {error}.") from error
    if not host:
        raise BulkInputError(f"{path_or_url!r} has no host.")

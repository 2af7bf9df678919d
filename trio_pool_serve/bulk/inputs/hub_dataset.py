"""Files of datasets on the Hugging Face Hub."""

import re
from pathlib import Path

from trio_pool_serve.bulk.table_formats import known_format
from trio_pool_serve.errors import BulkInputError

HUB_PREFIX = "hf://"
SOURCE = re.compile(r"hf://datasets/(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>[^/]+))?(?:/(?P<pattern>.+))?")
MAX_MESSAGE_CHARS = 500
ANY_TABLE = [f"*.{kind}{end}" for kind in ("jsonl", "ndjson", "csv", "tsv") for end in ("", ".gz", ".zst")]
ANY_TABLE += ["*.parquet", "*.arrow", "*.feather"]


def hub_files(source: str, given: str | None) -> tuple[Path, list[str]]:
    """Download the files of ``hf://datasets/OWNER/NAME[@REVISION][/GLOB]``; return their folder and names in it.

    In a pattern ``*`` matches slashes, too. Raises ``BulkInputError``, with what the hub or the network says.
    """
    parsed = SOURCE.fullmatch(source)
    if parsed is None:
        raise BulkInputError(f"{source}: a dataset of the hub is hf://datasets/OWNER/NAME[@REVISION][/GLOB].")
    pattern = parsed["pattern"]
    patterns = [pattern] if pattern else ANY_TABLE
    folder = _download(source, parsed["repo"], parsed["revision"], patterns)
    from huggingface_hub.utils._paths import filter_repo_objects

    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    found = list(filter_repo_objects(names, allow_patterns=patterns))  # the folder may have files of earlier downloads
    return folder, found if given or pattern else [name for name in found if known_format(name)]


def _download(source: str, repo: str, revision: str | None, patterns: list[str]) -> Path:
    from httpx import HTTPError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(repo, repo_type="dataset", revision=revision, allow_patterns=patterns))
    except (OSError, ValueError, HTTPError, HfHubHTTPError) as error:
        message = " ".join(str(error).split())[:MAX_MESSAGE_CHARS] or repr(error)
        raise BulkInputError(f"{source} cannot be downloaded: {message}") from error

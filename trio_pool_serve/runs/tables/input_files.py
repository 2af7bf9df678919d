"""The files that a source names: a path, a glob, a folder, standard input, a dataset of the Hugging Face Hub."""

import glob
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from attrs import frozen

from trio_pool_serve.errors import BulkInputError, require
from trio_pool_serve.runs.tables.table_formats import FORMATS, Format, format_of, known_format

STDIN = "-"
WILDCARD = re.compile(r"[*?\[]")

HUB_SOURCE = re.compile(r"hf://datasets/(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>[^/]+))?(?:/(?P<pattern>.+))?")
MAX_MESSAGE_CHARS = 500


@frozen
class InputFile:
    """A file and its name for people, which is its path below the source; no path for standard input."""

    name: str
    path: Path | None


FoundFiles: TypeAlias = tuple[tuple[InputFile, ...], Format]
"""The files of a source, in the order in which their rows count, and their format."""


class _SavedFile(msgspec.Struct):
    filename: str


class _SavedState(msgspec.Struct):
    data_files: list[_SavedFile] = msgspec.field(name="_data_files")
    indices_files: list[Any] | None = msgspec.field(name="_indices_data_files", default=None)


class _SplitNames(msgspec.Struct):
    splits: list[str]


def find_files(source: str, given: str | None, left_out: frozenset[Path] = frozenset()) -> FoundFiles:
    """Return the files of a source, sorted by name, all of one format. Raises ``BulkInputError``.

    Files of a glob or a folder that are ``left_out``, by resolved paths, do not count.
    """
    if source == STDIN:
        return _standard_input(given)
    if source.startswith("hf://"):
        folder, names = hub_files(source, given)
        return _found(source, folder, [folder / name for name in names], given)
    path = Path(source)
    try:
        if path.is_dir():
            return _in_folder(source, path, given, left_out)
        wildcard = WILDCARD.search(source)
        if path.exists() or wildcard is None:
            return _found(source, path.parent, [path], given)
        matching = map(Path, glob.glob(source, recursive=True))  # noqa: PTH207
        return _found(source, Path(source[: wildcard.end()]).parent, matching, given, left_out)
    except OSError as error:
        raise BulkInputError(f"{source}: {error.strerror or error}.") from error


def _standard_input(given: str | None) -> FoundFiles:
    require(
        given is not None,
        "Standard input has no file extension. Set --input-format, for example to jsonl or csv.",
        BulkInputError,
    )
    found = format_of(STDIN, given)
    require(found.in_lines, f"{found} cannot be read from standard input. Use a file.", BulkInputError)
    return (InputFile("standard input", None),), found


def _in_folder(source: str, folder: Path, given: str | None, left_out: frozenset[Path]) -> FoundFiles:
    if (folder / "dataset_dict.json").is_file():
        splits = _json(folder / "dataset_dict.json", _SplitNames).splits
        raise BulkInputError(
            f"{source} contains several splits. Name one of: {', '.join(f'{source}/{name}' for name in splits)}."
        )
    if (folder / "state.json").is_file():
        return _saved_dataset(source, folder)
    paths = [path for path in folder.iterdir() if known_format(path.name) and path.name[0] not in "._"]
    return _found(source, folder, paths, given, left_out)


def _saved_dataset(source: str, folder: Path) -> FoundFiles:
    """Return the files that ``save_to_disk`` of the package datasets wrote, in its order."""
    state = _json(folder / "state.json", _SavedState)
    files = tuple([InputFile(file.filename, folder / file.filename) for file in state.data_files])
    require(
        not state.indices_files,
        f"{source} was saved with an index of rows. Call flatten_indices() and save it again.",
        BulkInputError,
    )
    for file in files:
        require("/" not in file.name, f"{source}/state.json lists files outside the folder.", BulkInputError)
        require(
            (folder / file.name).is_file(),
            f"{source} lacks the file {file.name}, which its state.json lists.",
            BulkInputError,
        )
    return files, Format("arrow")


def _json(path: Path, kind: Callable[..., Any]) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        raise BulkInputError(f"{path} was not written by save_to_disk: {error}.") from error


def _found(
    source: str, folder: Path, paths: Iterable[Path], given: str | None, left_out: frozenset[Path] = frozenset()
) -> FoundFiles:
    counting = [path for path in paths if path.is_file() and not (left_out and path.resolve() in left_out)]
    files = sorted([InputFile(os.path.relpath(path, folder), path) for path in counting], key=lambda file: file.name)
    require(bool(files), f"{source}: no such file, or no file with a known extension.", BulkInputError)
    formats = {format_of(file.name, given): file.name for file in files}
    if len(formats) > 1:
        examples = ", ".join(f"{name} is {found}" for found, name in formats.items())
        raise BulkInputError(f"{source}: all files must have the same format: {examples}.")
    return tuple(files), next(iter(formats))


def hub_files(source: str, given: str | None) -> tuple[Path, list[str]]:
    """Download the files of ``hf://datasets/OWNER/NAME[@REVISION][/GLOB]``; return their folder and names in it.

    In a pattern ``*`` matches slashes, too. Raises ``BulkInputError``, with the error of the hub or the network.
    """
    from httpx import HTTPError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils._paths import filter_repo_objects

    parsed = HUB_SOURCE.fullmatch(source)
    if parsed is None:
        raise BulkInputError(f"{source} must be hf://datasets/OWNER/NAME[@REVISION][/GLOB].")
    pattern = parsed["pattern"]
    wanted = [pattern] if pattern else [f"*.{extension}" for extension in FORMATS]
    try:
        downloaded = snapshot_download(
            parsed["repo"], repo_type="dataset", revision=parsed["revision"], allow_patterns=wanted
        )
    except (OSError, ValueError, HTTPError, HfHubHTTPError) as error:
        message = " ".join(str(error).split())[:MAX_MESSAGE_CHARS] or repr(error)
        raise BulkInputError(f"{source} cannot be downloaded: {message}") from error
    folder = Path(downloaded)
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    found = list(filter_repo_objects(names, allow_patterns=wanted))  # the folder may have files of earlier downloads
    return folder, found if given or pattern else [name for name in found if known_format(name)]

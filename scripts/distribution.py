"""Checks which files the sdist and the wheel in a folder have: ``distribution.py FOLDER VERSION``."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
CLONE_ONLY = (".ci/", ".github/", ".pre-commit-config.yaml")
"""What of the repository is of no use outside a clone."""


def files_in_git() -> set[str]:
    """Return the files of the working tree that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return {name for name in listed.split("\0") if (ROOT / name).is_file()}


def expected_sdist(files: set[str]) -> set[str]:
    """Return the files that the sdist must have, and no others: tests, docs and scripts are among them."""
    return {name for name in files if not name.startswith(CLONE_ONLY)} | {"PKG-INFO"}


def expected_wheel(files: set[str], version: str) -> set[str]:
    """Return the files that the wheel must have, and no others: the package and its metadata."""
    metadata = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    package = {name for name in files if name.startswith("trio_pool_serve/")}
    return package | {f"trio_pool_serve-{version}.dist-info/{name}" for name in metadata}


def differences(name: str, found: set[str], expected: set[str]) -> list[str]:
    """Return a line for each file that is missing or that should not be there."""
    return [f"{name} lacks {file}" for file in sorted(expected - found)] + [
        f"{name} should not have {file}" for file in sorted(found - expected)
    ]


def check(folder: Path, version: str) -> list[str]:
    """Return what is wrong with the distributions in ``folder``, a line for each file."""
    stem = f"trio_pool_serve-{version}"
    sdist, wheel = f"{stem}.tar.gz", f"{stem}-py3-none-any.whl"
    files = files_in_git()
    wrong = differences("the folder", {path.name for path in folder.iterdir()}, {sdist, wheel})
    if wrong:
        return wrong
    with tarfile.open(folder / sdist) as archive:
        in_sdist = {member.name.removeprefix(f"{stem}/") for member in archive.getmembers() if not member.isdir()}
    with zipfile.ZipFile(folder / wheel) as archive:
        in_wheel = set(archive.namelist())
    print(f"{sdist}: {len(in_sdist)} files; {wheel}: {len(in_wheel)} files")
    return differences(sdist, in_sdist, expected_sdist(files)) + differences(
        wheel, in_wheel, expected_wheel(files, version)
    )


if __name__ == "__main__":
    sys.exit("\n".join(check(Path(sys.argv[1]), sys.argv[2])) or 0)

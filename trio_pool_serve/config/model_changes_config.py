"""Settings of models that are loaded and unloaded while the server runs."""

from typing import Annotated

from attrs import field, frozen
from attrs.validators import ge, gt, optional
from cyclopts import Group, Parameter

from trio_pool_serve.config.help import help_, switch


@Parameter(name="*", group=Group("Models at run time", sort_key=10))
@frozen(kw_only=True)
class ModelChangesConfig:
    """Which models are loaded, and when they are unloaded, while the server runs. Requires `--engine local`."""

    model_api: Annotated[
        bool,
        switch(
            "Let API keys with `admin` load models by `POST /v1/models` and unload them by `DELETE /v1/models/NAME`. "
            "Requires `--api-key` or `--api-keys-file`. See SECURITY.md."
        ),
    ] = False
    idle_unload_s: Annotated[
        float,
        help_(
            "Seconds without a request after which a model is unloaded. The next request for it loads it again, and "
            "waits for that. 0: never."
        ),
    ] = field(default=0.0, validator=ge(0))
    max_loaded_models: Annotated[
        int | None,
        help_(
            "Maximum number of models that are loaded. When another is needed, the one that has been without a request "
            "for longest is unloaded. Of the models at the start, the first so many are loaded.",
            default="no limit",
        ),
    ] = field(default=None, validator=optional(gt(0)))

    @property
    def flag(self) -> str | None:
        """The flag of a setting that has models change; ``None`` if they stay as they were at the start."""
        flags = {
            "--model-api": self.model_api,
            "--idle-unload-s": self.idle_unload_s,
            "--max-loaded-models": self.max_loaded_models is not None,
        }
        return next((flag for flag, is_set in flags.items() if is_set), None)

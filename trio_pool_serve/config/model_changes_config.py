"""Settings of models that are loaded and unloaded while the server runs."""

from typing import Annotated

from attrs import field, frozen
from attrs.validators import ge, gt, optional

from trio_pool_serve.config.setting import Setting, switch


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
        Setting(
            "Time without a request after which a model is unloaded; 0 is never. The next request for it waits until "
            "it is loaded again."
        ),
    ] = field(default=0.0, validator=ge(0))
    max_loaded_models: Annotated[
        int | None,
        Setting(
            "Maximum number of loaded models. When another is needed, the one that has been without a request for "
            "longest is unloaded. At the start, the first N models are loaded.",
            default="no limit",
        ),
    ] = field(default=None, validator=optional(gt(0)))

    @property
    def flag(self) -> str | None:
        """The flag of a setting with which models change; ``None`` if they stay as they were at the start."""
        flags = {
            "--model-api": self.model_api,
            "--idle-unload-s": self.idle_unload_s,
            "--max-loaded-models": self.max_loaded_models is not None,
        }
        return next((flag for flag, is_set in flags.items() if is_set), None)

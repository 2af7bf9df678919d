"""Settings of engines that Ray places."""

from typing import Annotated

from attrs import field, frozen
from attrs.validators import ge, le

from trio_pool_serve.config.setting import Setting


@frozen(kw_only=True)
class RayConfig:
    """How engines are placed on the nodes of a Ray cluster (`--engine ray`)."""

    gpus_per_replica: Annotated[
        float,
        Setting(
            "GPUs that Ray reserves for each replica, up to 1. A fraction lets replicas share a GPU; with 0 they "
            "compute on CPU."
        ),
    ] = field(default=0.0, validator=[ge(0), le(1)])

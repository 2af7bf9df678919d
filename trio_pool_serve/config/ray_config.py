"""Settings of engines that Ray places."""

from typing import Annotated

from attrs import field, frozen
from attrs.validators import ge, le
from cyclopts import Group, Parameter

from trio_pool_serve.config.help import help_


@Parameter(name="*", group=Group("Ray", sort_key=4))
@frozen(kw_only=True)
class RayConfig:
    """How engines are placed on the nodes of a Ray cluster (`--engine ray`)."""

    gpus_per_replica: Annotated[
        float,
        help_(
            "GPUs that Ray reserves for each replica; a fraction lets replicas share one. 0: replicas compute on CPU."
        ),
    ] = field(default=0.0, validator=[ge(0), le(1)])

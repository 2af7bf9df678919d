"""Settings of engines that Ray places."""

from typing import Annotated

from attrs import field, frozen
from attrs.validators import ge, gt, le, matches_re
from cyclopts import Group, Parameter

from trio_pool_serve.config.help import help_


@Parameter(name="*", group=Group("Ray", sort_key=4))
@frozen(kw_only=True)
class RayConfig:
    """How engines are placed on the nodes of a Ray cluster (`--engine ray`)."""

    ray_address: Annotated[
        str,
        help_(
            "Address of the cluster, `HOST:PORT`; this machine is one of its nodes. auto: that of `RAY_ADDRESS`, or of "
            "the cluster that was started on this machine."
        ),
    ] = field(default="auto", validator=matches_re(r"auto|[^/\s]+:\d{1,5}"))
    gpus_per_replica: Annotated[
        float,
        help_(
            "GPUs that Ray reserves for each replica; a fraction lets replicas share one. 0: replicas compute on CPU."
        ),
    ] = field(default=0.0, validator=[ge(0), le(1)])
    cpus_per_replica: Annotated[
        float,
        help_("CPUs that Ray reserves for each replica, and threads of torch's there unless `OMP_NUM_THREADS` is set."),
    ] = field(default=1.0, validator=gt(0))
    scale_up_queue_s: Annotated[
        float,
        help_(
            "With a range of `--replicas`: seconds that all admitted work will take, above which replicas are added."
        ),
    ] = field(default=1.0, validator=gt(0))
    scale_down_after_s: Annotated[
        float,
        help_(
            "With a range of `--replicas`: seconds for which one replica fewer would have had next to no queue and "
            "computed for at most 70 % of the time, after which one is drained."
        ),
    ] = field(default=60.0, validator=gt(0))

    @property
    def resources(self) -> dict[str, float]:
        """What is reserved for a replica, by Ray's names."""
        gpus = {"GPU": self.gpus_per_replica} if self.gpus_per_replica else {}
        return {"CPU": self.cpus_per_replica, **gpus}

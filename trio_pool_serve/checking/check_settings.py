"""The settings of ``trio-pool-serve check``."""

from typing import Annotated

from attrs import frozen
from cyclopts import Group, Parameter

from trio_pool_serve.config import Config
from trio_pool_serve.config.help import help_, switch


@Parameter(name="*", group=Group("Report", sort_key=0))
@frozen(kw_only=True)
class ReportOptions:
    """Contents and format of the report."""

    measure: Annotated[
        bool, help_("Compute rows of several lengths and the largest batch, for speed and memory: a few seconds.")
    ] = True
    json: Annotated[bool, switch("Print the report as JSON.")] = False


@frozen(kw_only=True)
class CheckSettings:
    """The settings of a server that would load the model, and the options of the report."""

    config: Config
    report: ReportOptions

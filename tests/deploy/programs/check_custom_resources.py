"""Reads a JSON list of custom resources, and writes one with what is wrong with each.

Run by the environment that ``scripts/test`` makes for ``tests/deploy``.
"""

import json
import sys

import promql_parser
from cloudcoil.models.keda.v1alpha1 import ScaledObject
from cloudcoil.models.prometheus_operator.v1 import PrometheusRule, ServiceMonitor
from pydantic import ValidationError

MODELS = {
    ("keda.sh/v1alpha1", "ScaledObject"): ScaledObject,
    ("monitoring.coreos.com/v1", "ServiceMonitor"): ServiceMonitor,
    ("monitoring.coreos.com/v1", "PrometheusRule"): PrometheusRule,
}


def problems_of(resource: dict) -> list[str]:
    model = MODELS[resource["apiVersion"], resource["kind"]]
    try:
        parsed = model.model_validate(resource)
    except ValidationError as error:
        return [str(error)]
    # Fields that the model does not know are dropped: what is left must be all.
    kept = parsed.model_dump(mode="json", by_alias=True, exclude_unset=True)
    problems = [] if kept == resource else [f"has fields that its definition lacks: {resource} is not {kept}"]
    for trigger in resource["spec"].get("triggers", []):
        try:
            promql_parser.parse(trigger["metadata"]["query"])
        except ValueError as error:
            problems.append(f"{trigger['metadata']['query']}: {error}")
    return problems


if __name__ == "__main__":
    json.dump([problems_of(resource) for resource in json.load(sys.stdin)], sys.stdout)

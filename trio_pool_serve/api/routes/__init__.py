"""Routes that belong to no dialect: probes, metrics, models, OpenAPI."""

"""From a model's files to its backbone and heads: one module per kind of model."""

"""Checkpoints to modules on a device; the runner of a model."""

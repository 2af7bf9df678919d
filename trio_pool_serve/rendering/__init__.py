"""Prompts to model inputs."""

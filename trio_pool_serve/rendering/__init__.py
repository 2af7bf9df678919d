"""Rendering of prompts to model inputs."""

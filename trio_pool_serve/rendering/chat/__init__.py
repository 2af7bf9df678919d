"""Rendering of conversations and pairs by chat templates."""

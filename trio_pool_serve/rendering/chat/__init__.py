"""Conversations and pairs through chat templates."""

"""Fields that several dialects share."""

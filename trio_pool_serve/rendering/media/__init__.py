"""Images: fetched, decoded, prepared once, and kept for those who ask again."""

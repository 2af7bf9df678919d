"""Models that see: what is computed of images, beside texts or by itself."""

"""Loading of images: fetching, decoding, preparing and caching."""

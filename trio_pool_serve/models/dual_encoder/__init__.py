"""Dual encoders: texts and images in one vector space."""

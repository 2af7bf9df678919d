"""The files of a model's folder."""

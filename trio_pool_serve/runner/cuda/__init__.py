"""Packed computation (without padding), and CUDA graphs."""

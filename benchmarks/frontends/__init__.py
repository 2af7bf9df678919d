"""Other front ends on the same engine: ways to render that our server could have, and has not.

Each module is a server, run as ``python -m benchmarks.frontends.NAME MODEL… [flags…]`` with the flags of our own
command, and ours in all but the way from a text to token ids.
"""

"""The models of a server: the parts of each, whether it is loaded, and its running requests."""

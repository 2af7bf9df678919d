"""The models of a server: what each is made of, whether it is loaded, and who uses it."""

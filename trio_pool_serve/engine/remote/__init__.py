"""Devices of other processes: the API process's side, the device server, and the messages between them."""

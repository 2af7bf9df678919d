"""Engine processes: their client, their server, the messages between them, and what keeps them alive."""

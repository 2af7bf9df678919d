"""The engine in processes of its own: the wire, the engine's end of it, the asking end, and who keeps it alive."""

"""Settings as flags of commands: their names, units, help and errors."""

"""Tables that are written, up to a position from which writing can go on after a crash."""

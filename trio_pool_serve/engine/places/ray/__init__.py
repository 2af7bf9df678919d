"""Places on the nodes of a Ray cluster. Ray places and controls; rows never travel by it."""

"""HTTP: connections, the table of routes, middleware, request and response bodies."""

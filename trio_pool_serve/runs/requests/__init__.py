"""Files of requests, one per line, and their responses: for ``run-batch`` and for the Batch API."""

"""Files of requests, a line each, and their responses: of ``run-batch`` and of the Batch API."""

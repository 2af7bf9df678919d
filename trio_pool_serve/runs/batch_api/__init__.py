"""The Batch API: stored files of requests, and the jobs that compute them."""

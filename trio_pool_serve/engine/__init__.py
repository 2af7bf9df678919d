"""Admission, the queue of a model's rows, the batches that are formed from it, and the devices that compute them."""

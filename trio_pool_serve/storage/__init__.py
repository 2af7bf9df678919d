"""What outlives the process: a database on a thread of its own, and files whose bytes are known to be on the disk."""

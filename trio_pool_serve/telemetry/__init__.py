"""What the server tells about itself: metrics, request timings, loop lag."""

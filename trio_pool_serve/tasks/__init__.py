"""What is asked: each task is a preprocessing and a postprocessing around the engine."""

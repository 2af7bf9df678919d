"""Places: where device servers run, who starts them, and how the state of each is reported."""

"""A load generator for servers with OpenAI's API, as a command and for the benchmarks of this project."""

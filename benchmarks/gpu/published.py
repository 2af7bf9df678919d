"""What others have published, as a paragraph of the page; the machines are theirs, and no number is from this run."""

from benchmarks.report import markdown_table

ROWS = (
    ("Snowflake Arctic Inference, arctic-embed-m, 1,024 clients, 1 to 64 texts a request, bytes over gRPC, 32 replicas",
     "H200", "50", "1,600,000"),
    ("vLLM (#23000), arctic-embed-m-v1.5, 1 text a request", "not named", "512", "211,711"),
    ("vLLM (#23000), arctic-embed-m-v1.5, 16 texts a request", "not named", "512", "515,914"),
    ("vLLM (#39113), bge-base-en-v1.5, 64 clients: 1,089 requests/s", "not named", "32", "34,848"),
    ("vLLM (#38559), multilingual-e5-base, 64 clients: 253 requests/s", "not named", "512", "129,536"),
)  # fmt: skip

PUBLISHED = (
    "**Published by others**, with models of the size of BERT-base. Arctic Inference calls its rate at 50 tokens "
    "16 times vLLM's and 2.4 times TEI's.\n\n"
    + markdown_table(("server", "machine", "tokens a text", "tokens/s"), ROWS)
)

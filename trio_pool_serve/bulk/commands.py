"""The commands for files: those for tables, and ``run-batch`` for requests."""

from functools import partial
from typing import Annotated, Any

import trio
from attrs import Factory, frozen
from cyclopts import App, Parameter

from trio_pool_serve.bulk.bulk_options import (
    BatchModelOptions,
    BatchOptions,
    IgnoredOptions,
    OwnModelOptions,
    RunOptions,
    TaskOptions,
    TextOptions,
    VectorFormat,
)

In = Annotated[
    str,
    Parameter(
        name="IN",
        allow_leading_hyphen=True,
        help="What to read: a file, a glob, a folder of files or of `save_to_disk`, `-` for standard input, or "
        "`hf://datasets/OWNER/NAME`.",
    ),
]
Out = Annotated[
    str,
    Parameter(
        name="OUT",
        allow_leading_hyphen=True,
        help="What to write: a file of JSONL or CSV, a folder of Parquet or Arrow files, or `-` for standard output.",
    ),
]
Column = Annotated[str, Parameter(help="Column with the texts.")]
QueryColumn = Annotated[str, Parameter(help="Column with the queries.")]
Dimensions = Annotated[int | None, Parameter(help="Length to which vectors are truncated.")]
VectorDtype = Annotated[VectorFormat, Parameter(help="Type of the vectors' numbers; binary: a bit for each dimension.")]


@Parameter(name="*")
@frozen(kw_only=True)
class TableOptions:
    """The options that all commands for tables have."""

    run: RunOptions = Factory(RunOptions)
    text: TextOptions = Factory(TextOptions)
    own: OwnModelOptions = Factory(OwnModelOptions)


TABLE = TableOptions()
BATCH_MODEL = BatchModelOptions()
IGNORED = IgnoredOptions()


def start(source: str, target: str, options: TableOptions, task: str, *columns: str, **of_task: Any) -> int:
    """Run the command of a task, with the ``TaskOptions`` it has; return the exit status."""
    from trio_pool_serve.bulk.run_table import run_command  # imported here: for --help it is not needed

    chosen = TaskOptions(task=task, columns=columns, **of_task)
    return trio.run(partial(run_command, source, target, chosen, options.run, options.text, options.own))


def embed(
    source: In,
    target: Out,
    *,
    column: Column = "text",
    dimensions: Dimensions = None,
    dtype: VectorDtype = "float32",
    options: TableOptions = TABLE,
) -> int:
    """Embed the texts of a table: one vector for each row."""
    return start(source, target, options, "embed", column, dimensions=dimensions, dtype=dtype)


def token_embed(
    source: In,
    target: Out,
    *,
    column: Column = "text",
    dimensions: Dimensions = None,
    dtype: VectorDtype = "float32",
    options: TableOptions = TABLE,
) -> int:
    """Embed the tokens of each text: one vector for each token, as for late interaction."""
    return start(source, target, options, "token-embed", column, dimensions=dimensions, dtype=dtype)


def sparse(
    source: In,
    target: Out,
    *,
    column: Column = "text",
    options: TableOptions = TABLE,
) -> int:
    """Compute a sparse vector for each text: weights of the vocabulary's tokens."""
    return start(source, target, options, "sparse", column)


def classify(
    source: In,
    target: Out,
    *,
    column: Column = "text",
    options: TableOptions = TABLE,
) -> int:
    """Classify each text: its label, the label's probability, and those of all labels."""
    return start(source, target, options, "classify", column)


def score(
    source: In,
    target: Out,
    *,
    query_column: QueryColumn = "query",
    document_column: Annotated[str, Parameter(help="Column with the documents.")] = "document",
    options: TableOptions = TABLE,
) -> int:
    """Score each row's query and document."""
    return start(source, target, options, "score", query_column, document_column)


def rerank(
    source: In,
    target: Out,
    *,
    query_column: QueryColumn = "query",
    documents_column: Annotated[str, Parameter(help="Column with a list of documents in each row.")] = "documents",
    top_n: Annotated[int | None, Parameter(help="Most documents of the result.")] = None,
    options: TableOptions = TABLE,
) -> int:
    """Rank the documents of each row for its query: their indices and scores, the best first."""
    return start(source, target, options, "rerank", query_column, documents_column, top_n=top_n)


def run_batch(
    *,
    batch: BatchOptions,
    own: BatchModelOptions = BATCH_MODEL,
    ignored: IgnoredOptions = IGNORED,
) -> int:
    """Run a file of requests, in the format of vLLM's run-batch and of OpenAI's Batch API.

    Each line of the input is `{"custom_id": …, "method": "POST", "url": "/v1/embeddings", "body": {…}}`, for any route
    that `serve` has for models. Each line of the output is
    `{"id": …, "custom_id": …, "response": {"status_code": …, "request_id": …, "body": {…}}, "error": null}`.

    Run the same command again to resume a run that was stopped, killed or ended by an error. The exit status is 0, or 3
    if lines failed, 1 if the run failed, and 130 if it was stopped.
    """
    del ignored
    from trio_pool_serve.bulk import run_batch as batches  # imported here: for --help it is not needed

    return trio.run(partial(batches.run_batch, batch, own))


def add_commands(app: App) -> None:
    """Add the commands to an app."""
    for command in (embed, sparse, token_embed, classify, score, rerank, run_batch):
        app.command(command)

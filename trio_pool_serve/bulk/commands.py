"""The commands for files: one for each task over a table, and ``run-batch`` for a file of requests."""

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import trio
from attrs import Factory, frozen
from cyclopts import App, Group, Parameter

from trio_pool_serve.bulk.bulk_options import (
    BatchModelOptions,
    BatchOptions,
    IgnoredOptions,
    OwnModelOptions,
    RunOptions,
    TextOptions,
    VectorFormat,
)

if TYPE_CHECKING:
    from trio_pool_serve.bulk.table_task import TaskName


def _refuse_flag(_: object, place: str) -> None:
    if place.startswith("-") and place != "-":
        raise ValueError(f"Unknown flag {place}; --help-all lists all flags.")


In = Annotated[
    str,
    Parameter(
        name="IN",
        allow_leading_hyphen=True,  # for ``-``
        validator=_refuse_flag,
        help="Input: a file, a glob, a folder of files or of `save_to_disk`, `-` for standard input, or "
        "`hf://datasets/OWNER/NAME`.",
    ),
]
Out = Annotated[
    str,
    Parameter(
        name="OUT",
        allow_leading_hyphen=True,
        validator=_refuse_flag,
        help="Output: a JSONL or CSV file, a folder of Parquet or Arrow files, or `-` for standard output.",
    ),
]
Column = Annotated[str, Parameter(help="Column with the texts.")]
QueryColumn = Annotated[str, Parameter(help="Column with the queries.")]
Dimensions = Annotated[int | None, Parameter(help="Number of dimensions to which vectors are truncated.")]
VectorDtype = Annotated[VectorFormat, Parameter(help="Type of the vectors' numbers; binary is one bit per dimension.")]


@Parameter(name="*")
@frozen(kw_only=True)
class TableOptions:
    """The options of all commands for tables."""

    run: RunOptions = Factory(RunOptions)
    text: TextOptions = Factory(TextOptions)
    own: OwnModelOptions = Factory(OwnModelOptions)


TABLE = TableOptions()
BATCH_MODEL = BatchModelOptions()
IGNORED = IgnoredOptions()


def start(source: str, target: str, options: TableOptions, task: "TaskName", *columns: str, **of_task: Any) -> int:
    """Run the command of a task, ``of_task`` being its ``TaskOptions``; return the exit status."""
    # Imported here: they are not needed for --help.
    from trio_pool_serve.bulk.run_table import run_command
    from trio_pool_serve.bulk.table_task import TaskOptions

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
    """Embed each text: one vector per row."""
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
    """Embed the tokens of each text: one vector per token, for late interaction."""
    return start(source, target, options, "token-embed", column, dimensions=dimensions, dtype=dtype)


def sparse(
    source: In,
    target: Out,
    *,
    column: Column = "text",
    options: TableOptions = TABLE,
) -> int:
    """Compute a sparse vector for each text: the weights of the vocabulary's tokens."""
    return start(source, target, options, "sparse", column)


def classify(
    source: In,
    target: Out,
    *,
    column: Column = "text",
    options: TableOptions = TABLE,
) -> int:
    """Classify each text: the label, its probability, and the probabilities of all labels."""
    return start(source, target, options, "classify", column)


def score(
    source: In,
    target: Out,
    *,
    query_column: QueryColumn = "query",
    document_column: Annotated[str, Parameter(help="Column with the documents.")] = "document",
    options: TableOptions = TABLE,
) -> int:
    """Score the query and the document of each row."""
    return start(source, target, options, "score", query_column, document_column)


def rerank(
    source: In,
    target: Out,
    *,
    query_column: QueryColumn = "query",
    documents_column: Annotated[str, Parameter(help="Column with the lists of documents.")] = "documents",
    top_n: Annotated[int | None, Parameter(help="Maximum number of documents in a result.")] = None,
    options: TableOptions = TABLE,
) -> int:
    """Rank the documents of each row for its query: indices and scores, best first."""
    return start(source, target, options, "rerank", query_column, documents_column, top_n=top_n)


def run_batch(
    *,
    batch: BatchOptions,
    own: BatchModelOptions = BATCH_MODEL,
    ignored: IgnoredOptions = IGNORED,
) -> int:
    """Run a file of requests, in the format of vLLM's run-batch and OpenAI's Batch API.

    Each line of the input is `{"custom_id": …, "method": "POST", "url": "/v1/embeddings", "body": {…}}`; the URL is any
    route of `serve` that computes. Each line of the output is
    `{"id": …, "custom_id": …, "response": {"status_code": …, "request_id": …, "body": {…}}, "error": null}`.

    To resume a run that was stopped, killed or ended by an error, run the same command again. The exit status is 0, or
    3 if lines failed, 1 if the run failed, 130 if it was stopped.
    """
    del ignored
    from trio_pool_serve.bulk import run_batch as batches  # imported here: for --help it is not needed

    return trio.run(partial(batches.run_batch, batch, own))


def add_commands(app: App) -> None:
    """Add the commands to an app."""
    heading = Group("Bulk work: compute the rows of a file or table, here or by a server", sort_key=1)
    for command in (embed, sparse, token_embed, classify, score, rerank, run_batch):
        app.command(command, group=heading)

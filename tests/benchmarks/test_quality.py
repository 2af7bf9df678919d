"""The measures of quality, the texts that they are computed from, and that a server reaches sentence-transformers'."""

import bz2
from pathlib import Path

import pytest
from scipy.stats import pearsonr, rankdata

from benchmarks.model import MODEL_PATH
from benchmarks.quality.__main__ import FLOAT32, REFERENCE, measure
from benchmarks.quality.judged_pairs import WIKIPEDIA, JudgedPairs, plain_text, read_judged_pairs, without_title
from benchmarks.quality.vectors import Subject

ANIMALS = "'''Cats''' are [[Felidae|small felines]].{{cite {{nested}}}}<ref>a [book]</ref> They catch [[mouse|mice]]."
MUSIC = (
    "An '''opera''' is [http://x.org sung] drama.\n== Forms ==\n[[File:a.jpg|thumb|of [[Rome]]]]{| a table |} By Verdi."
)
PAGE = "<page><title>{}</title>{}<revision><text>{}</text></revision></page>"


def write_test_data(folder: Path) -> Path:
    """Write files in the form of gensim's, with fewer texts."""
    documents = [
        "A cat chases a mouse.",
        "The mouse ran from a cat.",
        "Prices of steel rose by £5.",
        "Steel became dear.",
    ]
    (folder / "lee.cor").write_text("\n".join(documents), encoding="latin-1")
    (folder / "similarities0-1.txt").write_text("1 .9 .1 .2\n0 1 .15 .05\n0 0 1 .8\n0 0 0 1\n")
    for name in ("wordsim353.tsv", "simlex999.txt"):
        (folder / name).write_text("# a comment\ntiger\tcat\t7.35\ntiger\ttiger\t10.00\ncup\tarticle\t2.40\n")
    pages = (
        PAGE.format("Cats", "", ANIMALS.replace("<", "&lt;")),
        PAGE.format("CatsAndDogs", "<redirect/>", "#REDIRECT [[Cats]]"),
        PAGE.format("Opera (art)", "", MUSIC),
    )
    dump = f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">{"".join(pages)}</mediawiki>'
    (folder / WIKIPEDIA).write_bytes(bz2.compress(dump.encode()))
    return folder


def test_spearman_is_the_correlation_of_ranks_and_ties_share_theirs():
    judgements, similarities = [1.0, 2.0, 2.0, 4.0, 5.0], [0.1, 0.3, 0.2, 0.2, 0.9]
    found = JudgedPairs("", [("", "")] * 5, judgements).value(similarities)
    assert found == pytest.approx(pearsonr(rankdata(judgements), rankdata(similarities)).statistic)
    assert 0.6 < found < 0.9


def test_ndcg_is_one_at_the_first_place_less_at_the_second_and_nothing_after_the_tenth():
    def value(*places: int) -> float:
        """Of queries whose document is at these places of twelve."""
        judgements = [float(n == 0) for _ in places for n in range(12)]
        similarities = [12.0 - place + 0.5 if n == 0 else 12.0 - n for place in places for n in range(12)]
        return JudgedPairs("", [("", "")] * len(judgements), judgements, len(places)).value(similarities)

    assert value(1) == 1
    assert value(2) == pytest.approx(0.63093, abs=1e-5)  # 1 / log2(3)
    assert value(10) == pytest.approx(0.28906, abs=1e-5)  # 1 / log2(11)
    assert value(11) == 0
    assert value(1, 2, 11) == pytest.approx(1.63093 / 3, abs=1e-5)


def test_markup_and_titles_are_not_part_of_the_articles():
    assert plain_text(ANIMALS) == "Cats are small felines. They catch mice."
    assert plain_text(MUSIC) == "An opera is sung drama. Forms By Verdi."
    assert without_title("Opera (art)", "An opera; operas") == "An ; operas"


def test_pairs_and_judgements_are_those_of_the_files(tmp_path: Path):
    lee, words, _, wikipedia = read_judged_pairs(write_test_data(tmp_path))
    assert lee.pairs[2] == ("A cat chases a mouse.", "Steel became dear.")
    assert lee.judgements == [0.9, 0.1, 0.2, 0.15, 0.05, 0.8]
    assert words.pairs == [("tiger", "cat"), ("tiger", "tiger"), ("cup", "article")]
    assert words.judgements == [7.35, 10, 2.4]
    texts = [text.split()[-1] for _, text in wikipedia.pairs]
    assert [title for title, _ in wikipedia.pairs] == ["Cats", "Cats", "Opera (art)", "Opera (art)"]
    assert texts == ["mice.", "Verdi.", "mice.", "Verdi."]
    assert wikipedia.judgements == [1, 0, 0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["embed", "token_embed"])
async def test_a_server_in_float32_has_the_values_of_sentence_transformers(tmp_path: Path, task):
    sets = read_judged_pairs(write_test_data(tmp_path))
    noted: list[str] = []
    rows = await measure(Subject("MiniLM", Path(MODEL_PATH), task), [FLOAT32, "no-dtype"], sets, noted.append)
    reference, served, refused = rows
    assert [row["by"] for row in rows] == [REFERENCE, FLOAT32, "no-dtype"]
    assert served["values"] == pytest.approx(reference["values"], abs=1e-9)
    assert served["least_cosine"] > 0.99999
    assert "no-dtype" in refused["refused"]
    assert noted == ["MiniLM, sentence-transformers", "MiniLM, float32"]

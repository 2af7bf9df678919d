"""Pairs of texts with judgements, from the test data of the package gensim."""

import bz2
import re
from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
from attrs import frozen
from scipy.stats import spearmanr
from sklearn.metrics import ndcg_score

ARTICLE_CHARACTERS = 2000
"""More than MiniLM and all-mpnet-base-v2 read of most articles, so that texts are truncated, too."""

WIKIPEDIA = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"

TAG = "{http://www.mediawiki.org/xml/export-0.10/}"

MARKUP = (
    (r"<!--.*?-->|<ref[^>]*/>|<ref.*?</ref>|<[^>]*>", ""),
    (r"\{\|[^{]*?\|\}|\{\{[^{}]*\}\}", ""),  # tables, templates
    (r"\[\[(?:File|Image|Category):(?:[^\[\]]|\[\[[^\[\]]*\]\])*\]\]", ""),
    (r"\[\[(?:[^|\]]*\|)?([^\]]*)\]\]|\[\S+ ?([^\]]*)\]", r"\1\2"),  # links: the text that is shown
    (r"'{2,}|={2,}|&nbsp;", " "),  # bold, italics, headings
)
"""Patterns of wiki markup, and their replacements; each is replaced until none is left."""


@frozen
class JudgedPairs:
    """Pairs of texts, and a judgement of each: the larger, the more similar.

    With ``queries``, the pairs are all documents of the first query, of the second and so on, judged by 1 and 0.
    """

    name: str
    pairs: Sequence[tuple[str, str]]
    judgements: Sequence[float]
    queries: int = 0

    def value(self, similarities: Sequence[float]) -> float:
        """Return Spearman's correlation of similarities and judgements, or nDCG@10 if there are queries."""
        if not self.queries:
            return float(spearmanr(similarities, self.judgements).statistic)
        shape = (self.queries, -1)
        return float(ndcg_score(np.reshape(self.judgements, shape), np.reshape(similarities, shape), k=10))


def read_judged_pairs(folder: Path) -> list[JudgedPairs]:
    """Return the sets of gensim's folder ``test_data``. Raises ``FileNotFoundError`` if it lacks a file."""
    documents = (folder / "lee.cor").read_text(encoding="latin-1").strip().split("\n")
    judgements = np.loadtxt(folder / "similarities0-1.txt")[np.triu_indices(len(documents), 1)]
    articles = _read_articles(folder / WIKIPEDIA)
    relevances = np.eye(len(articles)).ravel().tolist()
    return [
        JudgedPairs("Lee, Spearman", list(combinations(documents, 2)), judgements.tolist()),
        _read_words("WordSim-353, Spearman", folder / "wordsim353.tsv"),
        _read_words("SimLex-999, Spearman", folder / "simlex999.txt"),
        JudgedPairs("Wikipedia, nDCG@10", list(product(articles, articles.values())), relevances, len(articles)),
    ]


def _read_words(name: str, file: Path) -> JudgedPairs:
    rows = [line.split("\t") for line in file.read_text().splitlines() if not line.startswith("#")]
    return JudgedPairs(name, [(first, second) for first, second, _ in rows], [float(row[2]) for row in rows])


def _read_articles(dump: Path) -> dict[str, str]:
    """Return the beginning of each article by its title, which is left out of it; without redirections."""
    articles = {}
    with bz2.open(dump) as file:
        for _, page in ET.iterparse(file):
            if page.tag == f"{TAG}page" and page.find(f"{TAG}redirect") is None:
                title = page.findtext(f"{TAG}title", "")
                text = plain_text(page.findtext(f"{TAG}revision/{TAG}text", ""))
                articles[title] = without_title(title, text)[:ARTICLE_CHARACTERS]
    return articles


def plain_text(markup: str) -> str:
    """Return the text of a page of Wikipedia without markup, templates, tables and references."""
    for pattern, replacement in MARKUP:
        found = 1
        while found:
            markup, found = re.subn(pattern, replacement, markup, flags=re.DOTALL)
    return " ".join(markup.split())


def without_title(title: str, text: str) -> str:
    """Return the text without the words of its title, in any case; ``(food)`` at its end is no part of them."""
    return re.sub(rf"\b{re.escape(title.partition(' (')[0])}\b", "", text, flags=re.IGNORECASE)

"""With ``--long-text chunk`` the vector of a long text is the mean of its windows', which are texts themselves."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import frozen

from tests.end_to_end.folder_over_http import WHOLE, Record, farthest, one_of, serving_folder
from tests.end_to_end.test_embedding_families_over_http import PROMPTS, write
from tests.models.model_families import MAX_LENGTH, TEXTS, reference
from trio_pool_serve.types import Vectors

TOLERANCE = 1e-5
ORACLE = "SentenceTransformer"
PROMPT = PROMPTS["query"]

WHOLE_WORDS = ("bert", "distilbert", "mpnet", "xlm-roberta", "t5")
"""Families whose tokenizers have words that are one token wherever they are. Some have vectors of unit length."""
WORDS_BEHIND_BLANKS = (*WHOLE_WORDS, "roberta", "modernbert", "qwen3")
"""Those, and families whose words are one token behind a blank: windows of them are texts behind a prompt."""


@frozen(eq=False)
class LongText:
    """A text of words that are one token each behind ``prompt``, and its windows, which the oracle embeds."""

    theirs: Any
    prompt: str

    def count(self, text: str) -> int:
        return len(self.theirs.tokenizer(text, verbose=False)["input_ids"])

    @property
    def words(self) -> Sequence[str]:
        """More than fit three windows, in an order that does not repeat from window to window."""
        bare = TEXTS[3].lower().replace(".", "").replace(",", "").replace(":", "").split()
        begin = self.prompt or bare[-1] + " "
        known = [word for word in dict.fromkeys(bare) if self.count(begin + word) == self.count(begin.rstrip()) + 1]
        assert len(known) > 4
        return [known[(index * index) % len(known)] for index in range(3 * MAX_LENGTH + 11)]

    @property
    def windows(self) -> Sequence[str]:
        words, size = self.words, MAX_LENGTH - self.count(self.prompt.rstrip())
        assert self.count(self.prompt + " ".join(words)) == len(words) + MAX_LENGTH - size
        windows = [" ".join(words[start : start + size]) for start in range(0, len(words), size)]
        assert [self.count(self.prompt + window) for window in windows[:-1]] == [MAX_LENGTH] * (len(windows) - 1)
        return windows

    def mean(self, *, is_unit: bool | None = None, **how: Any) -> Vectors:
        """Weigh each window's vector by its tokens; ``is_unit`` as the model's own vectors are, unless given."""
        vectors = self.theirs.encode(self.windows, prompt=self.prompt, **how)
        mean = np.average(vectors, axis=0, weights=[self.count(self.prompt + window) for window in self.windows])
        if is_unit is None:
            is_unit = any(type(module).__name__ == "Normalize" for module in self.theirs)
        return mean / np.linalg.norm(mean) if is_unit else mean


@pytest.mark.parametrize("name", one_of(WHOLE_WORDS, "bert", "distilbert"))
async def test_a_long_text_is_the_mean_of_its_windows(name: str, tmp_path: Path, record_agreement: Record):
    path = write(tmp_path, name)
    theirs = reference(path)
    long = LongText(theirs, "")
    text, fits = " ".join(long.words), [TEXTS[0], long.windows[0]]
    expected = long.mean()
    async with serving_folder(path, long_text="chunk") as ours:
        unit = long.mean(is_unit=True, normalize_embeddings=True)
        answers = [
            (
                await ours.embeddings([fits[0], text, fits[1]]),
                [*theirs.encode(fits[:1]), expected, *theirs.encode(fits[1:])],
            ),
            (await ours.embeddings([text]), [expected]),
            (await ours.pooled([text], task="embed"), theirs.encode([text])),
            (await ours.embeddings([text], **WHOLE), theirs.encode([text])),
            (await ours.post("/embed", inputs=text, truncate=False), [unit]),
            (await ours.post("/embed", inputs=text), theirs.encode([text], normalize_embeddings=True)),
        ]
        usage = (await ours.post("/v1/embeddings", input=text))["usage"]
    assert usage["prompt_tokens"] == sum(map(long.count, long.windows))
    assert np.abs(expected - theirs.encode(text)).max() > 100 * TOLERANCE, "agreement would prove nothing"
    difference = max(farthest(*answer) for answer in answers)
    assert difference < TOLERANCE
    record_agreement(name, "embed in windows", ORACLE, difference)


@pytest.mark.parametrize("name", one_of(WORDS_BEHIND_BLANKS, "bert", "qwen3"))
async def test_every_window_is_read_behind_the_prompt(name: str, tmp_path: Path, record_agreement: Record):
    path = write(tmp_path, name)
    long = LongText(reference(path), PROMPT)
    text, expected = " ".join(long.words), long.mean()
    async with serving_folder(path, long_text="chunk") as ours:
        answers = [
            (await ours.embeddings([text], prompt_name="query"), [expected]),
            (await ours.embeddings([text], prompt=PROMPT), [expected]),
        ]
        usage = (await ours.post("/v1/embeddings", input=text, prompt_name="query"))["usage"]
    assert usage["prompt_tokens"] == sum(long.count(PROMPT + window) for window in long.windows)
    difference = max(farthest(*answer) for answer in answers)
    assert difference < TOLERANCE
    record_agreement(name, "embed in windows", ORACLE, difference)

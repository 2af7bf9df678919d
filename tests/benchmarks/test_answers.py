"""No server is measured whose answers are not the model's."""

import numpy as np
import pytest

from benchmarks.answers import ask, check_answers, embeddings_body, vectors_of
from benchmarks.model import MODEL_NAME, WrongAnswerError
from tests.conftest import listening, running
from trio_pool_serve.config import Config
from trio_pool_serve.service import Service

TEXTS = ["hello", "hello world", "w1 w2 w3"]


@pytest.fixture
async def served(scripted_folder, scripted):
    config = Config(models=(f"{MODEL_NAME}={scripted_folder}",))
    async with running(Service(config, lambda *_: scripted)) as service, listening(service) as url:
        yield url


async def test_numbers_and_base64_are_the_same_vectors(served):
    asked = [embeddings_body(TEXTS, encoding_format=form) for form in ("float", "base64")]
    numbers, encoded = [vectors_of((await ask(served, body)).json()) for body in asked]
    assert numbers.shape[0] == len(TEXTS)
    np.testing.assert_array_equal(numbers, encoded)


async def test_answers_are_compared_with_the_oracle(served):
    oracle = vectors_of((await ask(served, embeddings_body(TEXTS))).json())
    assert await check_answers(served, TEXTS, oracle) == pytest.approx(1)
    with pytest.raises(WrongAnswerError, match="cosine"):
        await check_answers(served, TEXTS, -oracle)
    with pytest.raises(WrongAnswerError, match="shape"):
        await check_answers(served, TEXTS, oracle[:, :-1])

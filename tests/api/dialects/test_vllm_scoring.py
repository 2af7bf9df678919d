"""``/rerank`` of many documents over a real socket; the model compares vectors by their products, which are known."""

import numpy as np

from tests.api.scripted_models import Dots, served_as, vector_of
from tests.api.serving import post
from tests.conftest import assert_idle

service = served_as(Dots())


async def test_a_large_request_is_ranked_whole(client, service):
    documents = [f"w{n * 37 % 200}" for n in range(700)]
    results = (await post(client, "/rerank", query="hello", documents=documents))["results"]
    assert [result["relevance_score"] for result in results] == [
        float(np.dot(vector_of("query : hello"), vector_of(result["document"]["text"]))) for result in results
    ]
    order = sorted(range(700), key=lambda n: -(n * 37 % 200))
    assert [(result["index"], result["document"]["text"]) for result in results] == [
        (index, documents[index]) for index in order
    ]
    assert_idle(service)

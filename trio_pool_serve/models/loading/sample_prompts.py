"""Sample inputs of a model: texts to quantise it with, and other texts to compare its outputs on.

They have many subjects, forms and languages.
"""

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import get_args

from attrs import evolve

from trio_pool_serve.models.loading.renderer_loading import text_renderer_of
from trio_pool_serve.models.loading.tokenizer_loading import load_tokenizer
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.prompts import InputType, PairPrompt, RenderingParams, TextPrompt
from trio_pool_serve.rendering.text.text_renderer import TextRenderer
from trio_pool_serve.types import RenderedPrompt

CALIBRATION: Sequence[str] = (
    "How do I reset my password?",
    "The cat slept on the warm stones until the sun went down.",
    "Photosynthesis converts light energy into chemical energy, which plants store as sugars and starch.",
    "def mean(values): return sum(values) / len(values)",
    "The committee postponed its decision on interest rates until the inflation figures for March are published.",
    "Ich hätte gern zwei Fahrkarten nach Hamburg, hin und zurück, zweite Klasse.",
    "Le musée est fermé le mardi ; l'entrée est gratuite le premier dimanche du mois.",
    "El paciente presenta fiebre alta desde hace tres días y dolor en la garganta.",
    "best noise cancelling headphones under 200",
    "ERROR 2024-02-11 08:14:03 connection to 10.0.3.17:5432 refused after 3 attempts",
    "Terrible service, the soup was cold and nobody apologised. I will not come back.",
    "A loving film about three sisters who inherit a failing orchard; the performances are superb throughout.",
    "The defendant shall pay damages of 4,200 euros within thirty days of the date of this judgment.",
    "Mix the flour with the salt, rub in the butter, add cold water and let the dough rest for an hour.",
    "Which river flows through Vienna, Bratislava, Budapest and Belgrade?",
    "東京は日本の首都であり、世界最大の都市圏の一つです。",
    "北京是中华人民共和国的首都，拥有三千多年的历史。",
    "Москва — столица России, крупнейший по численности населения город страны.",
    "القاهرة هي عاصمة مصر وأكبر مدنها.",
    '{"id": 1843, "status": "shipped", "items": [{"sku": "A-17", "quantity": 2}], "total": 59.8}',
    "SELECT name, COUNT(*) FROM orders JOIN customers USING (customer_id) GROUP BY name ORDER BY 2 DESC;",
    "Quarterly revenue rose 12.4 % to $3.1 billion, driven by cloud subscriptions and a weaker dollar.",
    "The enzyme binds to the receptor with high affinity, inhibiting the cascade that leads to inflammation.",
    "We prove that every bounded sequence of real numbers has a convergent subsequence.",
    "Saturn's rings consist almost entirely of water ice, with a small amount of rocky material.",
    "Passengers for flight LH 1172 to Lisbon are asked to proceed to gate B 24.",
    "He scored twice in the last ten minutes, and the stadium would not stop singing.",
    "Remember to back up the database before you upgrade, and check that the backup can be restored.",
    "yes",
    "Two-bedroom flat near the station, 64 square metres, balcony, available from 1 October.",
    "The treaty of 1648 ended thirty years of war and redrew the borders of central Europe.",
    "What is the difference between a mutex and a semaphore?",
    "Gentle rain at first light; by noon the hills had disappeared in the mist, and no bird sang.",
    "Omega-3 fatty acids are found in fish oil, flaxseed and walnuts.",
    "I can't believe it's already Friday!!! 🎉 who's in for pizza tonight?",
    "The warranty does not cover damage caused by misuse, moisture or unauthorised repairs.",
)

HELD_OUT: Sequence[str] = (
    "Where can I change the address of my account?",
    "The old lighthouse was switched off last winter, and ships now rely on satellites alone.",
    "Vaccines train the immune system to recognise a pathogen without causing the disease.",
    "for (int i = 0; i < n; ++i) { total += weights[i] * values[i]; }",
    "Unemployment fell to its lowest level in a decade, although wages hardly kept up with prices.",
    "Die Bibliothek ist wegen Umbauarbeiten bis Ende August geschlossen.",
    "La révolution industrielle a profondément changé la vie dans les villes.",
    "La capital de Perú es Lima, situada en la costa del océano Pacífico.",
    "cheap flights london rome april",
    "Great value: it arrived a day early, fits perfectly and the colour is just as in the picture.",
    "The contract may be terminated by either party with three months' written notice.",
    "Roast the peppers until the skin turns black, then peel them and cut them into strips.",
    "大阪は西日本の経済の中心地です。",
    "Санкт-Петербург был основан в 1703 году.",
    "A prime number has exactly two divisors: one and itself.",
    "The volcano erupted without warning, and ash covered villages forty kilometres away.",
    "Who wrote the opera about a Spanish barber?",
    "Warning: disk usage on /var is at 93 percent; logs older than a week are being compressed.",
)

MOST_JOINED = 12
"""Real texts have up to a few hundred tokens: up to this many of these are joined to one."""


def _joined(texts: Sequence[str], count: int) -> Iterator[str]:
    rng = random.Random(0)  # noqa: S311
    for number in range(count):
        yield " ".join(rng.sample(texts, 2 + number * (MOST_JOINED - 2) // max(1, count - 1)))


MAX_TOKENS = 256
"""Tokens to which longer texts are truncated."""


def sample_prompts(
    folder: AnyModelFolder, *, trust_remote_code: bool = False
) -> tuple[Sequence[RenderedPrompt], Sequence[RenderedPrompt]]:
    """Return the texts to quantise with and the other texts, rendered for a model; as pairs if it scores pairs.

    Blocks for a second. Raises ``ModelLoadError``.
    """
    renderer = text_renderer_of(folder, load_tokenizer(folder, trust_remote_code=trust_remote_code), workers=0)
    calibration, held_out = [*CALIBRATION, *_joined(CALIBRATION, 12)], [*HELD_OUT, *_joined(HELD_OUT, 6)]
    params = RenderingParams(truncate_to=MAX_TOKENS)
    return _render(folder, renderer, calibration, params), _render(folder, renderer, held_out, params)


LETTERS_PER_TOKEN = 6
"""Letters that suffice for a token, to cut a long text to about the tokens that are wanted."""


def extreme_prompts(
    folder: AnyModelFolder, tokens: int, *, trust_remote_code: bool = False
) -> Sequence[RenderedPrompt]:
    """Return a short text and one of about ``tokens`` as queries and as documents, rendered for a model.

    Expanded queries have their full length, few tokens of which are attended to. Raises ``ModelLoadError``.
    """
    renderer = text_renderer_of(folder, load_tokenizer(folder, trust_remote_code=trust_remote_code), workers=0)
    texts = "yes", "yes", " ".join([*CALIBRATION, *CALIBRATION])[: LETTERS_PER_TOKEN * tokens]
    sides = get_args(InputType)
    params = [RenderingParams(input_type=side, instruction=folder.prompts.get(side, "")) for side in sides]
    prompts = [prompt for each in params for prompt in _render(folder, renderer, texts, each)]
    return [*{(one.token_ids.tobytes(), one.attended): one for one in prompts}.values()]


def _render(
    folder: AnyModelFolder, renderer: TextRenderer, texts: Sequence[str], params: RenderingParams
) -> list[RenderedPrompt]:
    params = evolve(params, truncate_to=min(params.truncate_to or folder.max_model_len, folder.max_model_len))
    scores_pairs = "score" in folder.spec.tasks and folder.spec.scoring == "pairs"
    prompts = [PairPrompt(*pair) for pair in pairwise(texts)] if scores_pairs else [TextPrompt(text) for text in texts]
    return [renderer.render(prompt, params) for prompt in prompts]

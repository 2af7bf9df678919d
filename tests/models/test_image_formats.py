"""Images as models read them: the same pixels as transformers', in the right places, from any thread."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
import trio

from tests.kept_folders import by_name
from tests.model_folders import write_json
from tests.models.model_families import edit_json
from tests.models.vision_families import (
    NAFLEX_PROCESSOR,
    PICTURES,
    SENTENCES,
    SIZES,
    SeeingModel,
    clip,
    clip_of_today,
    colpali,
    colqwen2,
    picture,
    qwen2_vl,
    qwen3_vl,
    siglip2_naflex,
    siglip2_of_one_size,
)
from trio_pool_serve.errors import ContextLengthError, InvalidRequestError, MediaError, ModelLoadError
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.rendering.media.image_format import ImageFormat
from trio_pool_serve.types import Embed, ImageFeatures, TokenEmbed

FOLDERS = by_name(clip, clip_of_today, siglip2_of_one_size, siglip2_naflex, qwen2_vl, colqwen2, colpali)


def format_of(path: Path) -> ImageFormat:
    folder = read_model_folder(path)
    found = folder.image_format()
    assert found is not None
    return found


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write(tmp_path_factory.mktemp("seeing") / name) for name, write in FOLDERS.items()}


@pytest.fixture(scope="module", params=FOLDERS)
def path(request: pytest.FixtureRequest, paths: dict[str, Path]) -> Path:
    return paths[request.param]


def assert_same(ours: ImageFeatures, theirs: Any) -> None:
    assert set(ours.arrays) == set(theirs)
    for name, array in ours.arrays.items():
        assert np.array_equal(array, np.asarray(theirs[name])), name


def test_pixels_are_those_of_the_processor_that_transformers_finds(path: Path):
    processor, theirs = format_of(path).processor, transformers.AutoImageProcessor.from_pretrained(path)
    for image in PICTURES:
        assert_same(processor(image), theirs(image, return_tensors="np"))


async def test_threads_share_a_processor(path: Path):
    processor = format_of(path).processor
    expected = [processor(image) for image in PICTURES]
    made: dict[int, ImageFeatures] = {}

    async def process(number: int) -> None:
        made[number] = await trio.to_thread.run_sync(processor, PICTURES[number % len(PICTURES)])

    async with trio.open_nursery() as nursery:
        for number in range(4 * len(PICTURES)):
            nursery.start_soon(process, number)
    for number, features in made.items():
        assert_same(features, expected[number % len(PICTURES)].arrays)


def test_an_image_of_one_pixel_is_read(path: Path):
    assert min(format_of(path).processor(picture(1, 1)).tokens) >= 1


@pytest.mark.parametrize("size", [(10_000, 1), (1, 10_000)])
def test_a_thread_of_pixels_is_refused(path: Path, size: tuple[int, int]):
    with pytest.raises(MediaError, match=f"{size[0]} × {size[1]} pixels is too elongated"):
        format_of(path).processor(picture(*size))


def test_processors_of_different_models_are_told_apart(paths: dict[str, Path]):
    keys = [format_of(path).processor.key for path in paths.values()]
    assert len(set(keys)) == len(keys)


def test_the_same_pixels_cut_into_other_patches_are_told_apart(tmp_path: Path):
    """What is kept of an image counts its tokens."""
    path = clip(tmp_path / "clip")
    coarse = format_of(path).processor
    edit_json(path / "config.json", lambda config: config["vision_config"].update(patch_size=4))
    fine = format_of(path).processor
    assert coarse.key != fine.key
    assert (coarse(PICTURES[0]).tokens, fine(PICTURES[0]).tokens) == ((17,), (65,))


@pytest.mark.parametrize(
    ("name", "tokens"), [("clip", 17), ("siglip2_of_one_size", 16), ("siglip2_naflex", 20), ("colpali", 16)]
)
def test_an_image_has_as_many_tokens_as_its_tower_computes(paths: dict[str, Path], name: str, tokens: int):
    assert format_of(paths[name]).processor(PICTURES[0]).tokens == (tokens,)


@pytest.mark.parametrize("name", ["clip", "colpali"])
def test_a_text_with_an_image_is_refused_by_models_that_read_either(paths: dict[str, Path], name: str):
    images = format_of(paths[name])
    with pytest.raises(InvalidRequestError, match="an input cannot contain both"):
        images.expand(np.array([1, 2], dtype=np.int32), [images.processor(PICTURES[0])])


def test_each_placeholder_becomes_as_many_tokens_as_its_image_has(paths: dict[str, Path]):
    images = format_of(paths["qwen2_vl"])
    placeholder = placeholder_of(paths["qwen2_vl"])
    pictures = [images.processor(image) for image in PICTURES[:2]]
    (first,), (second,) = (features.tokens for features in pictures)
    assert first != second
    ids = np.array([50, placeholder, 60, 70, placeholder, 80], dtype=np.int32)
    prompt = images.expand(ids, pictures)
    assert prompt.token_ids.tolist() == [50, *[placeholder] * first, 60, 70, *[placeholder] * second, 80]
    assert prompt.images is not None
    assert prompt.images.tokens == (first, second)
    assert prompt.images.arrays["image_grid_thw"].shape == (2, 3)
    assert len(prompt.images.arrays["pixel_values"]) == 4 * (first + second)


def placeholder_of(path: Path) -> int:
    return int(transformers.AutoConfig.from_pretrained(path).image_token_id)


@pytest.mark.parametrize("written", [0, 1, 3])
def test_as_many_placeholders_as_images_are_wanted(paths: dict[str, Path], written: int):
    images = format_of(paths["qwen2_vl"])
    ids = np.array([50, *[placeholder_of(paths["qwen2_vl"])] * written, 60], dtype=np.int32)
    with pytest.raises(InvalidRequestError, match=f"has 2 images, but {written} placeholders"):
        images.expand(ids, [images.processor(image) for image in PICTURES[:2]])


def test_images_that_make_an_input_too_long_are_refused(tmp_path: Path):
    path = qwen2_vl(tmp_path / "qwen")
    edit_json(path / "sentence_bert_config.json", lambda config: config.update(max_seq_length=20))
    images = format_of(path)
    with pytest.raises(ContextLengthError, match="maximum context length is 20 tokens"):
        images.expand(np.array([placeholder_of(path)], dtype=np.int32), [images.processor(picture(*SIZES[0]))])


@pytest.mark.parametrize(
    ("write", "settings", "said"),
    [
        (clip, {"crop_size": 48}, "but the image tower takes 32 pixels a side"),
        (clip, {"size": {"width": 32}}, "cannot be used"),
        (clip, {"feature_extractor_type": "ViTFeatureExtractor"}, "ViTFeatureExtractor is not supported"),
        (siglip2_naflex, {"patch_size": 4}, "takes patches of 8 pixels"),
        (qwen3_vl, {"patch_size": 8}, "patches of 96 values"),
        (qwen3_vl, {"merge_size": 4}, "has merge_size 4, the model 2"),
        (qwen3_vl, NAFLEX_PROCESSOR, "does not prepare images for this model"),
    ],
)
def test_a_processor_that_does_not_fit_the_model_is_refused(
    tmp_path: Path, write: Callable[[Path], Path], settings: dict[str, Any], said: str
):
    path = write(tmp_path / "seeing")
    edit_json(path / "preprocessor_config.json", lambda written: written.update(settings))
    with pytest.raises(ModelLoadError, match=said):
        format_of(path)


def test_a_folder_without_a_processor_is_refused(tmp_path: Path):
    path = clip(tmp_path / "clip")
    (path / "preprocessor_config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"contains no preprocessor_config.json"):
        format_of(path)
    write_json(path / "processor_config.json", {"processor_class": "CLIPProcessor"})
    with pytest.raises(ModelLoadError, match=r"contains no preprocessor_config.json"):
        format_of(path)


def test_a_page_retriever_needs_its_placeholder_to_be_one_token(tmp_path: Path):
    path = colqwen2(tmp_path / "colqwen2")
    edit_json(path / "config.json", lambda config: config["vlm_config"].update(image_token_id=3))
    with pytest.raises(ModelLoadError, match="is not token 3 of the tokenizer"):
        format_of(path)


@pytest.mark.parametrize("name", ["qwen2_vl", "colqwen2", "colpali"])
def test_ids_with_a_placeholder_and_no_image_are_refused(paths: dict[str, Path], name: str):
    """The model would take the image of another row of the batch for it."""
    images: Any = format_of(paths[name])
    assert images.expand(np.array([50, 60], dtype=np.int32), ()).images is None
    with pytest.raises(InvalidRequestError, match="a placeholder for an image, but no image"):
        images.expand(np.array([50, images.token_id, 60], dtype=np.int32), ())


@pytest.mark.parametrize("name", ["clip", "siglip2_naflex", "colqwen2", "colpali"])
async def test_bfloat16_is_near_float32(paths: dict[str, Path], name: str):
    """Pixels are handed over in the type that the model computes in."""
    exact, rough = (SeeingModel(paths[name], dtype=dtype) for dtype in ("float32", "bfloat16"))
    params = Embed() if "embed" in exact.folder.spec.tasks else TokenEmbed()
    items = [*SENTENCES, *PICTURES]
    for wanted, got in zip(await exact.compute(items, params), await rough.compute(items, params), strict=True):
        cosines = (wanted * got).sum(-1) / np.linalg.norm(wanted, axis=-1) / np.linalg.norm(got, axis=-1)
        assert np.median(cosines) > 0.99

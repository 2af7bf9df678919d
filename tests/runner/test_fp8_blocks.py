"""Linear layers in FP8 are near the model, depend on no other token, and take half of the memory."""

import re
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from attrs import evolve
from msgspec.structs import replace
from torch import Tensor, nn

from tests.models.lora_adapters import vectors_by_peft, write_lora
from tests.models.model_families import TEXTS, ServedModel, write_family
from tests.models.vision_families import DUAL_ENCODERS, SeeingModel
from tests.runner.test_fused_blocks import fused
from tests.runner.test_varlen import packed_backbone
from tests.simgpu.activity import watched
from tests.simgpu.serving import BATCH_TOKENS, WAYS, Way, on_simulated_device
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.runner.cuda import fp8_blocks
from trio_pool_serve.runner.cuda.fp8_blocks import MIN_FP8_COSINE, Fp8Linear, quantize_blocks
from trio_pool_serve.types import Batch, TokenEmbed, Vectors

NAMES = ("bert", "modernbert", "qwen3")


def quantized(path: Path, dtype: str = "bfloat16") -> tuple[ServedModel, float]:
    """Return a model whose layers torch computes on this CPU as on a GPU, and the cosine that is said."""
    served = ServedModel(path, dtype=dtype)
    return served, quantize_blocks(served.runner.loaded.backbone, served.runner.params)


def cosines(ours: Sequence[Vectors], theirs: Sequence[Vectors]) -> Tensor:
    pairs = [(torch.tensor(a), torch.tensor(b)) for a, b in zip(ours, theirs, strict=True)]
    return torch.cat([nn.functional.cosine_similarity(a, b, dim=-1).view(-1) for a, b in pairs])


def test_a_layer_gives_the_products_of_what_it_stores_and_its_weight_can_be_read():
    torch.manual_seed(0)
    layer, inputs = nn.Linear(64, 48), 5 * torch.randn(2, 7, 64)
    weight, exact = layer.weight.detach().clone(), layer(inputs)
    Fp8Linear.convert(layer)
    assert isinstance(layer, Fp8Linear)
    assert {name: each.dtype for name, each in layer.named_parameters()} == {
        "quantized": torch.float8_e4m3fn,
        "bias": torch.float32,
    }
    assert (layer.weight - weight).abs().max() <= weight.abs().max() / 2**4  # half of the step of the largest numbers
    assert layer.weight.dtype == torch.float32
    rows, scale = fp8_blocks.quantize(inputs.flatten(0, 1))
    stored = (rows.float() * scale) @ layer.weight.T + layer.bias
    assert torch.allclose(layer(inputs).flatten(0, 1), stored, atol=1e-4)
    assert nn.functional.cosine_similarity(layer(inputs), exact, dim=-1).min() > 0.99


def test_a_row_does_not_depend_on_the_others_and_zeros_stay_zeros():
    layer = nn.Linear(32, 16, bias=False)
    Fp8Linear.convert(layer)
    rows = torch.randn(8, 32)
    others = torch.cat([rows[:4], 1e4 * rows[4:]])
    assert torch.equal(layer(rows)[:4], layer(others)[:4])
    assert not layer(torch.zeros(3, 32)).any()


@pytest.mark.parametrize("name", NAMES)
async def test_vectors_are_near_those_in_float32_padded_and_packed(tmp_path: Path, name: str):
    path = write_family(tmp_path / name, name)
    exact = await ServedModel(path).embed(TEXTS)
    served, cosine = quantized(path)
    assert MIN_FP8_COSINE <= cosine < 1
    assert cosines(await served.embed(TEXTS), exact).min() > 0.95
    served.runner = evolve(served.runner, compute=packed_backbone(served))
    assert cosines(await served.embed(TEXTS), exact).min() > 0.95


async def test_weights_of_the_blocks_take_half_and_those_of_bfloat16_are_freed(tmp_path: Path):
    served = ServedModel(write_family(tmp_path / "bert", "bert"), dtype="bfloat16")
    backbone = served.runner.loaded.backbone
    before = [layer for name, layer in backbone.model.named_modules() if "layer." in name and type(layer) is nn.Linear]
    freed = [weakref.ref(layer.weight) for layer in before]
    weights, parameters = sum(layer.weight.nbytes for layer in before), backbone.parameters
    total = backbone.weight_bytes
    quantize_blocks(backbone, served.runner.params)
    assert all(type(layer) is Fp8Linear for layer in before)
    assert not any(reference() is not None for reference in freed)
    assert backbone.weight_bytes == total - weights // 2
    assert backbone.parameters == parameters
    assert type(backbone.model.pooler.dense) is nn.Linear


@pytest.mark.parametrize("name", NAMES)
async def test_adapters_are_added_to_what_the_layers_give(tmp_path: Path, name: str):
    path = write_family(tmp_path / name, name)
    adapter = write_lora(tmp_path / "adapter", path)
    served, _ = quantized(path)
    rows = [replace(row, adapter=adapter) for row in await served.requests(TEXTS)]
    adapted = [value for (value,) in await served.runner.launch(Batch(tuple(rows)))]
    by_peft = vectors_by_peft(path, adapter, TEXTS)
    without = await served.embed(TEXTS)
    assert cosines(adapted, by_peft).mean() > 0.95 > 0.8 > cosines(without, by_peft).mean()


def test_a_model_that_differs_too_much_or_has_no_blocks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bert = write_family(tmp_path / "bert", "bert")
    differs = r"its states differ too much from bfloat16's: cosine 0\.99\d\d on average, the minimum is 0\.9999"
    with on_simulated_device():
        for constant, value, reason in (
            ("MIN_FP8_COSINE", 0.9999, differs),
            ("ALIGNMENT", 7, "it has no blocks of linear layers"),
        ):
            monkeypatch.setattr(fp8_blocks, constant, value)
            with pytest.raises(
                ModelLoadError, match=rf"--dtype fp8: .* compute bert in it \({reason}\)\. Use --dtype auto"
            ):
                ServedModel(bert, dtype="fp8", settings=WAYS["padded"])


@pytest.mark.parametrize("backend", ["auto", "torch", "compile"])
def test_a_cpu_is_refused(tmp_path: Path, backend: str):
    with pytest.raises(
        ModelLoadError, match=r"--dtype fp8 is for GPUs .*, not for a CPU; accepted on CPU: auto, float32"
    ):
        ServedModel(write_family(tmp_path / "bert", "bert"), dtype="fp8", settings={"backend": backend})


def test_models_that_read_images_are_refused(tmp_path: Path):
    path = DUAL_ENCODERS["clip"](tmp_path / "clip")
    with on_simulated_device(), pytest.raises(ModelLoadError, match="--dtype fp8 does not apply to models that read"):
        SeeingModel(path, dtype="fp8", settings={"backend": "torch"})


@pytest.mark.parametrize("way", [way if way == "packed" else pytest.param(way, marks=pytest.mark.slow) for way in WAYS])
@pytest.mark.parametrize("name", NAMES)
async def test_a_launch_does_not_wait_for_the_device_and_says_what_it_computes_in(tmp_path: Path, name: str, way: Way):
    path = write_family(tmp_path / name, name)
    exact = await ServedModel(path).values(TEXTS, TokenEmbed())
    with on_simulated_device():
        served = ServedModel(path, dtype="fp8", settings=WAYS[way])
        runner = served.runner.fitted(BATCH_TOKENS)
        batch = Batch(tuple(await served.ask(TEXTS, [(TokenEmbed(),)] * len(TEXTS))))
        with watched() as activity:
            handle = runner.launch(batch)
        activity.require_asynchronous()
        assert cosines([row for (row,) in await handle], [row for (row,) in exact]).min() > 0.9
    assert re.search(r"fp8 on simgpu:0, .*blocks in fp8 \(cosine 0\.9\d{3} with bfloat16\)", str(runner.facts))
    assert ("CUDA graphs" in str(runner.facts)) == (way == "graphed")


def test_two_precisions_have_two_fingerprints(tmp_path: Path):
    path = write_family(tmp_path / "bert", "bert")
    with on_simulated_device():
        facts = [ServedModel(path, dtype=dtype, settings=WAYS["padded"]).runner.facts for dtype in ("bfloat16", "fp8")]
    assert [each.computed_by.dtype for each in facts] == ["bfloat16", "fp8"]
    assert len({each.computed_by.fingerprint for each in facts}) == 2
    assert facts[1].weight_bytes < facts[0].weight_bytes


@pytest.mark.slow
@pytest.mark.usefixtures("new_compiler")
@pytest.mark.filterwarnings("ignore")  # of the compiler's own code
@pytest.mark.parametrize("name", NAMES)
async def test_the_layers_are_compiled_without_a_break(tmp_path: Path, name: str):
    """A break would be an error: blocks are compiled as one graph each, and nothing is compiled again."""
    path = write_family(tmp_path / name, name)
    served, _ = quantized(path)
    expected = await served.embed(TEXTS)
    served.runner = evolve(served.runner, compute=fused(served, tmp_path))
    torch.compiler.set_stance("fail_on_recompile")
    assert cosines(await served.embed(TEXTS), expected).min() > 0.98
    alone = [(await served.embed([text]))[0] for text in TEXTS]
    assert cosines(alone, expected).min() > 0.98

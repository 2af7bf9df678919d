"""Tiny models that see, with random weights, as their authors lay out the folders."""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import transformers
from attrs import define, field
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers

from tests.kept_folders import built_once, by_name, each_built_once
from tests.model_folders import write_json
from tests.models.model_families import (
    CORPUS,
    ENCODER,
    HIDDEN,
    NEW_NORMALIZE,
    Module,
    ServedModel,
    byte_pairs,
    dense,
    edit_json,
    gemma_tokenizer,
    pooling,
    vocab_and_merges,
    write_modules,
)
from trio_pool_serve.prompts import RenderingParams
from trio_pool_serve.rendering.media.image_format import ImageFormat
from trio_pool_serve.types import RenderedPrompt, Vectors

SENTENCES = (
    "a photo of two cats on a couch",
    "An event loop that is blocked serves nobody, however many clients are waiting for their embeddings.",
    "yes",
    "Größer, 東京, emoji 🙂!",
    "A Nursery OWNS its tasks.",
)
"""None is longer than a tower's limit, one has letters that no corpus had, one has capitals."""

SIZES = ((64, 48), (30, 90), (56, 56), (1, 1), (400, 20), (131, 200))
"""Width and height, pixels."""


def picture(width: int, height: int) -> Image.Image:
    """Noise on a gradient: neither flat nor without any order."""
    random_state = np.random.default_rng(width * 1000 + height)
    noise = random_state.integers(0, 120, (height, width, 3))
    slope = np.linspace(0, 135, height * width).reshape(height, width, 1)
    return Image.fromarray((noise + slope).astype(np.uint8), "RGB")


PICTURES = tuple(picture(*size) for size in SIZES)

VISION = {**ENCODER, "patch_size": 8}


def randomize(model: Any) -> Any:
    """Give every weight a size at which its faults would show, in float32."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.float().named_parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
            elif parameter.ndim > 1 and "logit" not in name:
                fan_in = parameter[0].numel()
                parameter.copy_(torch.randn_like(parameter) * (1.0 if "embedding" in name else fan_in**-0.5))
    return model


def write_seeing(folder: Path, model: Any, tokenizer: Any, processor: Mapping[str, Any]) -> Path:
    """Write a model; its tokenizer is ``None`` if the folder has one."""
    randomize(model).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    write_json(folder / "preprocessor_config.json", processor)
    return folder


# -- tokenizers -----------------------------------------------------------------------------------------


def clip_tokenizer() -> Any:
    letters = pre_tokenizers.ByteLevel.alphabet()
    pieces = [*sorted(letters), *(f"{letter}</w>" for letter in sorted(letters)), "th", "the</w>", "ca", "cat"]
    vocabulary = {piece: index for index, piece in enumerate([*pieces, "<|startoftext|>", "<|endoftext|>"])}
    merges = [("t", "h"), ("th", "e</w>"), ("c", "a"), ("ca", "t")]
    return transformers.CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=77)


def write_siglip_tokenizer(folder: Path) -> Any:
    """SentencePiece's unigrams; the padding token is the one that ends a text."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*CORPUS, *SENTENCES]),
        model_writer=model,
        vocab_size=150,
        hard_vocab_limit=False,
        pad_id=-1,
        bos_id=-1,
        eos_id=1,
        unk_id=2,
        minloglevel=2,
        control_symbols=["<pad>"],
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "spiece.model"
    path.write_bytes(model.getvalue())
    tokenizer = transformers.SiglipTokenizer(str(path), model_max_length=64)
    tokenizer.save_pretrained(folder)
    edit_json(folder / "tokenizer_config.json", lambda config: config.update(model_input_names=["input_ids"]))
    return tokenizer


def write_siglip2_tokenizer(folder: Path, **more: Any) -> Any:
    """Gemma's, as the published folders name it; their configs say what is handed to the model, and how long."""
    tokenizer = gemma_tokenizer()
    tokenizer.save_pretrained(folder)
    said = {"model_max_length": 64, "padding_side": "right", "model_input_names": ["input_ids"], **more}
    edit_json(folder / "tokenizer_config.json", lambda config: config.update(said))
    return tokenizer


# -- dual encoders --------------------------------------------------------------------------------------

CLIP_PROCESSOR = {
    "crop_size": 32,
    "do_center_crop": True,
    "do_normalize": True,
    "do_resize": True,
    "feature_extractor_type": "CLIPFeatureExtractor",
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
    "size": 32,
}
"""As OpenAI's folders have it, but for the size."""

RESCALED = {
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "rescale_factor": 0.00392156862745098,
}

SIGLIP_PROCESSOR = RESCALED | {
    "image_processor_type": "SiglipImageProcessor",
    "processor_class": "SiglipProcessor",
    "resample": 3,
    "size": {"height": 32, "width": 32},
}

NAFLEX_PROCESSOR = RESCALED | {
    "do_convert_rgb": None,
    "image_processor_type": "Siglip2ImageProcessor",
    "max_num_patches": 20,
    "patch_size": 8,
    "processor_class": "Siglip2Processor",
    "resample": 2,
}


def write_clip(folder: Path, *, eos_token_id: int | None = None) -> Path:
    """``openai/clip-*``; the published configs say 2 where the tokenizer's end is another token."""
    tokenizer = clip_tokenizer()
    text = {
        **ENCODER,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 77,
        "eos_token_id": 2 if eos_token_id is None else eos_token_id,
        "bos_token_id": 0,
        "pad_token_id": 1,
    }
    config = transformers.CLIPConfig(text_config=text, vision_config={**VISION, "image_size": 32}, projection_dim=24)
    return write_seeing(folder, transformers.CLIPModel(config), tokenizer, CLIP_PROCESSOR)


@built_once
def clip(folder: Path) -> Path:
    return write_clip(folder)


@built_once
def clip_of_today(folder: Path) -> Path:
    """As transformers writes it now: the end named rightly, the processor in a file of another name."""
    write_clip(folder, eos_token_id=clip_tokenizer().eos_token_id)
    (folder / "preprocessor_config.json").unlink()
    sized = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    processor = transformers.CLIPProcessor(transformers.CLIPImageProcessorPil(**sized), clip_tokenizer())
    processor.save_pretrained(folder)
    return folder


@built_once
def clip_of_sentence_transformers(folder: Path) -> Path:
    """``sentence-transformers/clip-ViT-B-32``."""
    write_clip(folder / "0_CLIPModel")
    module = {"idx": 0, "name": "0", "path": "0_CLIPModel", "type": "sentence_transformers.models.CLIPModel"}
    write_json(folder / "modules.json", [module])
    write_json(folder / "config_sentence_transformers.json", {"__version__": {"sentence_transformers": "2.0.0"}})
    return folder


TOWER_METHODS = {
    side: {"method": f"get_{side}_features", "method_output_name": "pooler_output"} for side in ("text", "image")
}


def write_tower_modules(folder: Path, *modules: Module, **more: Any) -> Path:
    """What sentence-transformers writes of a dual encoder now."""
    config = {
        "transformer_task": "feature-extraction",
        "modality_config": TOWER_METHODS,
        "module_output_name": "sentence_embedding",
        **more,
    }
    write_json(folder / "sentence_bert_config.json", config)
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"query": "a photo of "}})
    write_modules(folder, modules)
    return folder


def write_siglip(folder: Path, tokenizer: Any) -> Path:
    """``google/siglip-*`` and SigLIP 2 of one resolution: the config leaves out what is as usual."""
    text = siglip_text(tokenizer)
    config = transformers.SiglipConfig(text_config=text, vision_config={**VISION, "image_size": 32})
    write_seeing(folder, transformers.SiglipModel(config), None, SIGLIP_PROCESSOR)
    edit_json(folder / "config.json", lambda written: written["text_config"].pop("max_position_embeddings") and None)
    return folder


def siglip_text(tokenizer: Any) -> dict[str, Any]:
    return {**ENCODER, "vocab_size": len(tokenizer), "max_position_embeddings": 64, "projection_size": HIDDEN}


@built_once
def siglip(folder: Path) -> Path:
    return write_siglip(folder, write_siglip_tokenizer(folder))


@built_once
def siglip2_of_one_size(folder: Path) -> Path:
    return write_siglip(folder, write_siglip2_tokenizer(folder))


@built_once
def siglip2_naflex(folder: Path) -> Path:
    text = siglip_text(write_siglip2_tokenizer(folder))
    config = transformers.Siglip2Config(text_config=text, vision_config={**VISION, "num_patches": 16})
    return write_seeing(folder, transformers.Siglip2Model(config), None, NAFLEX_PROCESSOR)


DUAL_ENCODERS: Mapping[str, Callable[[Path], Path]] = {
    **by_name(clip, clip_of_today, clip_of_sentence_transformers, siglip, siglip2_of_one_size, siglip2_naflex),
    **each_built_once(
        clip_with_heads=lambda folder: write_tower_modules(
            write_clip(folder), dense(24, 16), Module(type=NEW_NORMALIZE)
        ),
        # As transformers pads if the folder does not say.
        siglip2_filled_on_the_left=lambda folder: write_siglip(
            folder, write_siglip2_tokenizer(folder, padding_side="left")
        ),
        siglip2_masked=lambda folder: write_siglip(
            folder, write_siglip2_tokenizer(folder, model_input_names=["input_ids", "attention_mask"])
        ),
        # sentence-transformers is told to pad texts, as the model needs it.
        siglip_with_modules=lambda folder: write_tower_modules(
            siglip2_of_one_size(folder),
            Module(type=NEW_NORMALIZE),
            processing_kwargs={"text": {"padding": "max_length", "max_length": 64}},
        ),
    ),
}


# -- vision-language models -------------------------------------------------------------------------------

NAMES = ("endoftext", "im_start", "im_end", "vision_start", "vision_end", "image_pad", "video_pad")
QWEN_TOKENS = tuple(f"<|{name}|>" for name in NAMES)

QWEN_TEMPLATE = """\
{%- if messages[0].role != 'system' -%}
<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'text' -%}
{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
"""What Qwen's templates do with texts and images."""

QWEN_PROCESSOR = {
    "min_pixels": 64,
    "max_pixels": 4096,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2VLProcessor",
}
"""As Qwen's folders have it, but for the sizes."""

QWEN_TEXT = {
    **ENCODER,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
}

QWEN_VISION = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}

QWEN_TOWER = {"hidden_size": HIDDEN, "out_hidden_size": HIDDEN, "intermediate_size": 48}

QWEN_MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen2_vl": ("Qwen2VL", {"embed_dim": HIDDEN, "hidden_size": HIDDEN, "mlp_ratio": 2}),
    "qwen2_5_vl": ("Qwen2_5_VL", QWEN_TOWER | {"window_size": 16, "fullatt_block_indexes": [1]}),
    "qwen3_vl": ("Qwen3VL", QWEN_TOWER | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}),
}
"""The prefix of transformers' classes, and the vision config."""


def qwen_vl_tokenizer() -> Any:
    pairs = byte_pairs(*QWEN_TOKENS)
    return transformers.Qwen2Tokenizer(
        **vocab_and_merges(pairs),
        padding_side="left",
        model_max_length=2048,
        extra_special_tokens=list(QWEN_TOKENS[1:]),
        chat_template=QWEN_TEMPLATE,
    )


def qwen_config(kind: str, tokenizer: Any) -> Any:
    name, vision = QWEN_MODELS[kind]
    text = {**QWEN_TEXT, "vocab_size": len(tokenizer), "head_dim": 16}
    tokens = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    special = {f"{role}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>") for role, token in tokens.items()}
    return getattr(transformers, f"{name}Config")(
        text_config=text, vision_config={**QWEN_VISION, **vision}, tie_word_embeddings=False, **special
    )


def write_qwen(folder: Path, kind: str) -> Path:
    """A bare folder, with the language model head that such models come with."""
    tokenizer = qwen_vl_tokenizer()
    model = getattr(transformers, f"{QWEN_MODELS[kind][0]}ForConditionalGeneration")(qwen_config(kind, tokenizer))
    return write_seeing(folder, model, tokenizer, QWEN_PROCESSOR)


STATES = {"method": "forward", "method_output_name": "last_hidden_state"}


def write_qwen_embedder(folder: Path, kind: str, **more: Any) -> Path:
    """As Qwen3-VL-Embedding is published: sentence-transformers' modules, the last token, unit length."""
    write_qwen(folder, kind)
    modalities = dict.fromkeys(("text", "image", "video"), STATES) | {"message": {**STATES, "format": "structured"}}
    config = {"modality_config": modalities, "module_output_name": "token_embeddings", **more}
    write_json(folder / "sentence_bert_config.json", {"transformer_task": "feature-extraction", **config})
    prompts = {"query": "Find the picture that is described.", "document": ""}
    write_json(folder / "config_sentence_transformers.json", {"prompts": prompts, "similarity_fn_name": "cosine"})
    write_modules(folder, (pooling("lasttoken"), Module(type=NEW_NORMALIZE)))
    return folder


@built_once
def qwen2_vl_of_old(folder: Path) -> Path:
    """As Qwen published it: the config flat, the processor's template in a file of its own, the weights unnested."""
    write_qwen_embedder(folder, "qwen2_vl")
    edit_json(folder / "config.json", lambda config: config.update(config.pop("text_config"), model_type="qwen2_vl"))
    (folder / "chat_template.jinja").unlink()
    write_json(folder / "chat_template.json", {"chat_template": QWEN_TEMPLATE})
    edit_json(folder / "tokenizer_config.json", lambda config: config.update(chat_template=QWEN_TEMPLATE))
    path = folder / "model.safetensors"
    named = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): weight
        for name, weight in load_file(path).items()
    }
    save_file(named, path, metadata={"format": "pt"})
    return folder


GENERATES = {"chat_template": {"add_generation_prompt": True}}
VISION_LANGUAGE = {
    **each_built_once(
        qwen2_vl=lambda folder: write_qwen_embedder(folder, "qwen2_vl"),
        qwen2_5_vl=lambda folder: write_qwen_embedder(folder, "qwen2_5_vl"),
        qwen3_vl=lambda folder: write_qwen_embedder(folder, "qwen3_vl", processing_kwargs=GENERATES),
    ),
    **by_name(qwen2_vl_of_old),
}
qwen2_vl, qwen3_vl = VISION_LANGUAGE["qwen2_vl"], VISION_LANGUAGE["qwen3_vl"]


# -- page retrievers --------------------------------------------------------------------------------------


@built_once
def colqwen2(folder: Path) -> Path:
    """``vidore/colqwen2-v1.0-hf``."""
    tokenizer = qwen_vl_tokenizer()
    config = transformers.ColQwen2Config(vlm_config=qwen_config("qwen2_vl", tokenizer), embedding_dim=20)
    processor = {**QWEN_PROCESSOR, "processor_class": "ColQwen2Processor"}
    write_seeing(folder, transformers.ColQwen2ForRetrieval(config), tokenizer, processor)
    write_json(folder / "processor_config.json", {"processor_class": "ColQwen2Processor"})
    return folder


@built_once
def colpali(folder: Path) -> Path:
    """``vidore/colpali-v1.3-hf``."""
    tokenizer = gemma_tokenizer()
    tokenizer.model_max_length = 1024
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.add_tokens([f"<loc{index:04}>" for index in range(1024)] + [f"<seg{index:03}>" for index in range(128)])
    image_token_id = tokenizer.convert_tokens_to_ids("<image>")
    text = {**ENCODER, "vocab_size": len(tokenizer), "num_key_value_heads": 1, "head_dim": 16, "model_type": "gemma"}
    vision = {**VISION, "image_size": 32, "projection_dim": HIDDEN, "model_type": "siglip_vision_model"}
    vlm = transformers.PaliGemmaConfig(
        text_config=text,
        vision_config={**vision, "vision_use_head": False},
        projection_dim=HIDDEN,
        image_token_id=image_token_id,
    )
    config = transformers.ColPaliConfig(vlm_config=vlm, embedding_dim=20)
    processor = {**SIGLIP_PROCESSOR, "processor_class": "ColPaliProcessor", "image_seq_length": 16}
    return write_seeing(folder, transformers.ColPaliForRetrieval(config), tokenizer, processor)


def write_page_modules(folder: Path, mask: Mapping[str, Any], *, pool_factor: float | None = None) -> Path:
    """Have sentence-transformers write its modules for a bare folder."""
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling, MultiVectorMask

    bare = colqwen2(folder.with_name(f"{folder.name}-bare"))
    model = MultiVectorEncoder(str(bare), device="cpu", local_files_only=True)
    model[1] = MultiVectorMask(**mask)
    if pool_factor is not None:
        model.append(HierarchicalTokenPooling(pool_factor))
    model.save_pretrained(str(folder), create_model_card=False)
    return folder


@built_once
def colqwen2_with_modules(folder: Path) -> Path:
    return write_page_modules(folder, {})


@built_once
def colqwen2_of_patches_only(folder: Path) -> Path:
    """What stands around a page does not count."""
    image = qwen_vl_tokenizer().convert_tokens_to_ids("<|image_pad|>")
    return write_page_modules(folder, {"keep_only_token_ids": [image]})


@built_once
def colqwen2_pooled(folder: Path) -> Path:
    return write_page_modules(folder, {}, pool_factor=3)


PAGE_RETRIEVERS = by_name(colqwen2, colpali, colqwen2_with_modules, colqwen2_of_patches_only, colqwen2_pooled)


# -- serving them ---------------------------------------------------------------------------------------


@define(eq=False)
class SeeingModel(ServedModel):
    """A served model, and how it reads images."""

    images: ImageFormat = field(init=False)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        found = self.folder.image_format()
        assert found is not None
        self.images = found

    async def render(self, one: Any, how: RenderingParams) -> RenderedPrompt:
        """Render a text, or an image by itself."""
        if not isinstance(one, Image.Image):
            return await super().render(one, how)
        alone = self.images.alone(self.images.processor(one))
        assert alone is not None
        return alone

    def in_conversation(self, content: "Content", **more: Any) -> RenderedPrompt:
        """Put texts and images into the conversation that sentence-transformers makes of them."""
        options = self.folder.spec.conversation.options
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.path)
        ids = np.array(tokenizer(qwen_text(self.path, content, **more, **options))["input_ids"], dtype=np.int32)
        pictures = [part for part in content if not isinstance(part, str)]
        return self.images.expand(ids, [self.images.processor(one) for one in pictures])


def towers_of_transformers(folder: Path) -> tuple[Vectors, Vectors]:
    """What transformers makes of SENTENCES and PICTURES, by the processor that it finds itself."""
    model = transformers.AutoModel.from_pretrained(folder).eval()
    processor = transformers.AutoProcessor.from_pretrained(folder)
    padding = "max_length" if model.config.model_type.startswith("siglip") else True
    texts = processor.tokenizer(list(SENTENCES), padding=padding, truncation=True, max_length=None, return_tensors="pt")
    pictures = processor.image_processor(list(PICTURES), return_tensors="pt")
    with torch.inference_mode():
        return (
            model.get_text_features(**texts).pooler_output.numpy(),
            model.get_image_features(**pictures).pooler_output.numpy(),
        )


Content: TypeAlias = Sequence[str | Image.Image]
"""Texts and images of one message, in order."""

CONTENTS: Sequence[Content] = (
    ["a photo of two cats on a couch"],
    [PICTURES[0]],
    ["", PICTURES[1], " is taller than wide, and ", PICTURES[4], " is not."],
    ["An event loop that is blocked serves nobody, however many clients are waiting for their embeddings."],
    [PICTURES[3]],
    [PICTURES[5], "What is in this picture?"],
    ["Größer, 東京, emoji 🙂!"],
)
"""Messages of texts, of an image, of several."""


def conversation(path: Path, content: Content, instruction: str = "") -> list[dict[str, Any]]:
    """What sentence-transformers makes of an input, in its own words."""
    from sentence_transformers.base.modality import InputFormatter

    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    formatter = InputFormatter("qwen2_vl", processor=tokenizer)
    assert formatter.message_format == "structured"
    [message] = formatter.to_message({"text": ""})
    message["content"] = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
        for part in content
    ]
    messages = [[message]]
    if instruction:
        messages = formatter.prepend_prompt_to_messages(messages, instruction)
    return messages[0]


def qwen_text(path: Path, content: Content, instruction: str = "", **options: Any) -> str:
    """The text of a conversation, one placeholder for each image."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    text: str = tokenizer.apply_chat_template(conversation(path, content, instruction), tokenize=False, **options)
    return text


def qwen_inputs(path: Path, contents: Sequence[Content], side: str, instruction: str = "", **options: Any) -> Any:
    """What transformers' processor makes of a batch, written out: it needs torchvision for the videos that none has."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, padding_side=side)
    processor = transformers.AutoImageProcessor.from_pretrained(path)
    pictures = [part for content in contents for part in content if not isinstance(part, str)]
    seen = dict(processor(pictures, return_tensors="pt")) if pictures else {}
    sizes = iter((seen["image_grid_thw"].prod(-1) // processor.merge_size**2).tolist() if pictures else ())
    texts = [
        re.sub(
            r"<\|image_pad\|>", lambda found: found[0] * next(sizes), qwen_text(path, content, instruction, **options)
        )
        for content in contents
    ]
    inputs = dict(tokenizer(texts, padding=True, return_tensors="pt")) | seen
    if pictures:
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == tokenizer.convert_tokens_to_ids("<|image_pad|>")).int()
    return inputs


def qwen_states(path: Path, contents: Sequence[Content], side: str = "left", **more: Any) -> list[Vectors]:
    """The states of each input's tokens, by transformers."""
    model = transformers.AutoModel.from_pretrained(path).eval()
    inputs = qwen_inputs(path, contents, side, **more)
    with torch.inference_mode():
        states = model(**inputs).last_hidden_state
    return [row[mask.bool()].numpy() for row, mask in zip(states, inputs["attention_mask"], strict=True)]

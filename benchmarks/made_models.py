"""Models that exist for their inputs: shaped like real ones where rendering is concerned, next to nothing to compute.

Nothing is downloaded; the weights are random.
"""

import json
from pathlib import Path

IMAGES = "images"
"""Takes images as CLIP ViT-B/32 does: 224 × 224, bicubic, cropped."""

EMBEDS = "embeds"
"""Takes conversations, and token embeddings of 4096 numbers, as an 8B language model does."""

HIDDEN = 4096

CHATML = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""


def make_models(folder: Path) -> dict[str, Path]:
    """Write the models into a folder; return where, by their names."""
    import torch

    torch.manual_seed(0)
    return {IMAGES: _write_clip(folder / IMAGES), EMBEDS: _write_decoder(folder / EMBEDS)}


def _write_clip(folder: Path) -> Path:
    from transformers import CLIPConfig, CLIPModel

    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    config = CLIPConfig(
        text_config={**small, **special, "vocab_size": 300, "max_position_embeddings": 77},
        vision_config={**small, "image_size": 224, "patch_size": 32},
        projection_dim=64,
    )
    CLIPModel(config).save_pretrained(folder)
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": 224},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": 224, "width": 224},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "do_convert_rgb": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    _write_byte_tokenizer(folder, ["<|startoftext|>", "<|endoftext|>"], max_length=77, around=True)
    return folder


def _write_decoder(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=300,
        hidden_size=HIDDEN,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=16384,
        pad_token_id=0,
    )
    LlamaModel(config).save_pretrained(folder)
    _write_byte_tokenizer(folder, ["<|im_start|>", "<|im_end|>"], max_length=16384, around=False)
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def _write_byte_tokenizer(folder: Path, special: list[str], *, max_length: int, around: bool) -> None:
    """Write a tokenizer with a token per byte, and two special ones, put around a text if it is to have them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate([*special, *alphabet])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    if around:
        first, last = special
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A {last}", special_tokens=[(first, 0), (last, 1)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "bos_token": special[0],
        "eos_token": special[1],
        "pad_token": special[1] if around else special[0],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))

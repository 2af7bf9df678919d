"""Dual encoders: a tower for texts and one for images, which give vectors of one space.

CLIP (Radford et al., https://arxiv.org/abs/2103.00020), SigLIP (Zhai et al., https://arxiv.org/abs/2303.15343) and
SigLIP 2 (Tschannen et al., https://arxiv.org/abs/2502.14786), as bare transformers folders or behind
sentence-transformers' modules.json.
"""

from attrs import frozen

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.embedding.spec import similarity_of
from trio_pool_serve.models.files.folder_files import FolderFiles, ModuleFiles
from trio_pool_serve.models.files.modalities import modality_config, refuse_lengths, refuse_options, require_methods
from trio_pool_serve.models.model_spec import ModelSpec, Similarity

CLASSES = {"clip": "CLIPModel", "siglip": "SiglipModel", "siglip2": "Siglip2Model"}
"""The model types, and what their weights are saved from."""

READ_FILLED = frozenset({"siglip", "siglip2"})
"""Model types that were trained on texts filled up to their longest, and read the last token's state."""

METHODS = {"text": ("get_text_features", "pooler_output"), "image": ("get_image_features", "pooler_output")}

USUAL_PATCH_SIZE = {"clip": 32, "siglip": 16, "siglip2": 16}
"""Pixels, where vision_config leaves it out."""

PADDING = {"text": ("padding", "truncation", "max_length")}
"""Options by which sentence-transformers is told to fill texts up, as SigLIP's own processor is."""


@frozen(kw_only=True)
class ImageTower:
    """The tower for images.

    ``image_size`` (pixels a side) is ``None`` where images keep their shape. A vector is made of the patches' states,
    and of one more that stands for the whole image if ``has_class_token``.
    """

    image_size: int | None
    patch_size: int
    has_class_token: bool

    def tokens(self, patches: int) -> int:
        """Return the length of the sequence that so many patches make."""
        return patches + self.has_class_token


@frozen(kw_only=True)
class TextFilling:
    """Every text is filled up to ``length`` tokens, as in training.

    ``attends`` says whether the tower looks at what was added; only if it does may that be ``on_the_left``.
    """

    length: int
    attends: bool
    on_the_left: bool = False


@frozen(kw_only=True)
class DualEncoder(ModelSpec):
    """One vector per text, and one per image."""

    modules: tuple[ModuleFiles, ...] = ()
    """Those behind the towers, in order."""
    vector_similarity: Similarity = "cosine"
    images: ImageTower
    filling: TextFilling | None = None

    tasks = frozenset({"embed", "score"})
    scoring = "vectors"

    @property
    def similarity(self) -> Similarity:
        """``similarity_fn_name`` of config_sentence_transformers.json."""
        return self.vector_similarity


def read_dual_encoder(files: FolderFiles, config: ModelConfig) -> DualEncoder | None:
    """Take folders of the model types known."""
    del config
    kind = files.config.get("model_type")
    if kind not in CLASSES:
        return None
    if any(name != CLASSES[kind] for name in files.architectures):
        raise ModelLoadError(f"{files.architectures[0]} is not served: of {kind} models, {CLASSES[kind]} is.")
    _check_modules(files)
    return DualEncoder(
        modules=files.modules[1:],
        vector_similarity=similarity_of(files),
        images=_image_tower(files, kind),
        filling=_filling(files) if kind in READ_FILLED else None,
    )


def _check_modules(files: FolderFiles) -> None:
    refuse_lengths(files)
    refuse_options(files, PADDING)
    asked = (files.module_config.get("processing_kwargs") or {}).get("text") or {}
    if asked.get("padding", True) not in (True, "max_length", "longest") or not asked.get("truncation", True):
        raise ModelLoadError(f"processing_kwargs asks for texts {dict(asked)}, which is not supported.")
    if not files.modules:
        return
    found = modality_config(files)
    if found or files.modules[0].name != "CLIPModel":
        require_methods(found, METHODS)
        written = files.module_config.get("module_output_name")
        if written != "sentence_embedding":
            raise ModelLoadError(f"The transformer module gives {written!r}, which is not supported.")


def _image_tower(files: FolderFiles, kind: str) -> ImageTower:
    vision = files.config.get("vision_config") or {}
    sizes = {
        "image_size": None if kind == "siglip2" else vision.get("image_size", 224),
        "patch_size": vision.get("patch_size", USUAL_PATCH_SIZE[kind]),
    }
    if not all(isinstance(size, int | None) for size in sizes.values()):
        raise ModelLoadError(f"vision_config has {sizes}; images and patches are to be squares.")
    return ImageTower(has_class_token=kind == "clip", **sizes)


def _filling(files: FolderFiles) -> TextFilling:
    """Return what the tokenizer does: it fills up to its longest input, or to the tower's if that is less.

    Published tokenizers do so on the right and hand the model no mask; without a word in their config others do.
    """
    tokenizer = files.tokenizer_config
    positions = int(files.text_config["max_position_embeddings"])
    asked = (files.module_config.get("processing_kwargs") or {}).get("text") or {}
    longest = asked.get("max_length") or files.module_config.get("max_seq_length") or tokenizer.get("model_max_length")
    named = str(tokenizer.get("tokenizer_class", "")).removesuffix("Fast")
    usual = "left" if named in ("GemmaTokenizer", "Siglip2Tokenizer") else "right"
    filling = TextFilling(
        length=min(int(longest or positions), positions),
        attends="attention_mask" not in (tokenizer.get("model_input_names") or ("attention_mask",)),
        on_the_left=tokenizer.get("padding_side", usual) == "left",
    )
    if filling.on_the_left and not filling.attends:
        raise ModelLoadError("The tokenizer fills texts up on the left and masks that, which is not supported.")
    return filling

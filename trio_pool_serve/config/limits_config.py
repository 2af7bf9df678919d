"""Settings that limit the duration of requests, and their inputs other than text."""

import re
from pathlib import Path
from typing import Annotated

from attrs import field, frozen
from attrs.validators import ge, gt, matches_re
from cyclopts import Group, Parameter

from trio_pool_serve.config.help import help_, switch


@Parameter(name="*", group=Group("Time limits", sort_key=6))
@frozen(kw_only=True)
class TimeLimitsConfig:
    """How long requests and their parts may take."""

    request_timeout_s: Annotated[
        float,
        help_("Maximum duration of a request in seconds. The request header `X-Request-Timeout` can only shorten it."),
    ] = field(default=600.0, validator=gt(0))
    client_timeout_s: Annotated[
        float,
        help_(
            "Seconds a client may take to send a request's headers, to send its body, and to read 256 KiB of its "
            "response."
        ),
    ] = field(default=60.0, validator=gt(0))
    drain_timeout_s: Annotated[
        float,
        help_("Maximum time in seconds for running requests to finish after SIGTERM. After it, they are aborted."),
    ] = field(default=30.0, validator=gt(0))


@Parameter(name="*", group=Group("Input", sort_key=7))
@frozen(kw_only=True)
class InputConfig:
    """Inputs other than text, and where they may come from."""

    enable_tokenizer_info_endpoint: Annotated[
        bool, switch("Serve `/tokenizer_info`: the tokenizer's settings and the chat template.")
    ] = False
    trust_request_chat_template: Annotated[
        bool,
        switch(
            "Accept chat templates in requests. They are rendered in a separate process with limits on time and memory."
        ),
    ] = False
    enable_prompt_embeds: Annotated[
        bool, switch("Accept token embeddings in place of texts, in the field `prompt_embeds`.")
    ] = False
    allowed_media_path: Annotated[
        Path | None,
        help_(
            "Directory from which requests may load images by `file:` URLs. Symbolic links that lead out of it are not "
            "followed.",
            default="none",
        ),
    ] = None
    allowed_media_domains: Annotated[
        str,
        help_(
            "Comma-separated hosts from which images may be fetched, redirects included. A host does not include its "
            "subdomains: `*.example.org` allows those of `example.org`, but not `example.org` itself.",
            default="any",
        ),
    ] = field(default="", validator=matches_re(r"[\w.*, -]*", re.ASCII))
    allow_private_media: Annotated[
        bool, switch("Also fetch images from addresses that are not on the public internet.")
    ] = False
    max_media_bytes: Annotated[int, help_("Maximum size of an image file in bytes, before base64 encoding.")] = field(
        default=20 * 2**20, validator=gt(0)
    )
    max_image_pixels: Annotated[
        int, help_("Maximum number of pixels of an image; larger ones are refused before they are decoded.")
    ] = field(default=50_000_000, validator=gt(0))
    max_images_per_input: Annotated[int, help_("Maximum number of images in one input.")] = field(
        default=16, validator=gt(0)
    )
    media_cache_bytes: Annotated[
        int, help_("Maximum size of the cache of preprocessed images in bytes; 0 disables it.")
    ] = field(default=256 * 2**20, validator=ge(0))

    @property
    def media_domains(self) -> frozenset[str]:
        """The hosts of ``allowed_media_domains``, in lower case."""
        names = (name.strip().lower() for name in self.allowed_media_domains.split(","))
        return frozenset(name for name in names if name)

"""Line 1: probes, and what says which server it is."""

from tests.compatibility.vllm_cases.case import Case, get, post

ANY = ("embedding", "cross-encoder", "token classifier")

CASES: tuple[Case, ...] = (
    get("/health", ANY),
    get("/ping", ANY),
    post("", "/ping", ANY, None),
    post("", "/health", ANY, None, says=()),
    get("/health", "embedding", name="by PUT", method="PUT"),
    get(
        "/v1/models",
        ANY,
        reason="`root` is not a local path, and `permission` is left out",
        differs=("data.0.root", "data.0.permission", "data.0.owned_by", "data.0.parent"),
    ),
    get("/version", "embedding", reason="each server has its own version", differs=("version",)),
    get("/nothing", "embedding", name="no such route"),
    get("/v1/embeddings", "embedding", name="the wrong method"),
)

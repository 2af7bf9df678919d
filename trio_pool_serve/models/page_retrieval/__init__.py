"""Page retrievers: late interaction between a query and images of pages."""

from trio_pool_serve.models.model_kind import ModelKind
from trio_pool_serve.models.page_retrieval.image_format import page_image_format
from trio_pool_serve.models.page_retrieval.spec import read_page_retrieval
from trio_pool_serve.models.page_retrieval.text_format import page_query_format

PAGE_RETRIEVAL = ModelKind(
    read=read_page_retrieval,
    load="trio_pool_serve.models.page_retrieval.loading:load_page_retrieval",
    text_format=page_query_format,
    image_format=page_image_format,
)

"""Texts to one number per label, and their tokens likewise."""

from trio_pool_serve.tasks.job import Task
from trio_pool_serve.types import Classify, TokenClassify

CLASSIFY = Task("classify", lambda _, job: Classify(job.activation))
TOKEN_CLASSIFY = Task("token_classify", lambda _, job: TokenClassify(job.activation))

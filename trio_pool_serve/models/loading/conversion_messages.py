"""What the process that loads models and the process that converts them tell each other."""

from typing import TypeAlias

from msgspec import Struct

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.runner.openvino.converted_model import ConvertedModel


class ConversionJob(Struct, frozen=True, tag=True):
    """A model's folder, and the settings to load it with.

    ``imports`` are modules to import first, which make the kind of model known, whose ``load`` is ``kind``.
    """

    folder: str
    config: ModelConfig
    imports: list[str]
    kind: str
    may_time: bool
    number: int = 0
    """Of the model, in later messages."""


class Convert(Struct, frozen=True, tag=True):
    """Write the conversion of a model to an empty folder."""

    number: int
    folder: str


class GiveUp(Struct, frozen=True, tag=True):
    """A model is not needed any more."""

    number: int


class LogLine(Struct, frozen=True, tag=True):
    """A line for the log."""

    level: int
    logger: str
    text: str


class Reply(Struct, frozen=True, tag=True):
    """The model is loaded by torch, or its conversion is written, of which ``model`` is the record; or ``error``.

    With an error, ``errno`` says why the folder cannot be written; 0 if something else has failed.
    """

    model: ConvertedModel | None = None
    error: str = ""
    errno: int = 0


ToConversion: TypeAlias = ConversionJob | Convert | GiveUp
FromConversion: TypeAlias = LogLine | Reply

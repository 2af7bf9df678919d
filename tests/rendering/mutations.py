"""Files that were right once: structures with numbers, names and lengths that no library writes."""

import re
import struct
from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any

from hypothesis import strategies as st

from tests.rendering.media.images import chunk

NUMBERS = (*b"0 1 -1 7 255 65536 2147483648 4294967295 9223372036854775808 1e9".split(), b"9" * 40)
"""In place of numbers that are written out, as in the headers of safetensors and npy."""

WORDS = (b"F32", b"F64", b"BF16", b"I8", b"U64", b"BOOL", b"<f4", b">f2", b"|O", b"<U9", b"null", b"[]", b"\xff")
INTEGERS = (0, 1, 2, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 2**63 - 1, 2**64 - 1)
FORMATS = ("<H", ">H", "<I", ">I", "<Q", ">Q", "B")
Mutation = Callable[[bytes], bytes]
SHARE = st.integers(0, 999).map(lambda number: number / 1000)
"""Where in a file."""


def flip(share: float, bits: int, file: bytes) -> bytes:
    at = int(share * len(file))
    return file[:at] + bytes([file[at] ^ bits]) + file[at + 1 :] if file else file


def truncate(share: float, file: bytes) -> bytes:
    return file[: int(share * len(file))]


def repeat(share: float, length: int, times: int, file: bytes) -> bytes:
    at = int(share * len(file))
    return file[:at] + file[at : at + length] * times + file[at + length :]


def insert(share: float, what: bytes, file: bytes) -> bytes:
    at = int(share * len(file))
    return file[:at] + what + file[at:]


def write_integer(share: float, form: str, number: int, file: bytes) -> bytes:
    """Overwrite what may be a length, a size or an offset; most of them are near the beginning."""
    width = struct.calcsize(form)
    at = int(share * share * max(0, len(file) - width))
    return file[:at] + struct.pack(form, number % 256**width) + file[at + width :]


def replace_word(pattern: bytes, turn: int, new: bytes, file: bytes) -> bytes:
    """Replace one of the words that a header is written in, among the first 2000 bytes."""
    found = [*re.finditer(pattern, file[:2000])]
    if not found:
        return file
    start, end = found[turn % len(found)].span()
    return file[:start] + new + file[end:]


def edit_chunk(turn: int, inner: Mutation, file: bytes) -> bytes:
    """Mutate the content of one chunk of a PNG, with the checksum that it should have then."""
    at, chunks = 8, []
    while file.startswith(b"\x89PNG") and at + 12 <= len(file):
        length = int.from_bytes(file[at : at + 4], "big")
        chunks.append((file[at + 4 : at + 8], file[at + 8 : at + 8 + length]))
        at += 12 + length
    if not chunks:
        return file
    kind, content = chunks[turn % len(chunks)]
    chunks[turn % len(chunks)] = (kind, inner(content))
    return file[:8] + b"".join(chunk(*each) for each in chunks)


def mutations(mutate: Callable[..., bytes], *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Mutation]:
    return st.builds(partial, st.just(mutate), *arguments)


PLAIN: st.SearchStrategy[Mutation] = st.one_of(
    mutations(flip, SHARE, st.integers(1, 255)),
    mutations(truncate, SHARE),
    mutations(insert, SHARE, st.binary(max_size=16)),
    mutations(repeat, SHARE, st.integers(1, 64), st.sampled_from([0, 2, 100])),
    mutations(write_integer, SHARE, st.sampled_from(FORMATS), st.sampled_from(INTEGERS)),
    mutations(replace_word, st.just(rb"-?\d+"), st.integers(0, 20), st.sampled_from(NUMBERS)),
    mutations(replace_word, st.just(rb"[<|]?[A-Z]+\d+|[<|>][a-z]\d"), st.integers(0, 9), st.sampled_from(WORDS)),
    mutations(insert, st.just(1.0), st.just(bytes(2**20))),
)


def mutated(files: Mapping[str, bytes]) -> st.SearchStrategy[bytes]:
    """Return files that are like one of these, up to three mutations away."""
    several = st.lists(PLAIN | mutations(edit_chunk, st.integers(0, 5), PLAIN), min_size=1, max_size=3)
    return st.builds(partial(reduce, lambda file, mutate: mutate(file)), several, st.sampled_from([*files.values()]))

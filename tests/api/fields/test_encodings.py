import base64
import json
from typing import get_args

import ml_dtypes
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sentence_transformers.util.quantization import quantize_embeddings

from trio_pool_serve.api.fields.encodings import EmbedDtype, VectorEncoding, as_dtype, row_json
from trio_pool_serve.errors import InvalidRequestError


def row_bytes(vector, dtype, endianness):
    return VectorEncoding(dtype=dtype, endianness=endianness).bytes(vector)


vectors = hnp.arrays(np.float32, st.integers(1, 8).map(lambda n: n * 8), elements=st.floats(-1e6, 1e6, width=32))


@given(vectors)
def test_json_numbers_read_back_as_the_same_float32(vector):
    assert np.array_equal(np.array(json.loads(row_json(vector, "float32")), dtype=np.float32), vector)


@given(vectors)
def test_bfloat16_rounds_as_torch_does(vector):
    expected = torch.from_numpy(vector).to(torch.bfloat16).view(torch.uint16).numpy()
    assert as_dtype(vector, "bfloat16").dtype == ml_dtypes.bfloat16
    assert np.array_equal(as_dtype(vector, "bfloat16").view(np.uint16), expected)
    as_text = np.array(json.loads(row_json(vector, "bfloat16")), dtype=np.float32)
    assert np.array_equal(as_text, torch.from_numpy(vector).to(torch.bfloat16).float().numpy())


FLOATS_OF_8_BITS = {"fp8_e4m3": (torch.float8_e4m3fn, 448), "fp8_e5m2": (torch.float8_e5m2, 57344)}


@pytest.mark.parametrize("dtype", FLOATS_OF_8_BITS)
@given(vector=hnp.arrays(np.float32, 8, elements=st.floats(-448, 448, width=32)))
def test_floats_of_8_bits_round_as_torch_does(dtype, vector):
    expected = torch.from_numpy(vector).to(FLOATS_OF_8_BITS[dtype][0])
    assert np.array_equal(as_dtype(vector, dtype).view(np.uint8), expected.view(torch.uint8).numpy())
    assert row_bytes(vector, dtype, "big") == row_bytes(vector, dtype, "little") == as_dtype(vector, dtype).tobytes()
    as_text = np.array(json.loads(row_json(vector, dtype)), dtype=np.float32)
    assert np.array_equal(as_text, expected.float().numpy())


LARGEST = {name: largest for name, (_, largest) in FLOATS_OF_8_BITS.items()} | {"float16": 65504}


@pytest.mark.parametrize("dtype", LARGEST)
def test_numbers_too_large_for_a_small_float_are_refused(dtype):
    largest = LARGEST[dtype]
    assert as_dtype(np.float32([largest, -largest]), dtype).astype(np.float32).tolist() == [largest, -largest]
    for number in (largest * 1.25, -largest * 1.25):
        with pytest.raises(InvalidRequestError, match=f"too large for {dtype}"):
            as_dtype(np.float32([1, number]), dtype)


def test_the_largest_numbers_of_float32_are_refused_in_bfloat16():
    largest = np.float32(ml_dtypes.finfo("bfloat16").max)
    assert as_dtype(np.float32([largest]), "bfloat16") == [largest]
    with pytest.raises(InvalidRequestError, match="too large for bfloat16"):
        as_dtype(np.finfo(np.float32).max.reshape(1), "bfloat16")


@given(vectors)
def test_bits_are_those_of_sentence_transformers(vector):
    # It packs x > 0, the contract x ≥ 0: they differ for zeros only.
    vector = np.where(vector == 0, np.float32(1), vector)
    for precision in ("binary", "ubinary"):
        assert np.array_equal(as_dtype(vector, precision), quantize_embeddings(vector[None], precision)[0])


def test_bits_are_packed_from_the_most_significant_and_zero_counts_as_one():
    vector = np.array([0, -1, -1, -1, -1, -1, -1, 1], dtype=np.float32)
    assert as_dtype(vector, "ubinary").tolist() == [0b1000_0001]
    assert as_dtype(vector, "binary").tolist() == [0b1000_0001 - 128]


@pytest.mark.parametrize("shape", [7, (8, 4)])
def test_bits_need_a_multiple_of_eight_dimensions(shape):
    with pytest.raises(InvalidRequestError, match=r"multiple of 8 dimensions, not [74]"):
        as_dtype(np.ones(shape, dtype=np.float32), "ubinary")


@given(hnp.arrays(np.float32, 64, elements=st.floats(-1, 1, width=16)).filter(lambda v: np.abs(v).max() > 1e-3))
def test_int8_keeps_the_direction(vector):
    for dtype, zero in (("int8", 0), ("uint8", 128)):
        quantised = as_dtype(vector, dtype).astype(np.float32) - zero
        assert np.abs(quantised).max() == 127
        cosine = quantised @ vector / np.linalg.norm(quantised) / np.linalg.norm(vector)
        assert cosine > 0.99


def test_int8_of_a_zero_vector_is_zero():
    assert as_dtype(np.zeros(8, dtype=np.float32), "int8").tolist() == [0] * 8


@pytest.mark.parametrize(("endianness", "order"), [("little", "<"), ("big", ">"), ("native", "=")])
def test_endianness_is_that_of_the_bytes(endianness, order):
    vector = np.array([1.5, -2.25], dtype=np.float32)
    for dtype, code in (("float32", "f4"), ("float16", "f2")):
        assert np.frombuffer(row_bytes(vector, dtype, endianness), order + code).tolist() == [1.5, -2.25]


def test_base64_is_a_json_string_of_the_bytes():
    vector = np.arange(5, dtype=np.float32)
    assert (
        base64.b64decode(msgspec.json.decode(VectorEncoding("base64").json(vector))) == vector.astype("<f4").tobytes()
    )


@pytest.mark.parametrize("dtype", get_args(EmbedDtype))
def test_rows_of_a_matrix_are_encoded_each_by_itself(dtype):
    matrix = np.random.default_rng(0).normal(size=(3, 16), scale=[[1], [100], [0]]).astype(np.float32)
    assert json.loads(row_json(matrix, dtype)) == [json.loads(row_json(row, dtype)) for row in matrix]
    assert row_bytes(matrix, dtype, "big") == b"".join(row_bytes(row, dtype, "big") for row in matrix)

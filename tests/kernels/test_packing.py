from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from cocktail.kernels.packing import pack, unpack

BITS = (1, 2, 3, 4, 8)
HEAD_DIMS = (8, 24, 64, 80, 96, 128, 256)


def random_codes(bits: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 2**bits, shape, generator=torch.Generator().manual_seed(bits), dtype=torch.uint8)


def packed_by_hand(codes: np.ndarray, bits: int) -> np.ndarray:
    """One row, code by code: code d is in byte d mod width at bit offset bits * (d div width)."""
    if bits == 3:
        return np.concatenate([packed_by_hand(codes % 4, 2), packed_by_hand(codes // 4, 1)])
    width = len(codes) * bits // 8
    row = np.zeros(width, dtype=np.uint8)
    for d, code in enumerate(codes):
        row[d % width] |= int(code) << (bits * (d // width))
    return row


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_unpack_inverts_pack(bits: int, head_dim: int) -> None:
    codes = random_codes(bits, 2, 3, 5, head_dim)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (2, 3, 5, head_dim * bits // 8)
    assert torch.equal(unpack(packed, bits), codes)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_layout_is_the_documented_one(bits: int, head_dim: int) -> None:
    codes = random_codes(bits, head_dim)
    assert pack(codes, bits).tolist() == packed_by_hand(codes.numpy(), bits).tolist()


@settings(deadline=None)
@given(st.data(), st.sampled_from(BITS), st.integers(1, 32), st.integers(0, 3))
def test_round_trip_of_any_codes(data: st.DataObject, bits: int, eighths: int, rows: int) -> None:
    codes = data.draw(arrays(np.uint8, (rows, 8 * eighths), elements=st.integers(0, 2**bits - 1)))
    packed = pack(torch.from_numpy(codes), bits)
    assert packed.shape == (rows, eighths * bits)
    np.testing.assert_array_equal(unpack(packed, bits).numpy(), codes)


@pytest.mark.parametrize("bits", BITS)
def test_a_strided_view_packs_like_its_copy(bits: int) -> None:
    codes = random_codes(bits, 16, 4, 3).permute(2, 1, 0)
    assert torch.equal(pack(codes, bits), pack(codes.contiguous(), bits))


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_packing_leaves_the_codes_alone(bits: int) -> None:
    codes = random_codes(bits, 4, 64)
    before = codes.clone()
    pack(codes, bits).fill_(0)
    assert torch.equal(codes, before)

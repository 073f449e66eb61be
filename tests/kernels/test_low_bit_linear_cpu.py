from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("numba")

from cocktail.kernels import low_bit_linear_cpu as cpu
from cocktail.kernels.low_bit_linear_cpu import low_bit_linear_cpu
from cocktail.kernels.low_bit_tile import TILE_OUTPUTS
from cocktail.kernels.low_bit_weight import WEIGHT_BITS
from tests.kernels.closeness import TOLERANCE, assert_close_rms
from tests.kernels.test_low_bit_linear import product, random_layer

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bits", WEIGHT_BITS)
@pytest.mark.parametrize("most", [0, 10_000])
def test_both_ways_give_the_product(most: int, bits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "MAX_FUSED_ROWS", dict.fromkeys(TOLERANCE, most))
    monkeypatch.setattr(cpu, "UNPACKED_VALUES", 128 * 48)
    for rows in (1, 3, 9, 40):
        x, weight, bias = random_layer(101, 128, rows, bits, dtype)
        actual = low_bit_linear_cpu(x, weight, bias)
        assert_close_rms(actual, product(x, weight, bias), TOLERANCE[dtype], f"{rows} rows")


@pytest.mark.parametrize("bits", WEIGHT_BITS)
def test_float32_is_accumulated_in_float32(bits: int) -> None:
    x, weight, _ = random_layer(64, 4096, 8, bits)
    assert_close_rms(low_bit_linear_cpu(x, weight), product(x, weight), 1e-6, "long sums")


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    x, weight, bias = random_layer(300, 256, 8, 4)
    assert x.numel() * weight.out_features > cpu.SERIAL_PRODUCTS
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = low_bit_linear_cpu(x, weight, bias)
        torch.set_num_threads(2)
        assert torch.equal(low_bit_linear_cpu(x, weight, bias), one)
    finally:
        torch.set_num_threads(threads)


def test_a_row_is_the_same_in_every_place_of_a_tile() -> None:
    x, weight, _ = random_layer(67, 128, 1, 3)
    for rows in TILE_OUTPUTS:
        out = low_bit_linear_cpu(x.repeat(rows, 1), weight)
        assert torch.equal(out, out[:1].expand(rows, -1))


@pytest.mark.slow
def test_portable_code_gives_the_product(tmp_path: Path) -> None:
    # A processor without AVX-512; a process of its own, because numba reads the name when it is imported.
    script = (
        "import pytest, sys; from cocktail.kernels import low_bit_tile; assert not low_bit_tile.HAS_PERMUTE;"
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-k', 'both_ways and dtype0', sys.argv[1]]))"
    )
    environment = os.environ | {"NUMBA_CPU_NAME": "haswell", "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", script, __file__]
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_compiled_code_is_found_again(tmp_path: Path) -> None:
    script = (
        "import torch; from cocktail.kernels import low_bit_linear_cpu as cpu;"
        "from cocktail.kernels.low_bit_weight import quantize_weight;"
        "cpu.low_bit_linear_cpu(torch.ones(1, 64), quantize_weight(torch.ones(3, 64), 4));"
        "stats = cpu._multiplier(4, 1, 0).stats; print(sum(stats.cache_hits.values()))"
    )
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", script]
    hits = [
        subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
        for _ in range(2)
    ]
    assert hits == [["0"], ["1"]]

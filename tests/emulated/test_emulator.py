"""The emulator itself: instructions that no kernel has yet, and mistakes that it has to see."""

from __future__ import annotations

import numpy as np
import pytest

from jax_flash import _native

from ..compare import compare
from ..emulated_cases import BACKWARDS, IN_ORDER, C
from ..emulator import Emulator
from ..numpy_oracle import DTYPES

# ---- instructions that no kernel has yet ---------------------------------------------------------

PRODUCT = """
extern "C" __global__ void product(unsigned short* memory) {  // a [16, 16], b [8, 16], d [16, 8]
  __shared__ alignas(16) unsigned short tile[16 * 16 + 8 * 16];
  const unsigned start = __cvta_generic_to_shared(tile), lane = threadIdx.x;
  for (unsigned i = lane; i < 48; i += 32) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(start + 16 * i),
                 "l"(memory + 8 * i));
  }
  asm volatile("cp.async.commit_group;");
  asm volatile("cp.async.wait_group %0;" ::"n"(0) : "memory");
  __syncwarp();
  unsigned a[4], b[2];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(start + lane % 16 * 32 + lane / 16 * 16));
  // B^T lies in memory by rows of 16: its columns are rows of an operand that is not transposed.
  asm volatile("ldmatrix.sync.aligned.m8n8.x2LAYOUT.shared.b16 {%0, %1}, [%2];"
               : "=r"(b[0]), "=r"(b[1])
               : "r"(start + 512 + ADDRESS));
  float d[4] = {1, 1, 1, 1};
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  float* result = reinterpret_cast<float*>(memory + 384);
  for (int i = 0; i < 4; ++i) {
    result[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = d[i];
  }
}
"""


@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_a_warp(transposed: bool, emulator: Emulator):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-8, 8, (rows, 16)).astype(DTYPES["bfloat16"]) for rows in (16, 8))
    stored = np.ascontiguousarray(b.T) if transposed else b
    memory = np.concatenate([a.ravel().view(np.uint16), stored.ravel().view(np.uint16)])
    text = PRODUCT.replace("LAYOUT", ".trans" if transposed else "").replace(
        "ADDRESS", "lane % 16 * 16" if transposed else "lane % 8 * 32 + lane / 8 % 2 * 16"
    )
    got = emulator.run_kernel(text, np.append(memory, np.zeros(256, np.uint16)))
    want = 1 + a.astype(np.float32) @ b.astype(np.float32).T
    np.testing.assert_array_equal(got[384:].view(np.float32).reshape(16, 8), want)


def test_an_instruction_that_is_not_known_is_named(emulator: Emulator):
    text = 'extern "C" __global__ void kernel(int*) { asm volatile("vote.sync.any.pred p, q;"); }'
    with pytest.raises(RuntimeError, match=r"has no instruction vote\.sync\.any"):
        emulator.run_kernel(text, np.zeros(1, np.int32))


# ---- the emulator sees what is wrong -----------------------------------------------------------


def broken(file: str, old: str, new: str) -> dict[str, str]:
    """The kernels' text with a mistake."""
    sources = _native.kernel_sources()
    assert old in sources[file]
    return sources | {file: sources[file].replace(old, new, 1)}


# Two units of 128 rows: four of 64 would be more than a round.
MANY_BLOCKS = C("many blocks", H=128, T=200, S=800, N=1).draw()


@pytest.mark.parametrize(
    ("file", "old", "new", "error"),
    [
        pytest.param(
            "sm90/forward_products.cuh", "    release(key_empty());\n", "",
            r"deadlock(.|\n)*threads 0: mbarrier .* 8 of 8 arrivals .*forward::Producer",
            id="an arrival is missing",
        ),
        pytest.param(
            "sm90/forward_products.cuh",
            "ptx::barrier_wait(value_full(), value_at().parity());", "",
            "a CTA ends with copies in flight", id="values are not waited for",
        ),
        pytest.param(
            "sm90/backward_scores.cuh", "  ptx::fence_async_proxy();\n", "",
            "wgmma: byte .* was written by thread .* fence.proxy.async", id="no fence",
        ),
        pytest.param(
            "sm90/forward_load.cuh", "box_head(head),", "box_head(head) + 1,",
            "the box at column 0, head 1, row .* lies outside", id="another head",
        ),
        pytest.param(
            "sm90/forward_units.cuh", "      if (!stored) continue;\n", "",
            r"a store: \d+ bytes at byte \d+ of ", id="rows past the end",  # of the one below
        ),
        pytest.param(
            "sm90/forward_products.cuh", "kKeyBytes / 8 * key_ring.barrier_offset()",
            "kKeyBytes / 8 * (key_ring.barrier_offset() + 52)",
            "wgmma: bytes .* of shared memory, which has", id="beyond shared memory",
        ),
        pytest.param(
            "sm90/forward_kernel.cuh", "&shared.query_empty[stage][warpgroup]), 4)",
            "&shared.query_empty[stage][warpgroup]), 5)", "deadlock", id="another count",
        ),
        pytest.param(
            "sm90/forward_kernel.cuh", "register_increase<kConsumerRegisters>",
            "register_increase<kConsumerRegisters + 8>",
            "setmaxnreg: warps ask for 2080 registers of a lane, the CTA has 2016",
            id="registers that nobody has given back",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_errors(file: str, old: str, new: str, error: str, emulator: Emulator):
    with pytest.raises(RuntimeError, match=error):
        emulator.run(MANY_BLOCKS, sources=broken(file, old, new))


@pytest.mark.parametrize(
    ("file", "old", "new", "seed"),
    [
        pytest.param(
            "sm90/forward_units.cuh", "        ptx::wgmma_wait<0>();\n        return true;",
            "        return true;", BACKWARDS, id="a product is not waited for",
        ),
        pytest.param(
            "sm90/forward_products.cuh", "kValuePitch / 8 * value_at().barrier_offset()",
            "kValuePitch / 8 * key_ring.barrier_offset()", IN_ORDER, id="another stage",
        ),
        pytest.param(
            "sm90/backward_narrow.cuh",
            "    ptx::barrier_wait(at(&Shared::gradient_full, buffer), "
            "parity_of<kScoreStages>(iteration));\n", "", BACKWARDS,
            id="dS of the other warpgroup is not waited for",
        ),
    ],
)  # fmt: skip
def test_mistakes_change_results(file: str, old: str, new: str, seed: int, emulator: Emulator):
    got = emulator.run(MANY_BLOCKS, seed=seed, sources=broken(file, old, new))
    with pytest.raises(AssertionError, match="beyond it"):
        compare(MANY_BLOCKS, got)

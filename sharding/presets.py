"""Presets of quantized formats: what real engines compute, by the files that compute it."""

from __future__ import annotations

from shardfly_jax.sharding.quantization import (
    ROUNDS_AT_1_75,
    Fp8Block,
    Fp8Channel,
    Fp8Tensor,
    MxFp4,
    MxFp8,
)


def vllm_fp8_block() -> Fp8Block:
    """vLLM's `per_block_cast_to_fp8` (`utils/deep_gemm.py`) without UE8M0: amax at least 1e-4, `x * (1 / scale)`."""
    return Fp8Block(floor=1e-4)


def sglang_fp8_block() -> Fp8Block:
    """SGLang's `per_block_cast_to_fp8` (`layers/quantization/fp8_utils.py`): as vLLM's, always with UE8M0 scales.

    The adapter's `engines.sglang.rollout(quantization="fp8_block")` has `vllm_fp8_block`'s, as fp8 checkpoints do.
    """
    return deepgemm_ue8m0()


def slime_fp8_block() -> Fp8Block:
    """slime's and verl's `blockwise_cast_to_fp8_triton` (`kernels/fp8_kernel.py`): amax at least 1e-10."""
    return Fp8Block(floor=1e-10)


def nemo_fp8_block() -> Fp8Block:
    """NeMo RL's `quantization/fp8.py` and verl's torch path: `x * (448 / amax)`, and its reciprocal as the scale."""
    return Fp8Block(floor=0.0, formula="factor")


def deepgemm_ue8m0() -> Fp8Block:
    """DeepGEMM's `per_block_cast_to_fp8(use_ue8m0=True)` (`utils/math.py`): scales rounded up to powers of two.

    In integers, as DeepGEMM does it now. Copies that use `ceil(log2(scale))` in float32 (vLLM's, SGLang's) may give
    half the scale where the quotient is a power of two plus a few units in the last place.
    """
    return Fp8Block(floor=1e-4, scale="power_of_two")


def vllm_fp8_channel() -> Fp8Channel:
    """vLLM's row kernel (`csrc/quantization/w8a8/fp8/common.cu`): divides; scales are at least 1 / (448 * 512)."""
    return Fp8Channel(floor=1 / 512, formula="divide", local=True)


def vllm_fp8_tensor() -> Fp8Tensor:
    """vLLM's online default (`online/fp8.py`): over what a rank holds, no floor, `x * (1 / scale)`."""
    return Fp8Tensor(per="rank")


def sglang_fp8_tensor() -> Fp8Tensor:
    """SGLang's `input_to_float8` (`layers/quantization/fp8_utils.py`): `x * (448 / amax)`, amax at least 1e-12."""
    return Fp8Tensor(per="rank", floor=1e-12, formula="factor")


def ocp_mxfp8() -> MxFp8:
    """OCP's "Microscaling Formats (MX) Specification 1.0", section 6.3: `2^(floor(log2(amax)) - 8)`, saturating."""
    return MxFp8()


def vllm_mxfp8() -> MxFp8:
    """vLLM 0.21's torch path (`quantization/utils/mxfp8_utils.py`): the exponent of amax itself, at most 126.

    From 2^127 on vLLM takes one more, whose reciprocal is subnormal.
    """
    return MxFp8(shift=0)


def vllm_mxfp8_round_up() -> MxFp8:
    """Later versions of vLLM's torch path: `amax / 448` rounded up to a power of two, so that nothing saturates."""
    return MxFp8(rounding="ceil")


def ocp_mxfp4() -> MxFp4:
    """OCP's "Microscaling Formats (MX) Specification 1.0", section 6.3: `2^(floor(log2(amax)) - 2)`, saturating."""
    return MxFp4()


def triton_mxfp4() -> MxFp4:
    """triton_kernels' `downcast_to_mxfp` (`numerics_details/mxfp.py`), which vLLM, SGLang and transformers quantize
    gpt-oss with: `amax / 6` rounded up to a power of two (`ROUND_UP`, its default), so that nothing saturates.

    As of triton-lang/triton@0616e64, which rounds ties of codes to even; earlier ones rounded them away from zero.
    It drops the lowest bits of a float32 below the scale: the three next above a quarter of it become 0 there, and
    half of it, which is nearer, here. bfloat16 and float16 have no such values: their codes are the same to the bit.
    """
    return MxFp4(rounding="ceil")


def compressed_tensors_mxfp4() -> MxFp4:
    """compressed-tensors' `generate_mx_scales` (`quantization/utils/mxfp_utils.py`), as llm-compressor writes it: OCP's
    scale of amax rounded up from 1.75 times a power of two.

    Computed in float32, as it does for float32 weights. Its codes lose the sign of values that are -0.0.
    """
    return MxFp4(carry=ROUNDS_AT_1_75)

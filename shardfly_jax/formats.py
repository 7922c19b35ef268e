"""Quantized formats and the presets of real engines, for `.quantize(...)` in a mapping."""

from shardfly_jax.sharding.presets import (
    compressed_tensors_mxfp4 as compressed_tensors_mxfp4,
    deepgemm_ue8m0 as deepgemm_ue8m0,
    nemo_fp8_block as nemo_fp8_block,
    ocp_mxfp4 as ocp_mxfp4,
    ocp_mxfp8 as ocp_mxfp8,
    sglang_fp8_block as sglang_fp8_block,
    sglang_fp8_tensor as sglang_fp8_tensor,
    slime_fp8_block as slime_fp8_block,
    triton_mxfp4 as triton_mxfp4,
    vllm_fp8_block as vllm_fp8_block,
    vllm_fp8_channel as vllm_fp8_channel,
    vllm_fp8_tensor as vllm_fp8_tensor,
    vllm_mxfp8 as vllm_mxfp8,
    vllm_mxfp8_round_up as vllm_mxfp8_round_up,
)
from shardfly_jax.sharding.quantization import (
    Format as Format,
    Fp8Block as Fp8Block,
    Fp8Channel as Fp8Channel,
    Fp8Tensor as Fp8Tensor,
    Int8Channel as Int8Channel,
    MxFp4 as MxFp4,
    MxFp8 as MxFp8,
)

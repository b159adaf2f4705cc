"""Flags of XLA by platform, each with its reason and what was measured.

By default XLA (jaxlib 0.10.2) records fusions and calls of libraries in command buffers, uses
Triton for products and measures candidates of each (autotuning level 4).
"""

# Set by runs (`backends.add_gpu_flags`).
GPU_FLAGS = {
    "--xla_gpu_enable_latency_hiding_scheduler=true": "exchanges between GPUs overlap with "
    "computation; NVIDIA's images for JAX set it. Compiled for an H100: same kernels and seconds",
}
# To be tried in XLA_FLAGS, as benchmarks/gpu_minutes.sh does.
GPU_VARIANTS = {
    "--xla_gpu_enable_command_buffer=+WHILE": "a decode loop is one launch, not some 300 of 2 to "
    "4 us for each token. Compiled for an H100: same kernels and seconds",
    "--xla_gpu_enable_command_buffer=": "launches each kernel by itself, to compare. Not measured",
    "--xla_gpu_enable_triton_gemm=false": "cuBLAS for all products, with fewer candidates. A "
    "sampler of 6 layers compiled for an H100: 5.9 instead of 7.2 processor seconds",
    "--xla_gpu_experimental_gemm_fusion_v2=true": "norms, activations and sums move into products. "
    "Compiled for an H100: 10.0 kernels a layer in decoding, not 12.0; speed not measured",
    "--xla_gpu_autotune_level=0": "measures no candidates of products, as in plans. Not measured",
}
# To be tried in LIBTPU_INIT_ARGS: jaxlib refuses flags of TPUs in XLA_FLAGS.
TPU_VARIANTS = {
    "--xla_tpu_scoped_vmem_limit_kib=65536": "larger fusions, but less fast memory for weights "
    "that are fetched ahead. Not measured",
    "--xla_tpu_enable_async_collective_fusion=true": "exchanges run beside products. Not measured",
}

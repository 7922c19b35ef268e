"""Device code: raw addresses, tiles, conversions and the transfer kernel."""

if __name__ == "pallas_kernels":
    raise ImportError(
        "'pallas_kernels' is a folder of the checkout, not a package of its own. Import shardfly_jax.pallas_kernels."
    )

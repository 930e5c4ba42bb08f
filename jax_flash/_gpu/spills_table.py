"""What ptxas spills: written by `python -m tests.spills`, read by spills.py."""

# The versions of NVRTC that were asked: what one of them spills is out.
NVRTC = ("13.5",)

# Candidate -> sets of traits: it spills for a problem that has all traits of one.
SPILLED: dict[str, tuple[str, ...]] = {
    "sm90 forward: two teams": (
        "blocks_of_16",
        "blocks_of_32",
        "negative_scale",
        "blocks_of_128 left",
        "blocks_of_128 narrow_values",
        "blocks_of_128 right",
    ),
    "sm90 forward: three warpgroups": (
        "blocks_of_32",
        "key_value_lengths",
        "query_segments",
        "blocks_of_128 left",
        "blocks_of_128 mask",
        "blocks_of_128 query_lengths",
        "blocks_of_128 right",
        "blocks_of_128 softcap",
        "float16 mask",
        "float16 plane_of_bias",
        "mask softcap",
    ),
    "sm90 forward: three warpgroups that drain to hide": (
        "key_value_lengths left",
        "key_value_lengths query_segments",
        "key_value_lengths softcap",
        "query_segments softcap",
    ),
    "sm90 forward: three warpgroups that drain": (
        "blocks_of_128 key_value_lengths",
        "blocks_of_128 mask",
        "blocks_of_128 query_lengths",
        "blocks_of_128 query_segments",
        "blocks_of_128 softcap",
        "blocks_of_32 key_value_lengths",
        "blocks_of_32 mask",
        "blocks_of_32 query_lengths",
        "blocks_of_32 query_segments",
        "key_value_lengths mask",
        "mask query_segments",
        "blocks_of_32 left softcap",
        "blocks_of_32 right softcap",
        "blocks_of_32 sinks softcap",
        "float16 query_segments softcap",
        "key_value_lengths left softcap",
        "key_value_lengths query_segments softcap",
        "query_lengths query_segments softcap",
    ),
    "sm90 forward: three warpgroups, heads above 64": ("key_value_lengths left",),
}

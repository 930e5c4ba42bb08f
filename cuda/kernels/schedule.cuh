// Which tile a persistent CTA takes next, and what that tile is.
//
// Tiles are numbered so that CTAs working at the same time share keys and values in L2: a group of
// `head_group` heads is walked query tile by query tile, all heads of the group at each. With a
// bounded right window (causal) late query tiles are the longest and come first in their group.
#pragma once

struct TileIndex {
  int query_tile;
  int head;   // of N / kPackedHeads
  int batch;  // -1: no tile
};

// The tile of number `index` among query_tiles * heads * batch; kLongestFirst reverses query tiles.
template <bool kLongestFirst>
__device__ __forceinline__ TileIndex decode_tile(int index, int query_tiles, int heads, int batch,
                                                 int head_group) {
  const int all_heads = heads * batch;
  if (index >= query_tiles * all_heads) return {0, 0, -1};
  const int group = index / (query_tiles * head_group);
  const int within = index - group * query_tiles * head_group;
  const int group_heads = min(head_group, all_heads - group * head_group);
  const int tile = within / group_heads;
  const int head_batch = group * head_group + within - tile * group_heads;
  const int b = head_batch / heads;
  return {kLongestFirst ? query_tiles - 1 - tile : tile, head_batch - b * heads, b};
}

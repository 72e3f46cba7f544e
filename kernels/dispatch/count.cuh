// Tokens by expert, and each token's index among its expert's, in order: one cluster of blocks that see each other's
// sums. A warp has consecutive ids, ranked by their equals in lower lanes and in the warp's own histogram; then a sum
// over warps, and one over blocks. Many ids are taken in several tiles.

const int COUNT_WARPS = COUNT_THREADS / 32;

__device__ u32 expert_of(const Arguments &a, i64 id) {
  return id < 0 || id >= a.experts ? NONE : static_cast<u32>(id);
}

// How many tokens have any expert; each thread looks at its own.
__device__ u32 tokens_with_any(const Arguments &a, int thread, int num_threads) {
  u32 found = 0;
  for (int token = thread; token < a.tokens; token += num_threads) {
    int j = 0;
    while (j < a.top_k && expert_of(a, a.ids[static_cast<i64>(token) * a.top_k + j]) == NONE) ++j;
    found += j < a.top_k;
  }
  return found;
}

// The lanes with the same expert, for lanes that have one: a vote on each of its bits. Votes are cast side by side.
template <int FIRST, int LAST>
__device__ u32 equals_in_bits(u32 expert) {
  u32 equals = ALL;
#pragma unroll
  for (int b = FIRST; b < LAST; ++b) {
    u32 vote = __ballot_sync(ALL, expert >> b & 1);
    equals &= expert >> b & 1 ? vote : ~vote;
  }
  return equals;
}

__device__ u32 equals_of(u32 expert, int experts) {
  u32 equals = __ballot_sync(ALL, expert != NONE) & equals_in_bits<0, 7>(expert);
  if (experts > 128) equals &= equals_in_bits<7, 8>(expert);
  if (experts > 256) equals &= equals_in_bits<8, 10>(expert);
  return equals;
}

// histogram [warps, experts] -> the same summed over the warps before; returns the sum over all.
__device__ u32 sum_over_warps(u16 *histogram, int experts, int e) {
  const int GROUP = COUNT_WARPS < 8 ? COUNT_WARPS : 8;
  u32 sum = 0;
  for (int warp = 0; warp < COUNT_WARPS; warp += GROUP) {
    u32 here[GROUP];
#pragma unroll
    for (int i = 0; i < GROUP; ++i) here[i] = histogram[(warp + i) * experts + e];
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
      histogram[(warp + i) * experts + e] = static_cast<u16>(sum);
      sum += here[i];
    }
  }
  return sum;
}

extern "C" __global__ void __cluster_dims__(COUNT_BLOCKS, 1, 1) __launch_bounds__(COUNT_THREADS, 1)
    count(const __grid_constant__ Arguments a) {
  int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, block = block_of_cluster();
  u32 below = (1u << lane) - 1;
  int experts = a.experts, num = a.tokens * a.top_k;
  char *at = reinterpret_cast<char *>(shared_memory);
  u32 *total = take<u32>(at, experts + 1), *base = take<u32>(at, experts + 1), *seen = take<u32>(at, experts + 1);
  u16 *histogram = take<u16>(at, COUNT_WARPS * experts), *mine = histogram + warp * experts;
  if (thread == 0) total[experts] = 0;
  for (int e = thread; e <= experts; e += COUNT_THREADS) seen[e] = 0;
  for (int r = block * COUNT_THREADS + thread; r < a.ranks; r += COUNT_BLOCKS * COUNT_THREADS) a.routed[r] = 0;

  const int TILE = COUNT_BLOCKS * COUNT_THREADS;
  for (int begin = 0; begin == 0 || begin < num; begin += TILE * ITEMS) {
    int items = (num - begin + TILE - 1) / TILE < ITEMS ? (num - begin + TILE - 1) / TILE : ITEMS;
    int first = begin + (block * COUNT_WARPS + warp) * 32 * items + lane;
    u32 word[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
      word[i] = i < items && first + 32 * i < num ? expert_of(a, a.ids[first + 32 * i]) : NONE;
    u32 present = begin ? 0 : tokens_with_any(a, block * COUNT_THREADS + thread, TILE);
    for (int i = thread; i < (COUNT_WARPS * experts + 7) / 8; i += COUNT_THREADS)
      reinterpret_cast<uint4 *>(histogram)[i] = uint4{0, 0, 0, 0};
    __syncthreads();
    present = __reduce_add_sync(ALL, present);
    if (lane == 0 && present) atomicAdd(&total[experts], present);
    u32 equals[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) equals[i] = i < items ? equals_of(word[i], experts) : 0;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (i >= items) continue;
      u32 expert = word[i], before = expert == NONE ? 0 : mine[expert], lower = __popc(equals[i] & below);
      __syncwarp();
      if (expert != NONE && lower == 0) mine[expert] = static_cast<u16>(before + __popc(equals[i]));
      __syncwarp();
      if (expert != NONE) word[i] = expert << ORDINAL_BITS | (before + lower);
    }
    __syncthreads();
    for (int e = thread; e < experts; e += COUNT_THREADS) total[e] = sum_over_warps(histogram, experts, e);
    cluster_arrive();
    cluster_wait();
    for (int e = thread; e <= experts; e += COUNT_THREADS) {
      u32 here[COUNT_BLOCKS], sum = seen[e];
#pragma unroll
      for (int b = 0; b < COUNT_BLOCKS; ++b) here[b] = read_of_block(&total[e], b);
#pragma unroll
      for (int b = 0; b < COUNT_BLOCKS; ++b) {
        if (b == block) base[e] = sum;
        sum += here[b];
      }
      seen[e] = sum;
    }
    cluster_arrive();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (i >= items || first + 32 * i >= num) continue;
      u32 expert = word[i] >> ORDINAL_BITS;
      a.words[first + 32 * i] = word[i] == NONE ? NONE : word[i] + mine[expert] + base[expert];
    }
    cluster_wait();  // all have read the totals
    __syncthreads();
    if (thread == 0) total[experts] = 0;
  }
  for (int e = thread; e <= experts; e += COUNT_THREADS) {
    if (e % COUNT_BLOCKS != block) continue;
    a.counts[e] = seen[e];
    a.own[e] = seen[e];
  }
}

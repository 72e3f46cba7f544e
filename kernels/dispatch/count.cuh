// Counts the tokens of each expert, and gives each token its index among the tokens of its expert, in token order. One
// cluster of blocks runs, which read each other's sums. A warp processes consecutive ids. The index of an id is the number
// of equal ids before it: in lower lanes, earlier in the warp (a histogram), in earlier warps, and in earlier blocks. Many
// ids are processed in several tiles.

const int COUNT_WARPS = COUNT_THREADS / 32;

__device__ u32 expert_of(const Arguments &a, i64 id) {
  return id < 0 || id >= a.experts ? NONE : static_cast<u32>(id);
}

// Returns the number of tokens with any expert. Each thread checks its own tokens.
__device__ u32 tokens_with_any(const Arguments &a, int thread, int num_threads) {
  u32 found = 0;
  for (int token = thread; token < a.tokens; token += num_threads) {
    int j = 0;
    while (j < a.top_k && expert_of(a, a.ids[static_cast<i64>(token) * a.top_k + j]) == NONE) ++j;
    found += j < a.top_k;
  }
  return found;
}

// The state of one warp for one expert: the lanes whose current id is this expert, as bits, and the number of earlier ids.
struct alignas(8) Cell {
  u32 lanes, count;
};

// Replaces the count of each warp by the sum over the warps before it. Returns the sum over all warps.
__device__ u32 sum_over_warps(Cell *cells, int experts, int e) {
  const int GROUP = COUNT_WARPS < 8 ? COUNT_WARPS : 8;
  u32 sum = 0;
  for (int warp = 0; warp < COUNT_WARPS; warp += GROUP) {
    u32 here[GROUP];
#pragma unroll
    for (int i = 0; i < GROUP; ++i) here[i] = cells[(warp + i) * experts + e].count;
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
      cells[(warp + i) * experts + e].count = sum;
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
  u32 *total = allocate<u32>(at, experts + 1), *base = allocate<u32>(at, experts + 1), *seen = allocate<u32>(at, experts + 1);
  Cell *cells = allocate<Cell>(at, COUNT_WARPS * experts), *mine = cells + warp * experts;
  allow_next_kernel();
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
    for (int i = thread; i < (COUNT_WARPS * experts + 1) / 2; i += COUNT_THREADS)
      reinterpret_cast<uint4 *>(cells)[i] = uint4{0, 0, 0, 0};
    __syncthreads();
    present = __reduce_add_sync(ALL, present);
    if (lane == 0 && present) atomicAdd(&total[experts], present);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (i >= items) continue;
      u32 expert = word[i];
      bool here = expert != NONE;
      if (here) atomicOr(&mine[expert].lanes, 1u << lane);
      __syncwarp();
      Cell cell = here ? mine[expert] : Cell{0, 0};
      u32 lower = __popc(cell.lanes & below);
      __syncwarp();
      if (here && lower == 0) mine[expert] = Cell{0, cell.count + __popc(cell.lanes)};
      __syncwarp();
      if (here) word[i] = expert << ORDINAL_BITS | (cell.count + lower);
    }
    __syncthreads();
    for (int e = thread; e < experts; e += COUNT_THREADS) total[e] = sum_over_warps(cells, experts, e);
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
      a.words[first + 32 * i] = word[i] == NONE ? NONE : word[i] + mine[expert].count + base[expert];
    }
    cluster_wait();  // all blocks have read the totals
    __syncthreads();
    if (thread == 0) total[experts] = 0;
  }
  for (int e = thread; e <= experts; e += COUNT_THREADS) {
    if (e % COUNT_BLOCKS != block) continue;
    a.counts[e] = seen[e];
    a.rank_counts[e] = seen[e];
  }
}

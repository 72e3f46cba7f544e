// Maps the top-k ids of one source rank's tokens to physical experts. The results are the same integers as those of
// epsim/policies. dispatcher.py launches the kernels in this order: count, (the collective and the split), total, quotas and
// serve if the stack needs them, assign.
//
// tests/kernels/dispatch/grid.h compiles this file for the host, one fiber per thread.

#include "state.cuh"

#include "../split/device.cuh"

#include "cluster.cuh"

#include "count.cuh"

#include "ends.cuh"

#include "ranks.cuh"

#include "water.cuh"

// Returns the slot that serves column j of a token.
__device__ int slot_of(const Arguments &a, const Ends &ends, u64 key, u32 word, int token, int j) {
  u32 expert = word >> ORDINAL_BITS, index = word & ((1u << ORDINAL_BITS) - 1);
  if (a.follow == STATIC) return a.nearest[a.rank * a.experts + expert];
  u32 first = ends.experts[expert] & 0xffff, number = ends.experts[expert] >> 16, point = index;
  if (number == 1) return ends.slot[first];
  if (a.follow == SAMPLED) point = static_cast<u32>(draw(a, key, token, j, BITS));
  if (a.follow == SYSTEMATIC) point = point_of(index, offset(ends.shift, expert), ends.rank_tokens[expert]);
  return slot_at(ends, first, number, point);
}

// One thread per token and column: a block processes THREADS / top_k tokens at a time.
extern "C" __global__ void __launch_bounds__(THREADS) assign(const __grid_constant__ Arguments a) {
  char *at = reinterpret_cast<char *>(shared_memory);
  int k = a.top_k, per_block = THREADS / k, step = gridDim.x * per_block, local = threadIdx.x / k, j = threadIdx.x % k;
  int begin = blockIdx.x * per_block;
  auto word_at = [&](int token) { return local < per_block && token < a.tokens ? a.words[token * k + j] : NONE; };
  u32 word = word_at(begin + local);  // this load overlaps with computing the ends
  bool fills = a.shared == VISITED || a.shared == EVERY;
  u64 key = a.follow == SAMPLED || fills ? rank_key(a) : 0;
  Ends ends = allocate_ends(a, at);
  find_ends(a, ends);
  Water water = allocate_water(a, at);
  int *visited = allocate<int>(at, THREADS);
  i64 *weight = allocate<i64>(at, THREADS);
  if (fills) {
    find_loads(a, ends, water);
    find_weights(a, water);
    fills = a.rank_counts[a.experts] >= FEW_TOKENS;
  }
  int on_rank = slots_per_rank(a);
  for (; begin < a.tokens; begin += step) {
    int token = begin + local;
    bool here = local < per_block && token < a.tokens;
    int slot = word == NONE ? -1 : slot_of(a, ends, key, word, token, j), rank = slot < 0 ? -1 : slot / on_rank;
    word = word_at(token + step);
    if (here) a.physical[token * k + j] = slot;
    if (a.shared == NO_SHARED) continue;
    if (here) a.slots_out[token * (k + 1) + j] = slot < 0 ? -1 : slot + rank;
    visited[threadIdx.x] = rank;
    __syncthreads();
    const int *ranks = visited + local * k;
    bool some = false, again = rank == a.rank;
    for (int i = 0; here && i < k; ++i) {
      some = some || ranks[i] >= 0;
      again = again || (i < j && ranks[i] == rank);
    }
    if (a.shared == VISITED) {
      weight[threadIdx.x] = rank < 0 || again ? 0 : water.weight[rank];
      __syncthreads();
    }
    auto give = [&](int chosen) {
      a.shared_rank[token] = chosen;
      a.slots_out[token * (k + 1) + k] = chosen < 0 ? -1 : chosen * (on_rank + 1) + on_rank;
    };
    if (here && (!some || !fills)) {
      if (j == 0) give(some ? a.rank : -1);
    } else if (here && a.shared == EVERY) {
      if (j == 0) give(choose_of_all(a, water, draw(a, key, token, k, 63)));
    } else if (here) {
      u64 number = draw(a, key, token, k, 63);
      int chosen = choose_of_visited(a, water, ranks, weight + local * k, j, number);
      if (chosen >= 0) give(chosen);
    }
    __syncthreads();
  }
}

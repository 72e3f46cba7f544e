// Kernels that use the counts of all ranks: `total` sums them, `quotas` computes this rank's part of an integral split, and
// `serve` computes the load of every rank.

const int WARPS = THREADS / 32;

// loads = the sum of rows over ranks. A block sums 32 experts. Its warps take turns over the ranks.
extern "C" __global__ void __launch_bounds__(THREADS) total(const __grid_constant__ Arguments a) {
  char *at = reinterpret_cast<char *>(shared_memory);
  i64 *part = allocate<i64>(at, THREADS);
  int lane = threadIdx.x % 32, line = threadIdx.x / 32, e = blockIdx.x * 32 + lane;
  i64 sum = 0;
  if (e <= a.experts)
#pragma unroll 4
    for (int r = line; r < a.ranks; r += WARPS) sum += a.rows[static_cast<i64>(r) * (a.experts + 1) + e];
  part[threadIdx.x] = sum;
  __syncthreads();
  if (line || e > a.experts) return;
  for (int i = 1; i < WARPS; ++i) sum += part[32 * i + lane];
  a.loads[e] = sum;
}

__device__ int minimum(int a, int b) { return b < a ? b : a; }
__device__ int maximum(int a, int b) { return b > a ? b : a; }
__device__ int overlap(int a, int a_end, int b, int b_end) { return maximum(minimum(a_end, b_end) - maximum(a, b), 0); }

__device__ int warp_sum_before(int value, int lane) {
  int sum = value;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    int lower = __shfl_up_sync(ALL, sum, distance);
    if (lane >= distance) sum += lower;
  }
  return sum;
}

// Exclusive prefix sums of several arrays, in place: sums[i] = values[0] + ... + values[i - 1] for i = 0 .. num.
template <int MANY>
__device__ void running_sums(int *const (&sums)[MANY], int num, int lane) {
  int before[MANY] = {};
  for (int base = 0; base <= num; base += 32) {
    int value[MANY], sum[MANY];
#pragma unroll
    for (int i = 0; i < MANY; ++i) sum[i] = value[i] = base + lane < num ? sums[i][base + lane] : 0;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2)
#pragma unroll
      for (int i = 0; i < MANY; ++i) {
        int lower = __shfl_up_sync(ALL, sum[i], distance);
        if (lane >= distance) sum[i] += lower;
      }
#pragma unroll
    for (int i = 0; i < MANY; ++i) {
      if (base + lane <= num) sums[i][base + lane] = before[i] + sum[i] - value[i];
      before[i] += __shfl_sync(ALL, sum[i], 31);
    }
  }
  __syncwarp();
}

// gathered.gathered_quotas for this rank, one warp per expert. room: the tokens that the split gives to the copies of a
// rank. A rank's copies serve its own tokens first. The remaining tokens are matched with the remaining room in the order
// of ranks, first within each node, then over all ranks. The copies of one rank are filled one after the other.
extern "C" __global__ void __launch_bounds__(THREADS) quotas(const __grid_constant__ Arguments a) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, e = blockIdx.x * WARPS + warp, ranks = a.ranks;
  char *at = reinterpret_cast<char *>(shared_memory);
  int *sums = allocate<int>(at, WARPS * 5 * (ranks + 1)) + warp * 5 * (ranks + 1);
  // What remains after ranks have served their own tokens (_1), and after they have served those of their node (_2).
  int *room = sums, *tokens_1 = room + ranks + 1, *room_1 = tokens_1 + ranks + 1;
  int *tokens_2 = room_1 + ranks + 1, *room_2 = tokens_2 + ranks + 1;
  bool some = e < a.experts && a.first[e + 1] - a.first[e] > 1;
  allow_next_kernel();
  wait_for_previous_kernel();
  if (!some) return;
  int first = a.first[e], last = a.first[e + 1];
  const i64 *split = static_cast<const i64 *>(a.split);
  for (int r = lane; r < ranks; r += 32) {
    room[r] = 0;
    tokens_1[r] = static_cast<int>(a.rows[static_cast<i64>(r) * (a.experts + 1) + e]);
  }
  __syncwarp();
  for (int p = first + lane; p < last; p += 32)
    atomicAdd(&room[a.copies[p].slot / slots_per_rank(a)], static_cast<int>(split[a.copies[p].slot]));
  __syncwarp();
  for (int r = lane; r < ranks; r += 32) {
    int tokens = tokens_1[r];
    tokens_1[r] = maximum(tokens - room[r], 0);
    room_1[r] = maximum(room[r] - tokens, 0);
  }
  __syncwarp();
  running_sums({room, tokens_1, room_1}, ranks, lane);
  for (int r = lane; r < ranks; r += 32) {
    int start = a.node[r], end = a.node[ranks + r];
    int tokens_end = tokens_1[r + 1] - tokens_1[start], room_end = room_1[r + 1] - room_1[start];
    int tokens = tokens_1[r + 1] - tokens_1[r], space = room_1[r + 1] - room_1[r];
    tokens_2[r] = minimum(tokens, maximum(tokens_end - (room_1[end] - room_1[start]), 0));
    room_2[r] = minimum(space, maximum(room_end - (tokens_1[end] - tokens_1[start]), 0));
  }
  __syncwarp();
  running_sums({tokens_2, room_2}, ranks, lane);

  // This rank's tokens are an interval of all remaining tokens of its node, and an interval of those of the group.
  int rank = a.rank, start = a.node[rank], end = a.node[ranks + rank];
  int in_node = tokens_1[rank] - tokens_1[start], in_node_end = tokens_1[rank + 1] - tokens_1[start];
  int in_group = tokens_2[rank], in_group_end = tokens_2[rank + 1], before = 0, room_before = 0;
  for (int base = first; base < last; base += 32) {
    int p = base + lane, taken = 0, space = p < last ? static_cast<int>(split[a.copies[p].slot]) : 0;
    int upper = warp_sum_before(space, lane);
    if (p < last) {
      int r = a.copies[p].slot / slots_per_rank(a);
      // The copy has the interval low .. high of the room on its rank. The tokens of the rank fill the room first, then
      // those of the node, then the others.
      int high = room_before + upper - room[r], low = high - space;
      int all = room[r + 1] - room[r], left_1 = room_1[r + 1] - room_1[r], left_2 = room_2[r + 1] - room_2[r];
      if (r == rank) taken += overlap(low, high, 0, all - left_1);
      if (r >= start && r < end) {
        int shift = all - left_1 - (room_1[r] - room_1[start]);
        taken += overlap(low, minimum(high, all - left_2), maximum(in_node + shift, all - left_1), in_node_end + shift);
      }
      int shift = all - left_2 - room_2[r];
      taken += overlap(low, high, maximum(in_group + shift, all - left_2), in_group_end + shift);
    }
    room_before += __shfl_sync(ALL, upper, 31);
    int sum = warp_sum_before(taken, lane);
    if (p < last) a.ends[p] = before + sum;
    before += __shfl_sync(ALL, sum, 31);
  }
}

// Adds to routed the assignments that each rank serves, from the tokens of all ranks. A thread adds one copy (one expert
// for the split `static`) for SOURCES source ranks.
extern "C" __global__ void __launch_bounds__(THREADS) serve(const __grid_constant__ Arguments a) {
  char *at = reinterpret_cast<char *>(shared_memory);
  Ends ends = allocate_ends(a, at);
  allow_next_kernel();
  find_ends(a, ends);
  int begin = blockIdx.y * SOURCES, stop = minimum(begin + SOURCES, a.ranks), p = blockIdx.x * THREADS + threadIdx.x;
  u64 *routed = reinterpret_cast<u64 *>(a.routed);
  if (a.follow == STATIC) {
    for (int r = begin; r < stop && p < a.experts; ++r) {
      i64 number = a.rows[static_cast<i64>(r) * (a.experts + 1) + p];
      if (number) atomicAdd(&routed[a.nearest[r * a.experts + p] / slots_per_rank(a)], static_cast<u64>(number));
    }
    return;
  }
  if (p >= a.slots) return;
  Copy copy = a.copies[p];
  i64 number[SOURCES], sum = 0;
#pragma unroll
  for (int i = 0; i < SOURCES; ++i)
    number[i] = begin + i < stop ? a.rows[static_cast<i64>(begin + i) * (a.experts + 1) + copy.expert] : 0;
#pragma unroll
  for (int i = 0; i < SOURCES; ++i)
    sum += quota(a, ends, p, copy, (static_cast<u32>(begin + i) << BITS) / a.ranks, number[i]);
  if (sum) atomicAdd(&routed[copy.slot / slots_per_rank(a)], static_cast<u64>(sum));
}

// Waterfill chooses the rank that computes a token's shared expert. epsim/policies/waterfill.py describes it.

struct Water {
  i64 *load, *weight, *end;  // [ranks]: the loads that this rank knows, the weights, and their running sums
  i64 *total;                // the sum of the weights
  int *fallback;             // the rank to use if all ranks are candidates and none is below the waterline
};

__device__ i64 rounded_up(i64 tokens, i64 cost) { return -((-tokens * cost) >> COST_BITS); }

__device__ Water allocate_water(const Arguments &a, char *&at) {
  Water water;
  water.load = allocate<i64>(at, a.ranks), water.weight = allocate<i64>(at, a.ranks), water.end = allocate<i64>(at, a.ranks);
  water.total = allocate<i64>(at, 1);
  water.fallback = allocate<int>(at, 1);
  return water;
}

// Computes the load of each rank, from the tokens of all ranks if a.global is set, else from this rank's tokens. All threads
// must call it; they are synchronised at the end.
__device__ void find_loads(const Arguments &a, const Ends &ends, const Water &water) {
  bool summed = a.global && a.follow != GATHERED;
  for (int r = threadIdx.x; r < a.ranks; r += THREADS) water.load[r] = summed ? a.routed[r] : 0;
  __syncthreads();
  if (summed) return;
  u64 *load = reinterpret_cast<u64 *>(water.load);
  if (a.global) {
    for (int s = threadIdx.x; s < a.slots; s += THREADS)
      atomicAdd(&load[s / slots_per_rank(a)], static_cast<u64>(static_cast<const i64 *>(a.split)[s]));
  } else if (a.follow == STATIC) {
    for (int e = threadIdx.x; e < a.experts; e += THREADS)
      atomicAdd(&load[a.nearest[a.rank * a.experts + e] / slots_per_rank(a)], static_cast<u64>(a.rank_counts[e]));
  } else {
    for (int p = threadIdx.x; p < a.slots; p += THREADS) {
      Copy copy = a.copies[p];
      i64 number = quota(a, ends, p, copy, ends.shift, ends.rank_tokens[copy.expert]);
      atomicAdd(&load[copy.slot / slots_per_rank(a)], static_cast<u64>(number));
    }
  }
  __syncthreads();
}

__device__ i64 warp_sum_before(i64 value, int lane) {
  i64 sum = value;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    i64 lower = __shfl_up_sync(ALL, sum, distance);
    if (lane >= distance) sum += lower;
  }
  return sum;
}

// Whether a rank has a lower load than another; of equal loads, that of the lower rank counts as lower.
__device__ bool lighter(i64 load, int rank, i64 than_load, int than_rank) {
  return load < than_load || (load == than_load && rank < than_rank);
}

// Computes the waterline and the weights of the ranks, in the first warp. All threads must call it; they are synchronised
// at the end.
__device__ void find_weights(const Arguments &a, const Water &water) {
  int lane = threadIdx.x;
  if (lane < 32) {
    i64 sum = 0, least_load = 0x7fffffffffffffffll;
    int lightest = a.ranks;
    for (int r = lane; r < a.ranks; r += 32) {
      i64 load = water.load[r];
      if (a.plus_local && (a.global || r == a.rank)) {
        const i64 *counts = a.global ? a.rows + static_cast<i64>(r) * (a.experts + 1) : a.rank_counts;
        load += rounded_up(counts[a.experts], a.cost);
      }
      water.load[r] = load;
      sum += load;
      if (load < least_load) least_load = load, lightest = r;
    }
    for (int distance = 16; distance; distance /= 2) {
      sum += __shfl_xor_sync(ALL, sum, distance);
      i64 load = __shfl_xor_sync(ALL, least_load, distance);
      int rank = __shfl_xor_sync(ALL, lightest, distance);
      if (lighter(load, rank, least_load, lightest)) least_load = load, lightest = rank;
    }
    i64 waiting = a.global ? a.loads[a.experts] : a.rank_counts[a.experts];
    i64 line = (sum + rounded_up(waiting, a.cost) + a.ranks - 1) / a.ranks, before = 0;
    for (int base = 0; base < a.ranks; base += 32) {
      int r = base + lane;
      i64 weight = 0;
      if (r < a.ranks && water.load[r] < line) weight = (line - water.load[r]) * (r == a.rank ? 11 : 10);
      i64 upper = warp_sum_before(weight, lane);
      if (r < a.ranks) water.weight[r] = weight, water.end[r] = before + upper;
      before += __shfl_sync(ALL, upper, 31);
    }
    __syncwarp();
    if (lane == 0) {
      *water.total = before;
      *water.fallback = 10 * water.load[a.rank] > 11 * least_load ? lightest : a.rank;
    }
  }
  __syncthreads();
}

__device__ int choose_of_all(const Arguments &a, const Water &water, u64 number) {
  if (*water.total == 0) return *water.fallback;
  i64 drawn = number % static_cast<u64>(*water.total);
  int low = 0, high = a.ranks - 1;
  while (low < high) {
    int middle = (low + high) / 2;
    if (water.end[middle] > drawn)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

// Draws the rank of a token's shared expert from this rank and visited [k] (-1 for none), in proportion to their weights.
// weight [k]: the weights of the visited ranks; 0 for this rank and for all but the first mention of a rank. One thread for
// each j < k calls it. The thread of the chosen rank gets it, the others get -1; the thread of j = 0 also represents this
// rank.
__device__ int choose_of_visited(const Arguments &a, const Water &water, const int *visited, const i64 *weight, int j,
                                 u64 number) {
  int mine = visited[j], lightest = a.rank;
  i64 own = water.weight[a.rank], own_load = water.load[a.rank], least_load = own_load;
  i64 sum = own, before = a.rank < mine ? own : 0, before_own = 0;
  for (int i = 0; i < a.top_k; ++i) {
    int other = visited[i];
    if (other < 0) continue;
    i64 width = weight[i], load = water.load[other];
    sum += width;
    if (other < mine) before += width;
    if (other < a.rank) before_own += width;
    if (lighter(load, other, least_load, lightest)) least_load = load, lightest = other;
  }
  if (sum == 0) return j ? -1 : 10 * own_load > 11 * least_load ? lightest : a.rank;
  i64 drawn = number % static_cast<u64>(sum);
  if (mine >= 0 && before <= drawn && drawn < before + weight[j]) return mine;
  return j == 0 && before_own <= drawn && drawn < before_own + own ? a.rank : -1;
}

// Where a token's shared expert goes: Waterfill (epsim/policies/waterfill.py says how).

struct Water {
  i64 *load, *weight, *end;  // [ranks]: as this rank sees them; running sums of weights
  i64 *total;                // of weights
  int *fallback;             // where no rank has slack and all are candidates
};

__device__ i64 rounded_up(i64 tokens, i64 cost) { return -((-tokens * cost) >> COST_BITS); }

__device__ Water place_water(const Arguments &a, char *&at) {
  Water water;
  water.load = take<i64>(at, a.ranks), water.weight = take<i64>(at, a.ranks), water.end = take<i64>(at, a.ranks);
  water.total = take<i64>(at, 1);
  water.fallback = take<int>(at, 1);
  return water;
}

// What ranks serve: of all tokens where global, else of this rank's. Ends with all threads in step.
__device__ void find_loads(const Arguments &a, const u32 *end, const Water &water) {
  for (int r = threadIdx.x; r < a.ranks; r += blockDim.x)
    water.load[r] = a.global && a.follow != GATHERED ? a.routed[r] : 0;
  __syncthreads();
  u64 *load = reinterpret_cast<u64 *>(water.load);
  if (a.global && a.follow == GATHERED) {
    for (int s = threadIdx.x; s < a.slots; s += blockDim.x)
      atomicAdd(&load[s / slots_per_rank(a)], static_cast<u64>(static_cast<const i64 *>(a.split)[s]));
  } else if (!a.global && a.follow == STATIC) {
    for (int e = threadIdx.x; e < a.experts; e += blockDim.x)
      atomicAdd(&load[a.nearest[a.rank * a.experts + e] / slots_per_rank(a)], static_cast<u64>(a.own[e]));
  } else if (!a.global) {
    for (int p = threadIdx.x; p < a.slots; p += blockDim.x)
      atomicAdd(&load[a.slot[p] / slots_per_rank(a)],
                static_cast<u64>(quota(a, end, p, a.rank, a.own[a.expert[p]])));
  }
  __syncthreads();
}

__device__ i64 warp_sum_before(i64 value, int lane) {
  i64 sum = value;
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    i64 lower = __shfl_up_sync(ALL, sum, by);
    if (lane >= by) sum += lower;
  }
  return sum;
}

// The waterline and the ranks' weights, by the block's first warp. Ends with all threads in step.
__device__ void find_weights(const Arguments &a, const Water &water) {
  int lane = threadIdx.x;
  if (lane < 32) {
    i64 sum = 0, least_load = 0x7fffffffffffffffll;
    int lightest = 0;
    for (int base = 0; base < a.ranks; base += 32) {
      int r = base + lane;
      i64 load = 0;
      if (r < a.ranks) {
        load = water.load[r];
        if (a.plus_local && (a.global || r == a.rank)) {
          const i64 *counts = a.global ? a.rows + static_cast<i64>(r) * (a.experts + 1) : a.own;
          load += rounded_up(counts[a.experts], a.cost);
        }
        water.load[r] = load;
      }
      for (int i = 0; i < 32 && base + i < a.ranks; ++i) {
        i64 other = __shfl_sync(ALL, load, i);
        sum += other;
        if (other < least_load) least_load = other, lightest = base + i;
      }
    }
    i64 waiting = a.global ? a.loads[a.experts] : a.own[a.experts];
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

// The candidates are this rank and visited [k], -1 for none. weight [k]: of the first of equals, 0 of other ones and of
// this rank. Called for each j in 0 .. k, k standing for this rank: gives the chosen rank to one of them, -1 to others.
__device__ int choose_of_visited(const Arguments &a, const Water &water, const int *visited, const i64 *weight, int j,
                                 u64 number) {
  int k = a.top_k, mine = j < k ? visited[j] : a.rank, lightest = a.rank;
  i64 own = water.weight[a.rank], own_load = water.load[a.rank], least_load = own_load;
  i64 width = j < k ? weight[j] : own, before = j < k && a.rank < mine ? own : 0, sum = own;
  for (int i = 0; i < k; ++i) {
    int other = visited[i];
    if (other < 0) continue;
    sum += weight[i];
    if (other < mine) before += weight[i];
    i64 load = water.load[other];
    if (load < least_load || (load == least_load && other < lightest)) least_load = load, lightest = other;
  }
  if (sum == 0) return j < k ? -1 : 10 * own_load > 11 * least_load ? lightest : a.rank;
  i64 drawn = number % static_cast<u64>(sum);
  return before <= drawn && drawn < before + width ? mine : -1;
}

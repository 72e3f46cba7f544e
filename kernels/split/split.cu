// The split with a proof of optimality, one warp per problem. cpu.py describes the method and gives the same bits. Integers
// may be summed in any order. Float64 operations are in the order of cpu.py, without fused multiply-adds.
//
// Up to 32 ranks, lane r holds the load of rank r, and a set of ranks is a 32-bit mask. Beyond 32 ranks, the lanes process
// experts that share no rank at the same time, and the queues of the breadth-first search are in shared memory.
//
// tests/kernels/split/warp.h compiles this file for the host, one fiber per lane.

#include "state.cuh"

#include "device.cuh"

#include "pour.cuh"

#include "coarse.cuh"
#include "far.cuh"
#include "near.cuh"
#include "units.cuh"

// flow.close_gap. FAR: more than 32 ranks.
template <bool FAR>
__device__ int close_gap(Problem &p, Bound &bound, double tol, double tiny_part, int limit, int lane) {
  int rounds = 0, mark = 0;
  double load = 0.0;
  if (FAR)
    for (int r = lane; r < p.ranks; r += 32) p.seen[r] = 0;
  else if (lane < p.ranks)
    load = p.load[lane];
  __syncwarp();
  while (rounds < limit) {
    double cap = divide(p, bound.numerator, bound.size), slack = 0.0;
    if (p.whole) {
      cap = floor(cap);
      while (cap * bound.size < bound.numerator) cap += 1.0;
    } else {
      cap = cap * (1 + 0.5 * tol);
      slack = cap * tol / 8;
    }
    int reached;
    u32 seen = 0;
    mark += 2;
    if (FAR) {
      reached = push_far(p, cap, slack, slack * tiny_part, mark, lane);
      if (reached == 0) break;
    } else {
      seen = __ballot_sync(ALL, lane < p.ranks && load > cap + slack);
      if (!seen) break;
      reached = push(p, load, cap, slack, slack * tiny_part, seen, lane) ? -1 : __popc(seen);
    }
    ++rounds;
    if (reached > 0) {
      double captive;
      if (FAR)
        captive = captive_load_far(p, mark, lane);
      else
        captive = captive_load(p, seen, lane);
      if (!p.whole && captive * bound.size <= bound.numerator * reached) break;
      bound.numerator = captive, bound.size = reached;
    } else if (!p.whole && rounds <= NUM_LEVELLED) {
      if (FAR)
        level_out_far(p, mark + 1, lane);
      else
        level_out_near(p, load, lane);
      __syncwarp();
    }
  }
  if (!FAR && lane < p.ranks) p.load[lane] = load;
  __syncwarp();
  return rounds;
}

// The sum over the lanes. It sums 27 bits at a time, because the sum of 32 such numbers has at most 32 bits.
__device__ u64 warp_sum(u64 value) {
  u64 low = __reduce_add_sync(ALL, static_cast<u32>(value & 0x7ffffff));
  u64 middle = __reduce_add_sync(ALL, static_cast<u32>(value >> 27 & 0x7ffffff));
  u64 high = __reduce_add_sync(ALL, static_cast<u32>(value >> 54));
  return low + (middle << 27) + (high << 54);
}

// Copies the staged part of a layer's table to shared memory.
template <int WARPS>
__device__ void stage_table(const Arguments &a, i64 layer, char *staged, int thread) {
  const int TOGETHER = WARPS > 1 ? 2 : 8;
  const uint4 *from = reinterpret_cast<const uint4 *>(a.tables + layer * a.table_bytes);
#pragma unroll TOGETHER
  for (int i = thread; i < a.n.staged / 16; i += 32 * WARPS) reinterpret_cast<uint4 *>(staged)[i] = from[i];
}

// The layer whose table a problem uses: its own, or 0 if the placement has no such layer.
__device__ i64 table_of(const Arguments &a, i64 layer) { return 0 <= layer && layer < a.layers ? layer : 0; }

// Copies the experts' loads to shared memory. Returns whether any is negative. All threads are synchronised afterwards.
// before: the layer whose table is staged. layer: the layer that is needed.
template <int WARPS>
__device__ bool stage_loads(const Arguments &a, int b, i64 before, i64 layer, char *staged, i64 *expert_load, u64 *totals,
                            int thread) {
  const int THREADS = 32 * WARPS, AHEAD = 8 / WARPS;
  i64 ahead[AHEAD];
  int experts = a.n.experts;
  bool bad = false;
  u64 sum = 0;
  const i64 *loads = a.loads + static_cast<i64>(b) * experts;
  auto put = [&](int e, i64 bits) {
    bad = bad || (a.integral ? bits < 0 : __longlong_as_double(bits) < 0.0);
    // The limit keeps sums below 2^63. A total with such a load is refused.
    if (a.integral && bits > TOO_MUCH) bits = TOO_MUCH;
    expert_load[e] = bits;
    sum += bits;
  };
#pragma unroll
  for (int j = 0; j < AHEAD; ++j) ahead[j] = thread + THREADS * j < experts ? loads[thread + THREADS * j] : 0;
  if (before != layer) stage_table<WARPS>(a, layer, staged, thread);
#pragma unroll
  for (int j = 0; j < AHEAD; ++j)
    if (thread + THREADS * j < experts) put(thread + THREADS * j, ahead[j]);
  for (int e = thread + THREADS * AHEAD; e < experts; e += THREADS) put(e, loads[e]);
  if (thread == 0) expert_load[experts] = 0;
  if (totals && a.integral) {
    sum = warp_sum(sum);
    if (thread % 32 == 0) totals[thread / 32] = sum;
  }
  if (WARPS > 1) return __syncthreads_or(bad);
  bad = __ballot_sync(ALL, bad) != 0;
  __syncwarp();
  return bad;
}

__device__ void write(void *out, i64 i, double value, bool integer) {
  if (integer)
    static_cast<i64 *>(out)[i] = static_cast<i64>(value);
  else
    static_cast<double *>(out)[i] = value;
}

__device__ double add_experts(const Problem &p) {
  double total = 0.0;
#pragma unroll 8
  for (int r = 0; r < p.ranks; ++r) total += p.fixed[r];
#pragma unroll 8
  for (int k = 0; k < p.replicated; ++k) total += p.demand[k];
  return total;
}

struct Result {
  double peak;
  Bound bound;
  int sweeps;
  bool look_at_even;  // whether the even split may have a lower peak than this split
};

// cpu.far_split.
__device__ Result far_split(Problem &p, const Arguments &a, double total, const double *start, const double (&ahead)[2],
                           int lane) {
  if (start) {
    write_start<1>(p, start, ahead, a.n.slots, (a.n.copies + 1) / 2 * 2, lane);
    __syncwarp();
    rescale(p, lane);
  } else if (p.whole) {
    for (int c = lane; c < p.copies; c += 32) p.x[c] = 0.0;
    __syncwarp();
  } else {
    split_evenly(p, lane);
  }
  add_copies(p, lane);
  for (int sweep = 0; sweep < NUM_SWEEPS; ++sweep) water_fill(p, lane);
  double fullest = 0.0;
  for (int r = lane; r < p.ranks; r += 32) fullest = maximum(fullest, p.fixed[r]);
  fullest = warp_maximum(fullest);
  Bound bound = {total, p.ranks};
  if (fullest * p.ranks > total) bound = {fullest, 1};
  return {add_copies(p, lane), bound, NUM_SWEEPS, true};
}

// Pushes load along augmenting paths if the peak is above the bound, and takes the even split if its peak is lower. Called
// by one warp.
template <bool FAR>
__device__ int finish(Problem &p, const Arguments &a, Result &result, int lane) {
  int rounds = 0;
  Bound &bound = result.bound;
  double mean = bound.numerator / bound.size;
  if (p.whole ? (result.peak - 1.0) * bound.size >= bound.numerator : result.peak > mean * (1 + a.tol)) {
    double tiny_part = static_cast<double>(p.ranks) / (2 * a.n.slots);
    rounds = close_gap<FAR>(p, bound, a.tol, tiny_part, a.limit - result.sweeps, lane);
    if (rounds) {
      if (FAR && !p.whole) water_fill(p, lane);
      result.peak = add_copies(p, lane);
    }
  }
  if (!p.whole && (result.look_at_even || rounds)) {
    double even_peak = add_even(p, lane);
    if (result.peak > even_peak) {
      split_evenly(p, lane);
      result.peak = even_peak;
    }
  }
  return rounds;
}

template <bool FAR, int WARPS>
__device__ void solve(const Arguments &a, char *shared, int b, int thread) {
  const Sizes &n = a.n;
  const int THREADS = 32 * WARPS;
  int lane = thread & 31;
  Problem p;
  char *at = shared + n.staged;
  int even_copies = (n.copies + 1) / 2 * 2;
  p.values = p.x = allocate<double>(at, even_copies + n.experts + 1);
  double *expert_load = p.x + even_copies;
  i64 *expert_bits = reinterpret_cast<i64 *>(expert_load);
  p.fixed = allocate<double>(at, n.ranks);
  p.load = allocate<double>(at, n.ranks);
  p.demand = allocate<double>(at, n.replicated);
  if (!FAR) {
    p.inverse = nullptr;
    p.experts = allocate<uint2>(at, n.replicated);
    p.loads = allocate<int>(at, 32);
    p.fixed_units = allocate<int>(at, 32);
    p.warm_loads = allocate<int>(at, 32);
    p.totals = allocate<u64>(at, WIDE);
    p.even_top = allocate<int>(at, 2);
    p.ended = p.even_top + 1;
    p.searched = allocate<Searched>(at, 1);
    p.new_bound = allocate<Captive>(at, 1);
    if (thread < 32) p.loads[thread] = 0, p.fixed_units[thread] = 0, p.warm_loads[thread] = 0;
    if (thread == 0) *p.ended = 0;
    at = shared + (at - shared + 15) / 16 * 16;
    // The augmenting paths reuse this memory after the search.
    p.used = reinterpret_cast<u32 *>(at);
    p.reach = p.used + n.replicated;
    p.queue = reinterpret_cast<u16 *>(p.loads);
    p.cells = allocate<Cell>(at, (n.waves + 1) * n.ranks);
    p.partly_used = allocate<u32>(at, n.waves * n.ranks);
  } else {
    p.inverse = allocate<double>(at, NUM_INVERSES);
    for (int i = lane; i < NUM_INVERSES; i += 32) p.inverse[i] = 1.0 / i;
    p.queue = allocate<u16>(at, n.ranks);
    p.root = allocate<u16>(at, n.ranks);
    p.from = allocate<u16>(at, n.ranks);
    p.to = allocate<u16>(at, n.ranks);
    p.seen = allocate<int>(at, n.ranks);
  }
  p.whole = a.whole;
  p.ranks = n.ranks;

  // The previous kernel may not have written the layer yet. The table of the present value is loaded in advance. The layer
  // is read again, without the L1 cache, after the previous kernel has ended.
  i64 before = table_of(a, __ldcg(a.layer + b));
  stage_table<WARPS>(a, before, shared, thread);
  wait_for_previous_kernel();
  allow_next_kernel();
  i64 layer = __ldcg(a.layer + b);
  const double *start = a.start ? a.start + static_cast<i64>(b) * n.slots : nullptr;
  double ahead[2] = {0.0, 0.0};
#pragma unroll
  for (int j = 0; j < 2; ++j)
    if (WARPS > 1 && start && thread + THREADS * j < n.slots) ahead[j] = start[thread + THREADS * j];
  int status = layer < 0 || layer >= a.layers ? BAD_LAYER : OK;
  layer = table_of(a, layer);
  bool bad = stage_loads<WARPS>(a, b, before, layer, shared, expert_bits, FAR ? nullptr : p.totals, thread);
  bind_table<FAR>(p, shared, a.tables + layer * a.table_bytes, n);

  auto as_load = [&](i64 bits) { return a.integral ? static_cast<double>(bits) : __longlong_as_double(bits); };
  double total;
  int shift = 0;
  bool exact = false;  // whether loads are exact in units
  auto add_fixed = [&]() {
    for (int k = thread; k < p.replicated; k += THREADS) p.demand[k] = as_load(expert_bits[p.expert[k]]);
    if (thread < 32)
      for (int r = lane; r < p.ranks; r += 32) {
        double here = 0.0;
        if (FAR) {
          int end = p.fixed_start[r + 1];
#pragma unroll 4
          for (int i = p.fixed_start[r]; i < end; ++i) here += as_load(expert_bits[p.fixed_expert[i]]);
        } else {
          for (int i = r; i < n.rows * p.ranks; i += p.ranks) here += as_load(expert_bits[p.fixed_row[i]]);
        }
        p.fixed[r] = here;
      }
    sync_problem<WARPS>();
  };
  if (!FAR && a.integral) {  // integer sums do not depend on their order
    u64 sum = 0;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) sum += p.totals[i];
    total = sum;
  } else {
    add_fixed();
    total = add_experts(p);
  }
  if (!FAR) {
    shift = shift_of(p, total);
    exact = a.integral && shift >= 0;
    if (a.integral && !exact) add_fixed();
  }
  if (status == OK) status = bad || total != total ? BAD_LOAD : total >= a.too_large ? TOO_LARGE : OK;
  if (status != OK) {
    if (a.split)
      for (int s = thread; s < n.slots; s += THREADS) write(a.split, static_cast<i64>(b) * n.slots + s, 0.0, p.whole);
    if (thread == 0) {
      a.peak[b] = __longlong_as_double(0x7ff0000000000000ll);  // infinity, so that the problem counts as not proven
      a.bound[b] = 0.0;
      write(a.numerator, b, 0.0, a.integral);
      a.size[b] = 1, a.sweeps[b] = 0, a.status[b] = status;
    }
    return;
  }

  Result result;
  int rounds = 0, writer = 0;
  if (FAR) {
    result = far_split(p, a, total, start, ahead, lane);
    rounds = finish<FAR>(p, a, result, lane);
  } else {
    Searched searched = near_split<WARPS>(p, a, shift, expert_bits, start, ahead, thread);
    write_parts<WARPS>(p, shift, exact, thread);
    double inverse = power_of_two(-shift);
    result.peak = searched.top * inverse;
    result.bound = {searched.captive.load * inverse, __popc(searched.captive.inside)};
    result.sweeps = searched.sweeps;
    result.look_at_even = *p.even_top <= searched.top + n.slots;
    // Nearly always true: the peak is within the tolerance, with a margin of 1/32 of it for the rounding to units, and lower
    // than the peak of the even split.
    bool settled = exact && (p.whole ? searched.top <= searched.captive.bound : !result.look_at_even) &&
                   searched.top <= searched.captive.bound + __umulhi(searched.captive.bound, spare_of(p, a.tol));
    if (settled) {
      writer = THREADS - 1;
    } else {
      if (exact) add_fixed();
      if (thread < 32) {
        if (!exact) {
          result.bound.numerator = captive_load(p, searched.captive.inside, lane);
          result.peak = add_copies(p, lane);
        } else {
          add_copies(p, lane);
        }
        rounds = finish<FAR>(p, a, result, lane);
      }
      sync_problem<WARPS>();
    }
  }
  i64 out = static_cast<i64>(b) * n.slots;
  auto value = [&](int from) { return from < even_copies ? p.x[from] : as_load(expert_bits[from - even_copies]); };
#pragma unroll 4
  for (int s = thread; a.split && s < n.slots; s += THREADS)
    if (!(p.source[s] & TWIN)) write(a.split, out + s, value(p.source[s]), p.whole);
  for (int i = thread; a.split && i < p.twins; i += THREADS) {
    int s = p.twin[3 * i], index = p.twin[3 * i + 1], mates = p.twin[3 * i + 2];
    double part = value(p.source[s] & ~TWIN);
    part = p.whole ? floor((part + (mates - 1 - index)) / mates) : part / mates;
    write(a.split, out + s, part, p.whole);
  }
  // The last warp, which has the fewest slots to write, writes the other results, unless the first warp changed them.
  if (thread == writer) {
    double mean = result.bound.numerator / result.bound.size;
    a.peak[b] = result.peak;
    a.bound[b] = minimum(mean, result.peak);
    write(a.numerator, b, result.bound.numerator, a.integral);
    a.size[b] = result.bound.size, a.sweeps[b] = result.sweeps + rounds, a.status[b] = OK;
  }
}

extern "C" __global__ void __launch_bounds__(32, 20) split_near(const __grid_constant__ Arguments a) {
  solve<false, 1>(a, reinterpret_cast<char *>(shared_memory), blockIdx.x, threadIdx.x);
}

// Several warps per problem, for launches of few problems.
extern "C" __global__ void __launch_bounds__(32 * WIDE, 2) split_wide(const __grid_constant__ Arguments a) {
  solve<false, WIDE>(a, reinterpret_cast<char *>(shared_memory), blockIdx.x, threadIdx.x);
}

extern "C" __global__ void __launch_bounds__(32, 16) split_far(const __grid_constant__ Arguments a) {
  solve<true, 1>(a, reinterpret_cast<char *>(shared_memory), blockIdx.x, threadIdx.x);
}

// The certified split (cpu.py says how) with one warp a problem, equal to the CPU form bit for bit: the same steps in
// the same order, float64, no contraction to fused multiply-adds. What may run side by side does: experts that share
// no rank are poured together, a search expands all ranks of an expert at once.
//
// Up to 32 ranks, lane r keeps rank r's load and place in the search tree, and sets of ranks are bits of a word. Beyond,
// one lane walks the queues of the CPU form in shared memory.
//
// tests/kernels/split/warp.h compiles this file for the host, a fiber a lane.

#include "state.cuh"

#include "pour.cuh"

#include "far.cuh"
#include "near.cuh"

// As flow.close_gap; FAR: more than 32 ranks.
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
      reached = lane ? 0 : push_far(p, cap, slack, slack * tiny_part, mark);
      reached = __shfl_sync(ALL, reached, 0);
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
        captive = __shfl_sync(ALL, lane ? 0.0 : captive_load_far(p, mark), 0);
      else
        captive = captive_load(p, seen, lane);
      if (!p.whole && captive * bound.size <= bound.numerator * reached) break;
      bound.numerator = captive, bound.size = reached;
    } else if (!p.whole && rounds <= NUM_LEVELLED) {
      if (!FAR)
        level_out(p, load, lane);
      else if (lane == 0)
        level_out_far(p, mark + 1);
      __syncwarp();
    }
  }
  if (!FAR && lane < p.ranks) p.load[lane] = load;
  __syncwarp();
  return rounds;
}

// A problem's table and its experts' loads, to shared memory; whether a load is negative. The first loads are asked for
// before the table, whose address waits for the layer.
__device__ bool stage(const Arguments &a, int b, i64 layer, char *table, double *expert_load, int lane) {
  const int AHEAD = 8;
  i64 ahead[AHEAD];
  int experts = a.n.experts;
  bool bad = false;
  const i64 *loads = a.loads + static_cast<i64>(b) * experts;
  auto put = [&](int e, i64 bits) {
    double value = a.integral ? static_cast<double>(bits) : __longlong_as_double(bits);
    bad = bad || value < 0.0;
    expert_load[e] = value;
  };
#pragma unroll
  for (int j = 0; j < AHEAD; ++j) ahead[j] = lane + 32 * j < experts ? loads[lane + 32 * j] : 0;
  const uint4 *from = reinterpret_cast<const uint4 *>(a.tables + layer * a.table_bytes);
#pragma unroll 8
  for (int i = lane; i < a.table_bytes / 16; i += 32) reinterpret_cast<uint4 *>(table)[i] = from[i];
#pragma unroll
  for (int j = 0; j < AHEAD; ++j)
    if (lane + 32 * j < experts) put(lane + 32 * j, ahead[j]);
#pragma unroll 4
  for (int e = lane + 32 * AHEAD; e < experts; e += 32) put(e, loads[e]);
  return bad;
}

__device__ void write(void *out, i64 i, double value, bool integer) {
  if (integer)
    static_cast<i64 *>(out)[i] = static_cast<i64>(value);
  else
    static_cast<double *>(out)[i] = value;
}

template <bool FAR>
__device__ void solve(const Arguments &a, char *shared, int b, int lane) {
  const Sizes &n = a.n;
  Problem p;
  char *at = shared + a.table_bytes;
  int even_copies = (n.copies + 1) / 2 * 2;
  p.values = p.x = take<double>(at, even_copies + n.experts);
  double *expert_load = p.x + even_copies;
  p.fixed = take<double>(at, n.ranks);
  p.load = take<double>(at, n.ranks);
  p.demand = take<double>(at, n.replicated);
  p.inverse = take<double>(at, NUM_INVERSES);
  p.queue = take<u16>(at, n.ranks);
  if (!FAR) {
    p.used = take<u32>(at, n.replicated);
    p.reach = take<u32>(at, n.copies);
  } else {
    p.root = take<u16>(at, n.ranks);
    p.from = take<u16>(at, n.ranks);
    p.to = take<u16>(at, n.ranks);
    p.seen = take<int>(at, n.ranks);
  }
  p.whole = a.whole;
  p.ranks = n.ranks;

  i64 layer = a.layer[b];
  int status = OK;
  if (layer < 0 || layer >= a.layers) status = BAD_LAYER, layer = 0;
  bool bad = stage(a, b, layer, shared, expert_load, lane);
  for (int i = lane; i < NUM_INVERSES; i += 32) p.inverse[i] = 1.0 / i;
  __syncwarp();
  place_table(p, shared, n);
  bad = __ballot_sync(ALL, bad) != 0;

  double fullest = 0.0;
  for (int r = lane; r < p.ranks; r += 32) {
    double here = 0.0;
    int end = p.fixed_start[r + 1];
#pragma unroll 4
    for (int i = p.fixed_start[r]; i < end; ++i) here += expert_load[p.fixed_expert[i]];
    p.fixed[r] = here;
    fullest = most(fullest, here);
  }
  for (int k = lane; k < p.replicated; k += 32) p.demand[k] = expert_load[p.expert[k]];
  __syncwarp();
  fullest = warp_most(fullest);
  double total = 0.0;
#pragma unroll 8
  for (int r = 0; r < p.ranks; ++r) total += p.fixed[r];
#pragma unroll 8
  for (int k = 0; k < p.replicated; ++k) total += p.demand[k];
  if (status == OK) status = bad || total != total ? BAD_LOAD : total >= a.too_large ? TOO_LARGE : OK;
  if (status != OK) {
    if (a.split)
      for (int s = lane; s < n.slots; s += 32) write(a.split, static_cast<i64>(b) * n.slots + s, 0.0, p.whole);
    if (lane == 0) {
      a.peak[b] = p.inverse[0];  // infinite: counts as not proven
      a.bound[b] = 0.0;
      write(a.numerator, b, 0.0, a.integral);
      a.size[b] = 1, a.sweeps[b] = 0, a.status[b] = status;
    }
    return;
  }

  double even_peak = p.inverse[0];
  if (p.whole) {
    for (int c = lane; c < p.copies; c += 32) p.x[c] = 0.0;
    __syncwarp();
  } else {
    split_evenly(p, lane);
  }
  double first_peak = add_copies(p, lane);
  if (!p.whole) even_peak = first_peak;
  if (a.start) {
    for (int c = lane; c < p.copies; c += 32) p.x[c] = 0.0;
    __syncwarp();
    const double *start = a.start + static_cast<i64>(b) * n.slots;
    for (int s = lane; s < n.slots; s += 32)
      if (p.source[s] < even_copies) p.x[p.source[s]] = start[s];
    __syncwarp();
    if (lane == 0)
      for (int i = 0; i < p.twins; ++i) {
        int s = p.twin[3 * i], from = p.source[s] & ~TWIN;
        if (from < even_copies) p.x[from] += start[s];
      }
    __syncwarp();
    rescale(p, lane);
    add_copies(p, lane);
  }
  for (int sweep = 0; sweep < NUM_SWEEPS; ++sweep) water_fill(p, lane);
  Bound bound = {total, p.ranks};
  if (fullest * p.ranks > total) bound = {fullest, 1};
  double tiny_part = static_cast<double>(p.ranks) / (2 * n.slots);
  int rounds = close_gap<FAR>(p, bound, a.tol, tiny_part, a.limit - NUM_SWEEPS, lane);
  if (rounds && !p.whole) water_fill(p, lane);
  double peak = add_copies(p, lane);
  if (peak > even_peak) {
    split_evenly(p, lane);
    peak = even_peak;
  }
  if (lane == 0) {
    a.peak[b] = peak;
    a.bound[b] = least(bound.numerator / bound.size, peak);
    write(a.numerator, b, bound.numerator, a.integral);
    a.size[b] = bound.size, a.sweeps[b] = NUM_SWEEPS + rounds, a.status[b] = OK;
  }
  if (!a.split) return;
  i64 out = static_cast<i64>(b) * n.slots;
  for (int s = lane; s < n.slots; s += 32)
    if (!(p.source[s] & TWIN)) write(a.split, out + s, p.values[p.source[s]], p.whole);
  for (int i = lane; i < p.twins; i += 32) {
    int s = p.twin[3 * i], place = p.twin[3 * i + 1], mates = p.twin[3 * i + 2];
    double part = p.values[p.source[s] & ~TWIN];
    part = p.whole ? floor((part + (mates - 1 - place)) / mates) : part / mates;
    write(a.split, out + s, part, p.whole);
  }
}

extern __shared__ uint4 shared_memory[];

extern "C" __global__ void __launch_bounds__(32, 16) split_near(const __grid_constant__ Arguments a) {
  solve<false>(a, reinterpret_cast<char *>(shared_memory), blockIdx.x, threadIdx.x);
}

extern "C" __global__ void __launch_bounds__(32, 16) split_far(const __grid_constant__ Arguments a) {
  solve<true>(a, reinterpret_cast<char *>(shared_memory), blockIdx.x, threadIdx.x);
}

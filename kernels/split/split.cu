// The certified split (cpu.py says how) with one warp a problem, equal to the CPU form bit for bit: the same steps, in
// integers in any order, in float64 in the same one and with no contraction to fused multiply-adds.
//
// Up to 32 ranks, lane r keeps rank r's load, and sets of ranks are bits of a word. Beyond, experts that share no rank are
// poured together, and one lane walks the queues of the CPU form in shared memory.
//
// tests/kernels/split/warp.h compiles this file for the host, a fiber a lane.

#include "state.cuh"

#include "pour.cuh"

#include "coarse.cuh"
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
        level_out_near(p, load, lane);
      else if (lane == 0)
        level_out_far(p, mark + 1);
      __syncwarp();
    }
  }
  if (!FAR && lane < p.ranks) p.load[lane] = load;
  __syncwarp();
  return rounds;
}

// What all problems need of a problem's table and its experts' loads, to shared memory; whether a load is negative. The
// first loads are asked for before the table, whose address waits for the layer.
__device__ bool stage(const Arguments &a, int b, const char *table, char *staged, double *expert_load, int lane) {
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
  const uint4 *from = reinterpret_cast<const uint4 *>(table);
#pragma unroll 8
  for (int i = lane; i < a.n.staged / 16; i += 32) reinterpret_cast<uint4 *>(staged)[i] = from[i];
#pragma unroll
  for (int j = 0; j < AHEAD; ++j)
    if (lane + 32 * j < experts) put(lane + 32 * j, ahead[j]);
#pragma unroll 4
  for (int e = lane + 32 * AHEAD; e < experts; e += 32) put(e, loads[e]);
  if (lane == 0) expert_load[experts] = 0.0;
  return __ballot_sync(ALL, bad) != 0;
}

__device__ void write(void *out, i64 i, double value, bool integer) {
  if (integer)
    static_cast<i64 *>(out)[i] = static_cast<i64>(value);
  else
    static_cast<double *>(out)[i] = value;
}

// The copies' parts of another batch's split, to x.
__device__ void place_start(Problem &p, const double *start, int slots, int even_copies, int lane) {
  for (int c = lane; c < p.copies; c += 32) p.x[c] = 0.0;
  __syncwarp();
  for (int s = lane; s < slots; s += 32)
    if (p.source[s] < even_copies) p.x[p.source[s]] = start[s];
  __syncwarp();
  if (lane == 0)
    for (int i = 0; i < p.twins; ++i) {
      int s = p.twin[3 * i], from = p.source[s] & ~TWIN;
      if (from < even_copies) p.x[from] += start[s];
    }
  __syncwarp();
}

__device__ double add_experts(const Problem &p) {
  double total = 0.0;
#pragma unroll 8
  for (int r = 0; r < p.ranks; ++r) total += p.fixed[r];
#pragma unroll 8
  for (int k = 0; k < p.replicated; ++k) total += p.demand[k];
  return total;
}

struct Found {
  double peak;
  Bound bound;
  int sweeps;
  bool look_at_even;  // whether the even split's peak may be less
};

// As cpu.near_split: lane r is rank r, of whose fixed experts `fixed` is the load.
__device__ Found near_split(Problem &p, const Arguments &a, double fixed, double total, const double *start, int lane) {
  int exponent = 0;
  if (total > 0.0) {
    exponent = min(max(1052 - static_cast<int>(__double_as_longlong(total) >> 52), -1000), 1000);
    if (p.whole) exponent = min(exponent, 0);
  }
  double unit = __longlong_as_double(static_cast<i64>(1023 + exponent) << 52);
  double inverse = __longlong_as_double(static_cast<i64>(1023 - exponent) << 52);
  bool exact = a.integral && exponent >= 0;  // all in units is as it is in loads
  for (int k = lane; k < p.replicated; k += 32)
    p.experts[k] = {p.mask[k], static_cast<u32>(static_cast<int>(p.demand[k] * unit))};
  __syncwarp();

  bool mine = lane < p.ranks;
  u32 before_me = (1u << lane) - 1;
  int fixed_units = static_cast<int>(fixed * unit), load = fixed_units;
#pragma unroll 2
  for (int w = 0; w < p.waves; ++w) {
    int at = w * p.ranks + lane;
    Cell cell = {0, 0, 0, 0};
    if (mine) {
      u32 mask = p.wave_mask[at];
      if (mask) {
        int copy = p.wave_copy[at] & 0xffff, need = p.experts[p.wave_copy[at] >> 16].y;
        int below = mask & before_me ? static_cast<int>(need * p.until[copy - 1]) : 0;
        cell = {mask, need, static_cast<int>(need * p.until[copy]) - below, 0};
      }
      p.cells[at] = cell;
    }
    load += cell.part;
  }
  __syncwarp();
  int even_top = __reduce_max_sync(ALL, static_cast<u32>(load));
  if (start) {
    place_start(p, start, a.n.slots, (a.n.copies + 1) / 2 * 2, lane);
    warm_start(p, lane);
    load = fixed_units;
    for (int w = 0; w < p.waves; ++w)
      if (mine) load += p.cells[w * p.ranks + lane].part;
  }
  Searched found = search(p, load, fixed_units, a.tol, min(a.limit, p.whole ? MOST_WHOLE : MOST_SWEEPS), lane);

  double sum = fixed;
#pragma unroll 2
  for (int w = 0; w < p.waves; ++w) {
    int at = w * p.ranks + lane;
    if (!mine || !p.wave_mask[at]) continue;
    u32 copy = p.wave_copy[at];
    double part = p.cells[at].part * inverse;
    if (!(p.wave_mask[at] & before_me)) part += p.demand[copy >> 16] - p.experts[copy >> 16].y * inverse;
    p.x[copy & 0xffff] = part;
    sum += part;
  }
  if (mine) p.load[lane] = sum;
  __syncwarp();
  u32 inside = found.captive.inside;
  double captive = exact ? found.captive.load * inverse : captive_load(p, inside, lane);
  return {exact ? found.top * inverse : warp_most(sum), {captive, __popc(inside)}, found.sweeps,
          even_top <= found.top + a.n.slots};
}

// As cpu.far_split.
__device__ Found far_split(Problem &p, const Arguments &a, double total, const double *start, int lane) {
  if (start) {
    place_start(p, start, a.n.slots, (a.n.copies + 1) / 2 * 2, lane);
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
  for (int r = lane; r < p.ranks; r += 32) fullest = most(fullest, p.fixed[r]);
  fullest = warp_most(fullest);
  Bound bound = {total, p.ranks};
  if (fullest * p.ranks > total) bound = {fullest, 1};
  return {add_copies(p, lane), bound, NUM_SWEEPS, true};
}

template <bool FAR>
__device__ void solve(const Arguments &a, char *shared, int b, int lane) {
  const Sizes &n = a.n;
  Problem p;
  char *at = shared + n.staged;
  int even_copies = (n.copies + 1) / 2 * 2;
  p.values = p.x = take<double>(at, even_copies + n.experts + 1);
  double *expert_load = p.x + even_copies;
  p.fixed = take<double>(at, n.ranks);
  p.load = take<double>(at, n.ranks);
  p.demand = take<double>(at, n.replicated);
  if (!FAR) {
    p.inverse = nullptr;
    p.experts = take<uint2>(at, n.replicated);
    p.loads = take<int>(at, 32);
    at = shared + (at - shared + 15) / 16 * 16;
    // After the search: the place of what the paths need.
    p.used = reinterpret_cast<u32 *>(at);
    p.reach = p.used + n.replicated;
    p.queue = reinterpret_cast<u16 *>(p.loads);
    p.cells = take<Cell>(at, n.waves * n.ranks);
  } else {
    p.inverse = take<double>(at, NUM_INVERSES);
    for (int i = lane; i < NUM_INVERSES; i += 32) p.inverse[i] = 1.0 / i;
    p.queue = take<u16>(at, n.ranks);
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
  const char *table = a.tables + layer * a.table_bytes;
  bool bad = stage(a, b, table, shared, expert_load, lane);
  __syncwarp();
  place_table<FAR>(p, shared, table, n);

  double fixed = 0.0, total;
  for (int k = lane; k < p.replicated; k += 32) p.demand[k] = expert_load[p.expert[k]];
  if (!FAR) {
    if (lane < p.ranks) {
#pragma unroll 4
      for (int i = lane; i < n.rows * p.ranks; i += p.ranks) fixed += expert_load[p.fixed_row[i]];
      p.fixed[lane] = fixed;
    }
  } else {
    for (int r = lane; r < p.ranks; r += 32) {
      double here = 0.0;
      int end = p.fixed_start[r + 1];
#pragma unroll 4
      for (int i = p.fixed_start[r]; i < end; ++i) here += expert_load[p.fixed_expert[i]];
      p.fixed[r] = here;
    }
  }
  __syncwarp();
  if (!FAR && a.integral) {  // in any order
    total = fixed;
    for (int k = lane; k < p.replicated; k += 32) total += p.demand[k];
#pragma unroll
    for (int step = 16; step; step /= 2) total += __shfl_sync(ALL, total, lane ^ step);
  } else {
    total = add_experts(p);
  }
  if (status == OK) status = bad || total != total ? BAD_LOAD : total >= a.too_large ? TOO_LARGE : OK;
  if (status != OK) {
    if (a.split)
      for (int s = lane; s < n.slots; s += 32) write(a.split, static_cast<i64>(b) * n.slots + s, 0.0, p.whole);
    if (lane == 0) {
      a.peak[b] = __longlong_as_double(0x7ff0000000000000ll);  // counts as not proven
      a.bound[b] = 0.0;
      write(a.numerator, b, 0.0, a.integral);
      a.size[b] = 1, a.sweeps[b] = 0, a.status[b] = status;
    }
    return;
  }

  const double *start = a.start ? a.start + static_cast<i64>(b) * n.slots : nullptr;
  Found found = FAR ? far_split(p, a, total, start, lane) : near_split(p, a, fixed, total, start, lane);
  Bound bound = found.bound;
  double peak = found.peak, mean = bound.numerator / bound.size;
  int rounds = 0;
  if (p.whole ? (peak - 1.0) * bound.size >= bound.numerator : peak > mean * (1 + a.tol)) {
    double tiny_part = static_cast<double>(p.ranks) / (2 * n.slots);
    rounds = close_gap<FAR>(p, bound, a.tol, tiny_part, a.limit - found.sweeps, lane);
    mean = bound.numerator / bound.size;
    if (rounds) {
      if (FAR && !p.whole) water_fill(p, lane);
      peak = add_copies(p, lane);
    }
  }
  if (!p.whole && (found.look_at_even || rounds)) {
    double even_peak = add_even(p, lane);
    if (peak > even_peak) {
      split_evenly(p, lane);
      peak = even_peak;
    }
  }
  if (lane == 0) {
    a.peak[b] = peak;
    a.bound[b] = least(mean, peak);
    write(a.numerator, b, bound.numerator, a.integral);
    a.size[b] = bound.size, a.sweeps[b] = found.sweeps + rounds, a.status[b] = OK;
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

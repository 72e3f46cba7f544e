// The certified split (cpu.py says how) with one warp a problem, equal to the CPU form bit for bit: the same steps in
// the same order, float64, no contraction to fused multiply-adds. What may run side by side does: experts that share
// no rank are poured together, a search expands all ranks of an expert at once.
//
// Up to 32 ranks, lane r keeps rank r's load and place in the search tree, and sets of ranks are bits of a word. Beyond,
// one lane walks the queues of the CPU form in shared memory.
//
// tests/kernels/split/warp.h compiles this file for the host, a fiber a lane.

typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

#define ALL 0xffffffffu
#define TWIN 0x8000u  // marks a slot whose expert has more on its rank

enum { OK, BAD_LOAD, TOO_LARGE, BAD_LAYER };
enum { INT64, FLOAT64, INT32, FLOAT32 };

const int NUM_SWEEPS = 3, NUM_LEVELLED = 3, NUM_INVERSES = 33;

// The most that any layer has; sections of a layer's table are as long.
struct Sizes {
  int ranks, experts, slots, fixed, replicated, copies, waves, twins;
};

// One layer's table (cuda.py packs it: structure.Tables, and the waves), and a problem's state, in shared memory.
// x [copies], then the experts' loads: values. Experts of a wave, neighbours in order, share no rank; waves of pairs come first.
struct Problem {
  double *share, *values, *x, *fixed, *load, *demand, *inverse;
  u32 *mask, *used, *reach;
  u16 *fixed_start, *fixed_expert, *expert, *copy_start, *copy_rank, *copy_expert, *rank_start, *rank_copy, *source;
  u16 *wave_start, *twin, *queue, *root, *from, *to;
  int *seen;
  int ranks, replicated, copies, paired, waves, pair_waves, twins;
  bool whole;
};

struct Arguments {
  const char *tables;   // [layers, table_bytes]
  const void *loads;    // [problems, experts], of `kind`
  const i64 *layer;     // [problems]
  const double *start;  // [problems, slots], or null
  void *split;          // [problems, slots], or null; int64 where whole, else float64
  double *peak, *bound;
  void *numerator;  // int64 for integer loads, else float64
  i64 *size, *sweeps, *status;
  double tol, too_large;
  int problems, layers, table_bytes, kind, limit, whole;
  Sizes n;
};

struct Bound {
  double numerator;
  int size;
};

template <class T>
__device__ T *take(char *&at, int count) {
  T *here = reinterpret_cast<T *>(at);
  at += (count * sizeof(T) + 7) / 8 * 8;
  return here;
}

__device__ char *place_table(Problem &p, char *at, const Sizes &n) {
  u16 *counts = take<u16>(at, 8);
  p.replicated = counts[0], p.copies = counts[1], p.paired = counts[2];
  p.waves = counts[3], p.pair_waves = counts[4], p.twins = counts[5];
  p.share = take<double>(at, n.copies);
  p.mask = take<u32>(at, n.replicated);
  p.fixed_start = take<u16>(at, n.ranks + 1);
  p.fixed_expert = take<u16>(at, n.fixed);
  p.expert = take<u16>(at, n.replicated);
  p.copy_start = take<u16>(at, n.replicated + 1);
  p.copy_rank = take<u16>(at, n.copies);
  p.copy_expert = take<u16>(at, n.copies);
  p.rank_start = take<u16>(at, n.ranks + 1);
  p.rank_copy = take<u16>(at, n.copies);
  p.source = take<u16>(at, n.slots);
  p.wave_start = take<u16>(at, n.waves + 1);
  p.twin = take<u16>(at, 3 * n.twins);
  return at;
}

__device__ double least(double a, double b) { return b < a ? b : a; }
__device__ double most(double a, double b) { return b > a ? b : a; }

// The largest of the lanes' values, which are not negative: their bits are ordered as they are.
__device__ double warp_most(double value) {
  i64 bits = __double_as_longlong(value);
  u32 high = static_cast<u32>(bits >> 32), top = __reduce_max_sync(ALL, high);
  u32 low = __reduce_max_sync(ALL, high == top ? static_cast<u32>(bits) : 0u);
  return __longlong_as_double(static_cast<i64>(top) << 32 | low);
}

// a / n, correctly rounded: Markstein's step from a rounded inverse, at a fraction of a division's time.
__device__ double divide(const Problem &p, double a, int n) {
  if (n >= NUM_INVERSES) return a / n;
  double inverse = p.inverse[n], q = a * inverse;
  return __fma_rn(__fma_rn(-q, static_cast<double>(n), a), inverse, q);
}

__device__ void pour_pairs(Problem &p, int lane) {
  struct Pair {
    int k;
    u32 ranks;
    double need, first, second;
  } now, next;
  auto fetch = [&](Pair &pair, int at, int end) {
    pair.k = -1;
    if (at >= end) return;
    pair.k = at;
    pair.ranks = reinterpret_cast<u32 *>(p.copy_rank)[pair.k];
    pair.need = p.demand[pair.k];
    pair.first = p.x[2 * pair.k], pair.second = p.x[2 * pair.k + 1];
  };
  int end = p.wave_start[0];
  if (p.pair_waves) {
    fetch(now, end + lane, p.wave_start[1]);
    end = p.wave_start[1];
  }
  for (int wave = 0; wave < p.pair_waves; ++wave) {
    int next_end = wave + 1 < p.pair_waves ? p.wave_start[wave + 2] : end;
    fetch(next, end + lane, next_end);
    if (now.k >= 0) {
      int u = now.ranks & 0xffff, v = now.ranks >> 16;
      double a = p.load[u] - now.first, b = p.load[v] - now.second;
      double part = (b - a + now.need) * 0.5;
      if (p.whole) part = floor(part);
      part = least(most(part, 0.0), now.need);
      double other = now.need - part;
      p.load[u] = a + part, p.load[v] = b + other;
      p.x[2 * now.k] = part, p.x[2 * now.k + 1] = other;
    }
    __syncwarp();
    now = next, end = next_end;
  }
}

// An expert of up to MOST copies, in registers.
template <int MOST>
__device__ void pour(Problem &p, int first, int count, double need) {
  double rest_of[MOST];
  int rank[MOST];
  double total = need, low = 0;
  int lowest = 0;
#pragma unroll
  for (int j = 0; j < MOST; ++j) {
    if (j >= count) continue;
    rank[j] = p.copy_rank[first + j];
    rest_of[j] = p.load[rank[j]] - p.x[first + j];
    total += rest_of[j];
    if (j == 0 || rest_of[j] < low) lowest = j, low = rest_of[j];
  }
  int wet = count;
  double level = divide(p, total, wet);
  while (true) {
    int under = 0;
    total = need;
#pragma unroll
    for (int j = 0; j < MOST; ++j)
      if (j < count && rest_of[j] < level) total += rest_of[j], ++under;
    if (under >= wet || under == 0) break;
    wet = under;
    level = divide(p, total, wet);
  }
  if (p.whole) level = floor(level);
  double rest = need;
  int lowest_rank = 0;
#pragma unroll
  for (int j = 0; j < MOST; ++j) {
    if (j >= count) continue;
    if (j == lowest) {
      lowest_rank = rank[j];
      continue;
    }
    double part = rest_of[j] < level ? least(level - rest_of[j], rest) : 0.0;
    p.x[first + j] = part;
    p.load[rank[j]] = rest_of[j] + part;
    rest -= part;
  }
  p.x[first + lowest] = rest;
  p.load[lowest_rank] = low + rest;
}

__device__ void pour_many(Problem &p, int first, int last, double need) {
  double total = need;
  int lowest = first;
  for (int c = first; c < last; ++c) {
    double here = p.load[p.copy_rank[c]] - p.x[c];
    p.load[p.copy_rank[c]] = here;
    p.x[c] = 0.0;
    total += here;
    if (here < p.load[p.copy_rank[lowest]]) lowest = c;
  }
  int wet = last - first;
  double level = divide(p, total, wet);
  while (true) {
    int under = 0;
    total = need;
    for (int c = first; c < last; ++c) {
      double here = p.load[p.copy_rank[c]];
      if (here < level) total += here, ++under;
    }
    if (under >= wet || under == 0) break;
    wet = under;
    level = divide(p, total, wet);
  }
  if (p.whole) level = floor(level);
  double rest = need;
  for (int c = first; c < last; ++c) {
    double here = p.load[p.copy_rank[c]];
    if (c == lowest || !(here < level)) continue;
    double part = least(level - here, rest);
    p.x[c] = part;
    p.load[p.copy_rank[c]] = here + part;
    rest -= part;
  }
  p.x[lowest] = rest;
  p.load[p.copy_rank[lowest]] += rest;
}

__device__ void water_fill(Problem &p, int lane) {
  pour_pairs(p, lane);
  for (int wave = p.pair_waves; wave < p.waves; ++wave) {
    int k = p.wave_start[wave] + lane;
    if (k < p.wave_start[wave + 1]) {
      int first = p.copy_start[k], last = p.copy_start[k + 1];
      if (last - first <= 4)
        pour<4>(p, first, last - first, p.demand[k]);
      else if (last - first <= 8)
        pour<8>(p, first, last - first, p.demand[k]);
      else
        pour_many(p, first, last, p.demand[k]);
    }
    __syncwarp();
  }
}

__device__ void rescale(Problem &p, int lane) {
  for (int k = lane; k < p.replicated; k += 32) {
    int first = p.copy_start[k], last = p.copy_start[k + 1], largest = first;
    double need = p.demand[k], total = 0.0;
    for (int c = first; c < last; ++c) {
      p.x[c] = most(p.x[c], 0.0);
      total += p.x[c];
      if (p.x[c] > p.x[largest]) largest = c;
    }
    if (!(0.0 < total && total <= 1.7976931348623157e308)) {
      for (int c = first; c < last; ++c) p.x[c] = 1.0;
      total = last - first;
      largest = first;
    }
    double scale = total == need ? 1.0 : need / total, rest = need;
    for (int c = first; c < last; ++c) {
      if (c == largest) continue;
      p.x[c] = least(p.x[c] * scale, rest);
      rest -= p.x[c];
    }
    p.x[largest] = rest;
  }
  __syncwarp();
}

// load = fixed + x; the largest load.
__device__ double add_copies(Problem &p, int lane) {
  double top = 0.0;
  for (int r = lane; r < p.ranks; r += 32) {
    double here = p.fixed[r];
    int end = p.rank_start[r + 1];
#pragma unroll 4
    for (int i = p.rank_start[r]; i < end; ++i) here += p.x[p.rank_copy[i]];
    p.load[r] = here;
    top = most(top, here);
  }
  __syncwarp();
  return warp_most(top);
}

__device__ void split_evenly(Problem &p, int lane) {
  for (int c = lane; c < p.copies; c += 32) p.x[c] = p.demand[p.copy_expert[c]] * p.share[c];
  __syncwarp();
}

// ---- up to 32 ranks: lane r is rank r ----

// A lane's place in a search tree: its place in the queue, and as in flow.Search.
struct Leaf {
  int place, root, parent, from, to;
};

// reach: for every copy, in rank_copy's order, the ranks (in `over`, by expert) of its expert where it has more than
// `tiny`. Returns what rank `lane` reaches in one step.
__device__ u32 find_neighbours(Problem &p, const u32 *over, double tiny, int lane) {
  for (int i = lane; i < p.copies; i += 32) {
    int c = p.rank_copy[i];
    p.reach[i] = p.x[c] > tiny ? over[p.copy_expert[c]] : 0;
  }
  __syncwarp();
  u32 near = 0;
  if (lane < p.ranks) {
    int end = p.rank_start[lane + 1];
#pragma unroll 4
    for (int i = p.rank_start[lane]; i < end; ++i) near |= p.reach[i];
  }
  return near;
}

// Rank u's turn in the queue: calls found(new ranks, root) once per expert that leads to new ones, in the CPU's order.
template <class Found>
__device__ void expand(const Problem &p, int u, u32 &seen, int &tail, Leaf &leaf, int lane, Found found) {
  u32 below = (1u << lane) - 1;
  int root = __shfl_sync(ALL, leaf.root, u);
  int end = p.rank_start[u + 1];
  for (int base = p.rank_start[u]; base < end; base += 32) {
    u32 reach = 0;
    int c = 0, k = 0;
    if (base + lane < end) {
      reach = p.reach[base + lane];
      c = p.rank_copy[base + lane];
      k = p.copy_expert[c];
    }
    u32 open = __ballot_sync(ALL, (reach & ~seen) != 0);
    while (open) {
      int owner = __ffs(open) - 1;
      open &= open - 1;
      u32 fresh = __shfl_sync(ALL, reach, owner) & ~seen;
      if (!fresh) continue;
      int from = __shfl_sync(ALL, c, owner), expert = __shfl_sync(ALL, k, owner);
      if (fresh >> lane & 1) {
        leaf.place = tail + __popc(fresh & below);
        leaf.root = root, leaf.parent = u, leaf.from = from;
        leaf.to = p.copy_start[expert] + __popc(p.mask[expert] & below);
      }
      seen |= fresh;
      tail += __popc(fresh);
      found(fresh, root);
    }
  }
}

// As flow.push; returns whether something was pushed. `seen` comes with the ranks above, leaves with those reached.
__device__ bool push(Problem &p, double &load, double cap, double slack, double tiny, u32 &seen, int lane) {
  Leaf leaf = {__popc(seen & ((1u << lane) - 1)), lane, lane, 0, 0};
  int tail = __popc(seen);
  bool pushed = false;
  u32 near = find_neighbours(p, p.mask, tiny, lane);
  while (true) {
    // In a queue's order the next rank is the first that reaches a new one: x changes only where all are reached.
    double source_load = __shfl_sync(ALL, load, leaf.root);
    bool open = (seen >> lane & 1) && (near & ~seen) && source_load > cap;
    u32 first = __reduce_min_sync(ALL, open ? static_cast<u32>(leaf.place << 5 | lane) : ALL);
    if (first == ALL) break;
    expand(p, first & 31, seen, tail, leaf, lane, [&](u32 fresh, int source) {
      u32 wanting = __ballot_sync(ALL, (fresh >> lane & 1) && cap - load > slack);
      while (wanting) {
        int v = __ffs(wanting) - 1;
        wanting &= wanting - 1;
        double amount = least(cap - __shfl_sync(ALL, load, v), __shfl_sync(ALL, load, source) - cap);
        if (amount <= 0.0) break;
        u32 path = 0;
        for (int w = v; w != source; w = __shfl_sync(ALL, leaf.parent, w)) {
          amount = least(amount, p.x[__shfl_sync(ALL, leaf.from, w)]);
          path |= 1u << w;
        }
        if (amount <= 0.0) continue;
        pushed = true;
        __syncwarp();
        if (path >> lane & 1) {
          p.x[leaf.from] -= amount;
          p.x[leaf.to] += amount;
        }
        if (lane == source) load -= amount;
        if (lane == v) load += amount;
        __syncwarp();
      }
    });
  }
  return pushed;
}

// As flow.level_out: all trees first, then their flows, leaf by leaf.
__device__ void level_out(Problem &p, double &load, int lane) {
  for (int k = lane; k < p.replicated; k += 32) p.used[k] = 0;
  __syncwarp();
  for (int c = lane; c < p.copies; c += 32)
    if (p.x[c] > 0.0) atomicOr(&p.used[p.copy_expert[c]], 1u << p.copy_rank[c]);
  __syncwarp();
  u32 near = find_neighbours(p, p.used, 0.0, lane);
  u32 everyone = ALL >> (32 - p.ranks), seen = 0;
  Leaf leaf = {0, lane, lane, -1, 0};
  int tail = 0, begin = 0, end = 0;
  while (seen != everyone) {
    int top = __ffs(~seen) - 1, first_place = tail;
    u32 before = seen;
    if (lane == top) leaf.place = tail;
    seen |= 1u << top;
    ++tail;
    while (true) {
      bool open = (seen >> lane & 1) && (near & ~seen);
      u32 first = __reduce_min_sync(ALL, open ? static_cast<u32>(leaf.place << 5 | lane) : ALL);
      if (first == ALL) break;
      expand(p, first & 31, seen, tail, leaf, lane, [](u32, int) {});
    }
    if ((seen & ~before) >> lane & 1) begin = first_place, end = tail;
  }
  // From here on lane i has the i-th rank of the queue.
  bool mine = lane < p.ranks;
  if (mine) {
    p.queue[leaf.place] = lane;
    p.load[leaf.place] = load;
  }
  __syncwarp();
  double mean = 0.0;
#pragma unroll 4
  for (int i = begin; i < end; ++i) mean += p.load[i];
  if (mine) mean = divide(p, mean, end - begin);
  int rank = mine ? p.queue[lane] : lane;
  double here = mine ? p.load[lane] : 0.0;
  mean = __shfl_sync(ALL, mean, rank);
  int from = __shfl_sync(ALL, leaf.from, rank), to = __shfl_sync(ALL, leaf.to, rank);
  int parent = __shfl_sync(ALL, leaf.place, __shfl_sync(ALL, leaf.parent, rank));
  bool moves = mine && from >= 0;
  double from_part = moves ? p.x[from] : 0.0, to_part = moves ? p.x[to] : 0.0;
#pragma unroll 4
  for (int i = tail - 1; i > 0; --i) {
    double amount = moves ? most(least(here - mean, to_part), -from_part) : 0.0;
    amount = __shfl_sync(ALL, amount, i);
    int above = __shfl_sync(ALL, parent, i), giver = __shfl_sync(ALL, from, i);
    if (lane == i) here -= amount, to_part -= amount;
    if (lane == above) here += amount;
    if (from == giver) from_part += amount;
  }
  __syncwarp();
  // Lanes that share `from` have the same value for it: the first of them writes it.
  u32 mates = __match_any_sync(ALL, from);
  if (moves) {
    if (__ffs(mates) - 1 == lane) p.x[from] = from_part;
    p.x[to] = to_part;
  }
  load = __shfl_sync(ALL, here, leaf.place);
  if (!mine) load = 0.0;
  __syncwarp();
}

__device__ double captive_load(const Problem &p, u32 inside, int lane) {
  double captive = 0.0;
  for (u32 left = inside; left; left &= left - 1) captive += p.fixed[__ffs(left) - 1];
  for (int base = 0; base < p.replicated; base += 32) {
    int k = base + lane;
    u32 kept = __ballot_sync(ALL, k < p.replicated && !(p.mask[k] & ~inside));
    for (; kept; kept &= kept - 1) captive += p.demand[base + __ffs(kept) - 1];
  }
  return captive;
}

// ---- more ranks: flow.py's queues, walked by one lane ----

__device__ int push_far(Problem &p, double cap, double slack, double tiny, int mark) {
  int head = 0, tail = 0;
  for (int r = 0; r < p.ranks; ++r) {
    if (!(p.load[r] > cap + slack)) continue;
    p.seen[r] = mark;
    p.root[r] = r;
    p.queue[tail++] = r;
  }
  bool pushed = false;
  while (head < tail) {
    int u = p.queue[head++], source = p.root[u];
    if (p.load[source] <= cap) continue;
    for (int i = p.rank_start[u]; i < p.rank_start[u + 1]; ++i) {
      int c = p.rank_copy[i];
      if (p.x[c] <= tiny) continue;
      int k = p.copy_expert[c];
      for (int d = p.copy_start[k]; d < p.copy_start[k + 1]; ++d) {
        int v = p.copy_rank[d];
        if (p.seen[v] == mark) continue;
        p.seen[v] = mark;
        p.root[v] = source, p.from[v] = c, p.to[v] = d;
        p.queue[tail++] = v;
        double amount = least(cap - p.load[v], p.load[source] - cap);
        if (amount <= 0.0 || cap - p.load[v] <= slack) continue;
        for (int w = v; w != source; w = p.copy_rank[p.from[w]]) amount = least(amount, p.x[p.from[w]]);
        if (amount <= 0.0) continue;
        pushed = true;
        for (int w = v; w != source; w = p.copy_rank[p.from[w]]) {
          p.x[p.from[w]] -= amount;
          p.x[p.to[w]] += amount;
        }
        p.load[source] -= amount;
        p.load[v] += amount;
      }
    }
  }
  return pushed ? -1 : tail;
}

__device__ void level_out_far(Problem &p, int mark) {
  int tail = 0;
  for (int r = 0; r < p.ranks; ++r) {
    if (p.seen[r] == mark) continue;
    int head = tail, begin = tail;
    p.seen[r] = mark;
    p.queue[tail++] = r;
    double total = 0.0;
    while (head < tail) {
      int u = p.queue[head++];
      total += p.load[u];
      for (int i = p.rank_start[u]; i < p.rank_start[u + 1]; ++i) {
        int c = p.rank_copy[i];
        if (p.x[c] <= 0.0) continue;
        int k = p.copy_expert[c];
        for (int d = p.copy_start[k]; d < p.copy_start[k + 1]; ++d) {
          int v = p.copy_rank[d];
          if (p.seen[v] == mark || !(p.x[d] > 0.0)) continue;
          p.seen[v] = mark;
          p.from[v] = c, p.to[v] = d;
          p.queue[tail++] = v;
        }
      }
    }
    double mean = divide(p, total, tail - begin);
    for (int i = tail - 1; i > begin; --i) {
      int v = p.queue[i], c = p.from[v], d = p.to[v];
      double amount = most(least(p.load[v] - mean, p.x[d]), -p.x[c]);
      p.x[d] -= amount;
      p.x[c] += amount;
      p.load[v] -= amount;
      p.load[p.copy_rank[c]] += amount;
    }
  }
}

__device__ double captive_load_far(const Problem &p, int mark) {
  double captive = 0.0;
  for (int r = 0; r < p.ranks; ++r)
    if (p.seen[r] == mark) captive += p.fixed[r];
  for (int k = 0; k < p.replicated; ++k) {
    bool inside = true;
    for (int c = p.copy_start[k]; c < p.copy_start[k + 1]; ++c) inside = inside && p.seen[p.copy_rank[c]] == mark;
    if (inside) captive += p.demand[k];
  }
  return captive;
}

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

// Copies a problem's table and its experts' loads to shared memory; whether a load is negative. The loads are asked for
// first: the table's address waits for the layer.
template <class T>
__device__ bool stage(const Arguments &a, const T *loads, i64 layer, char *table, double *expert_load, int lane) {
  const int AHEAD = 8;
  T ahead[AHEAD];
  int experts = a.n.experts;
#pragma unroll
  for (int j = 0; j < AHEAD; ++j)
    if (lane + 32 * j < experts) ahead[j] = loads[lane + 32 * j];
  const uint4 *from = reinterpret_cast<const uint4 *>(a.tables + layer * a.table_bytes);
  uint4 *to = reinterpret_cast<uint4 *>(table);
#pragma unroll 8
  for (int i = lane; i < a.table_bytes / 16; i += 32) to[i] = from[i];
  bool bad = false;
#pragma unroll
  for (int j = 0; j < AHEAD; ++j) {
    if (lane + 32 * j >= experts) continue;
    bad = bad || ahead[j] < 0;
    expert_load[lane + 32 * j] = static_cast<double>(ahead[j]);
  }
#pragma unroll 4
  for (int e = lane + 32 * AHEAD; e < experts; e += 32) {
    bad = bad || loads[e] < 0;
    expert_load[e] = static_cast<double>(loads[e]);
  }
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
  bool integral = a.kind == INT64 || a.kind == INT32;
  p.whole = a.whole;
  p.ranks = n.ranks;

  i64 layer = a.layer[b], first_load = static_cast<i64>(b) * n.experts;
  int status = OK;
  if (layer < 0 || layer >= a.layers) status = BAD_LAYER, layer = 0;
  bool bad;
  if (a.kind == INT64)
    bad = stage(a, static_cast<const i64 *>(a.loads) + first_load, layer, shared, expert_load, lane);
  else if (a.kind == FLOAT64)
    bad = stage(a, static_cast<const double *>(a.loads) + first_load, layer, shared, expert_load, lane);
  else if (a.kind == INT32)
    bad = stage(a, static_cast<const int *>(a.loads) + first_load, layer, shared, expert_load, lane);
  else
    bad = stage(a, static_cast<const float *>(a.loads) + first_load, layer, shared, expert_load, lane);
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
      write(a.numerator, b, 0.0, integral);
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
    write(a.numerator, b, bound.numerator, integral);
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

// The search of coarse.py. Lane r holds rank r, and a set of ranks is a 32-bit mask. A wave has at most one copy on each
// rank, so all its experts are processed at the same time.

// A rank's copy in a wave. mask: the ranks of its expert, 0 if the rank has no copy in the wave. need, part: the loads of
// the expert and of the copy, in units. others: one byte for each of the expert's first three other ranks: the rank, with
// 0x40 set if it is lower than this one, or with ABSENT set if there is none. The highest byte is the rank itself.
struct __align__(16) Cell {
  u32 mask;
  int need, part;
  u32 others;
};

const int HUGE_UNITS = 1 << 30;  // more than any load
const u32 ABSENT = 0x80;

__device__ int lowest_bit(u32 bits) { return __ffs(bits) - 1; }

// a / n rounded down, for 0 <= a <= 2^30 + 32. inverse: (2^32 - 1) / n, rounded down.
__device__ int over(int a, int n, u32 inverse) {
  int q = __umulhi(a, inverse);
  return a - q * n >= n ? q + 1 : q;
}

__device__ int over(const Problem &p, int a, int n) { return over(a, n, p.inverse_units[n]); }

// Water-filling in a wave of experts with three to OTHERS + 1 copies. Returns the new load of the lane's copy. base_load:
// the load of the lane's rank without this copy.
template <int OTHERS>
__device__ int pour_few(const Cell &cell, int base_load) {
  u32 volume = 0;  // the load that would raise all lower ranks to the level of this rank
  bool lowest = true;
  int other_load[OTHERS];
#pragma unroll
  for (int i = 0; i < OTHERS; ++i) {
    u32 other = cell.others >> 8 * i;
    other_load[i] = __shfl_sync(ALL, base_load, other);
    if (other & ABSENT) other_load[i] = HUGE_UNITS;
    volume += max(base_load - other_load[i], 0);
    lowest = lowest && other_load[i] >= base_load + static_cast<int>(other >> 6 & 1);
  }
  bool wet = volume < static_cast<u32>(cell.need);
  u32 all_wet = __ballot_sync(ALL, wet);
  int num = wet, total = cell.need + (wet ? base_load : 0);
#pragma unroll
  for (int i = 0; i < OTHERS; ++i) {
    u32 other = cell.others >> 8 * i;
    bool too = all_wet >> (other & 31) & 1 && !(other & ABSENT);
    num += too;
    total += too ? other_load[i] : 0;
  }
  u32 inverse = num & 1 ? (num == 1 ? ALL : ALL / 3) : (num == 2 ? ALL / 2 : ALL / 4);
  int level = over(total, num, inverse);
  return wet ? level - base_load + (lowest ? total - level * num : 0) : 0;
}

__device__ int pour_wave(const Problem &p, const Cell &cell, int base_load, int members, int lane) {
  u32 volume = 0, left = cell.mask;
  bool lowest = cell.mask != 0;
#pragma unroll 4
  for (int i = 0; i < members; ++i, left &= left - 1) {
    int j = lowest_bit(left), other_load = __shfl_sync(ALL, base_load, j);
    if (!left) other_load = HUGE_UNITS;
    volume = min(volume + max(base_load - other_load, 0), static_cast<u32>(HUGE_UNITS));
    lowest = lowest && (other_load > base_load || (other_load == base_load && j >= lane));
  }
  bool wet = cell.mask && volume < static_cast<u32>(cell.need);
  left = __ballot_sync(ALL, wet) & cell.mask;
  int num = __popc(left), total = cell.need;
#pragma unroll 4
  for (int i = 0; i < members; ++i, left &= left - 1) {
    int other_load = __shfl_sync(ALL, base_load, lowest_bit(left));
    if (left) total += other_load;
  }
  int level = num ? over(p, total, num) : 0;
  return (wet ? level - base_load : 0) + (lowest ? total - level * num : 0);
}

__device__ void sweep(Problem &p, int &load, int lane) {
  bool mine = lane < p.ranks;
  Cell *at = p.cells + (mine ? lane : 0), now = {0, 0, 0, static_cast<u32>(lane)}, next = now;
  if (mine) next = *at;
  // The cell of the next wave is read in advance. The array has one wave more than any layer, so that this stays in bounds.
#pragma unroll 2
  for (int w = 0; w < p.pair_waves; ++w) {
    now = next;
    if (mine) next = at[p.ranks];
    int base_load = load - now.part, other_load = __shfl_sync(ALL, base_load, now.others);
    // The first of two copies takes half of the load, rounded down; the second (0x40 is set) takes half, rounded up.
    int odd = now.need + static_cast<int>(now.others >> 6 & 1);
    int part = min(max((other_load - base_load + odd) >> 1, 0), now.need);
    load = base_load + part;
    if (mine) at->part = part;
    at += p.ranks;
  }
  int next_members = p.members[p.pair_waves];
#pragma unroll 1
  for (int w = p.pair_waves; w < p.waves; ++w) {
    int members = next_members, base_load = load - next.part, part;
    now = next;
    if (mine) next = at[p.ranks];
    next_members = p.members[w + 1];
    if (members <= 3)
      part = pour_few<2>(now, base_load);
    else
      part = members == 4 ? pour_few<3>(now, base_load) : pour_wave(p, now, base_load, members, lane);
    load = base_load + part;
    if (mine) at->part = part;
    at += p.ranks;
  }
}

// Each lane computes the bound of the set of ranks whose load is at least that of its rank; returns the best bound. With up
// to 16 ranks, lanes r and r + 16 compute half of the sum each.
__device__ Captive level_sets(const Problem &p, int load, int fixed, int lane) {
  bool halves = p.ranks <= 16;
  int step = halves ? 2 : 1, begin = halves ? lane >> 4 : 0, rank = halves ? lane & 15 : lane;
  u32 inside = 0;
  int captive = 0;
  if (halves) load = __shfl_sync(ALL, load, rank);
#pragma unroll 4
  for (int i = 0; i < p.ranks; i += step) {
    int j = i + begin, other_load = __shfl_sync(ALL, load, j), held = __shfl_sync(ALL, fixed, j);
    bool more = j < p.ranks && (other_load > load || (other_load == load && j <= rank));
    inside |= static_cast<u32>(more) << j;
    captive += more ? held : 0;
  }
  if (halves) inside |= __shfl_sync(ALL, inside, lane ^ 16);
#pragma unroll 4
  for (int k = begin; k < p.replicated; k += step) {
    uint2 expert = p.experts[k];
    captive += expert.x & ~inside ? 0 : static_cast<int>(expert.y);
  }
  if (halves) captive += __shfl_sync(ALL, captive, lane ^ 16);
  int size = __popc(inside);
  int bound = rank < p.ranks ? over(p, captive + (p.whole ? size - 1 : 0), size) : 0;
  int best = __reduce_max_sync(ALL, static_cast<u32>(bound));
  int owner = lowest_bit(__ballot_sync(ALL, bound == best && rank < p.ranks));
  return {__shfl_sync(ALL, inside, owner), __shfl_sync(ALL, captive, owner), best};
}

// A rank's node in a spanning tree of ranks that partly used copies connect. depth: 0 for the root. parent: the parent rank.
// edge: the wave of the expert that connects the rank to its parent. mean: the mean load of the tree. earlier: the lower
// ranks with the same parent and edge, as bits.
struct TreeNode {
  int depth, parent, edge, mean;
  u32 earlier;
};

__device__ TreeNode build_trees(Problem &p, int load, int lane) {
  bool mine = lane < p.ranks;
  int column = mine ? lane : 0;
  u32 near = 0, *used_here = p.partly_used + column;
  const Cell *here = p.cells + column;
#pragma unroll 4
  for (int w = 0; w < p.waves; ++w) {
    Cell cell = {0, 0, 0, 0};
    if (mine) cell = *here;
    bool part = mine && cell.part > 0;
    u32 used = __ballot_sync(ALL, part) & cell.mask;
    if (!part) used = 0;
    near |= used;
    if (mine) *used_here = used;
    here += p.ranks, used_here += p.ranks;
  }
  TreeNode node = {0, lane, 0, load, 0};
  u32 seen = __ballot_sync(ALL, !(near & ~(1u << lane)));  // not connected to another rank
  while (~seen) {
    // A tree is flat, and its paths are short, if its root is the rank with the most neighbours.
    u32 degree = seen >> lane & 1 ? 0 : __popc(near) << 5 | (31 - lane);
    u32 before = seen, now = 1u << (31 - (__reduce_max_sync(ALL, degree) & 31));
    for (int depth = 1; now; ++depth) {
      seen |= now;
      u32 over = near & now;
      bool fresh = over && !(seen >> lane & 1);
      if (fresh) node.parent = lowest_bit(over), node.depth = depth;
      now = __ballot_sync(ALL, fresh);
    }
    u32 tree = seen & ~before;
    bool among = tree >> lane & 1;
    int total = __reduce_add_sync(ALL, among ? load : 0), mean = over(p, total, __popc(tree));
    if (among) node.mean = mean;
  }
#pragma unroll 4
  for (int w = p.waves - 1; w >= 0; --w) {
    used_here -= p.ranks;
    if (mine && *used_here >> node.parent & 1) node.edge = w;
  }
  // Only an expert with more than two copies connects several ranks to one parent.
  if (__ballot_sync(ALL, node.depth && node.edge >= p.pair_waves))
    node.earlier = __match_any_sync(ALL, node.depth ? node.edge << 5 | node.parent : -1 - lane) & ((1u << lane) - 1);
  return node;
}

// coarse.level_out: the flows along the trees, computed level by level from the leaves to the roots.
__device__ void level_out(Problem &p, const TreeNode &node, int &load, int lane) {
  int deepest = __reduce_max_sync(ALL, static_cast<u32>(node.depth));
  int most_earlier = __reduce_max_sync(ALL, static_cast<u32>(__popc(node.earlier)));
  int *from = &p.cells[node.edge * p.ranks + node.parent].part, *to = from + 4 * (lane - node.parent);
  p.loads[lane] = load;
  __syncwarp();
  for (int depth = deepest; depth; --depth) {
    bool moves = node.depth == depth;
    int held = p.loads[lane], amount = moves ? held - node.mean : 0, drawn = 0, left = 0;
    if (moves) left = amount < 0 ? *from : *to;  // the pointers of other lanes may be invalid
    u32 ahead = node.earlier;
    for (int i = 0; i < most_earlier; ++i, ahead &= ahead - 1) {
      int other_amount = __shfl_sync(ALL, amount, lowest_bit(ahead));
      if (ahead && other_amount < 0) drawn = min(drawn - other_amount, HUGE_UNITS);
    }
    __syncwarp();
    amount = amount < 0 ? max(amount, min(drawn - left, 0)) : min(amount, left);
    if (amount) {
      *to -= amount;
      p.loads[lane] = held - amount;
      atomicAdd(from, amount);
      atomicAdd(p.loads + node.parent, amount);
    }
    __syncwarp();
  }
  load = p.loads[lane];
}

// The gap between peak and bound at which the search ends, as a fraction of the bound in units of 2^-32. It is slightly
// smaller than the tolerance, because rounding to units may lose load.
__device__ u32 spare_of(const Problem &p, double tol) {
  return p.whole ? 0 : static_cast<u32>(static_cast<i64>(tol * 0.96875 * 4294967296.0));
}

// What the other warps do during the search: the second warp computes bounds while the first builds trees or sweeps. The
// other warps only take part in the barriers.
template <int WARPS>
__device__ void compute_bounds(Problem &p, int fixed, int warp, int lane) {
  while (true) {
    sync_problem<WARPS>();
    if (*p.ended) return;
    if (warp == 1) {
      Captive candidate = level_sets(p, p.loads[lane], fixed, lane);
      if (lane == 0) *p.new_bound = candidate;
    }
    sync_problem<WARPS>();
  }
}

template <int WARPS>
__device__ Searched search(Problem &p, int &load, int fixed, double tol, int limit, int unlevelled, int lane) {
  int total = __reduce_add_sync(ALL, load), fullest = __reduce_max_sync(ALL, static_cast<u32>(fixed));
  Captive captive = {ALL >> (32 - p.ranks), total, over(p, total + (p.whole ? p.ranks - 1 : 0), p.ranks)};
  u32 full = __ballot_sync(ALL, fixed == fullest);
  if (fullest > captive.bound) captive = {full & -full, fullest, fullest};
  u32 spare = spare_of(p, tol);
  int cap = captive.bound + __umulhi(captive.bound, spare), top, sweeps = 0;
  auto above = [&]() {
    top = __reduce_max_sync(ALL, static_cast<u32>(load));
    return top > cap;
  };
  auto improve_bound = [&](const Captive &candidate) {
    if (candidate.bound > captive.bound) captive = candidate, cap = candidate.bound + __umulhi(candidate.bound, spare);
  };
  while (above()) {
    bool ends = sweeps >= limit;
    bool levels = sweeps >= unlevelled && (sweeps <= LEVELLED || sweeps % 2) && !ends;
    bool looks = sweeps || levels, aside = WARPS > 1 && looks && !ends;
    Captive candidate = {0, 0, -1};
    TreeNode node;
    if (aside) {
      p.loads[lane] = load;
      sync_problem<WARPS>();
    } else if (looks) {
      candidate = level_sets(p, load, fixed, lane);
    }
    if (levels) node = build_trees(p, load, lane);
    if (levels || ends) {
      if (aside) {
        sync_problem<WARPS>();
        candidate = *p.new_bound;
      }
      improve_bound(candidate);
      if (top <= cap || ends) break;
      level_out(p, node, load, lane);
      if (!above()) break;
    }
    sweep(p, load, lane);
    ++sweeps;
    if (aside && !levels) {
      sync_problem<WARPS>();
      candidate = *p.new_bound;
    }
    improve_bound(candidate);
  }
  if (WARPS > 1) {
    if (lane == 0) *p.ended = 1;
    sync_problem<WARPS>();
  }
  return {captive, sweeps, top};
}

// coarse.warm_start for one copy, from p.x.
__device__ int warm_part(const Problem &p, int k, int need, int copy) {
  int first = p.copy_start[k], last = p.copy_start[k + 1], largest = first;
  auto part_of = [&](int c) { return p.x[c] > 0.0 ? static_cast<float>(p.x[c]) : 0.0f; };
  float total = 0.0f, most_part = 0.0f;
#pragma unroll 1
  for (int c = first; c < last; ++c) {
    float part = part_of(c);
    total += part;
    if (part > most_part) largest = c, most_part = part;
  }
  bool evenly = !(total >= 1e-28f && total <= 1e38f);
  if (evenly) total = last - first, largest = first;
  float scale = need / total;
  auto units_of = [&](int c) { return static_cast<int>((evenly ? 1.0f : part_of(c)) * scale); };
  if (copy != largest) return units_of(copy);
  int remaining = need;
#pragma unroll 1
  for (int c = first; c < last; ++c)
    if (c != largest) remaining -= units_of(c);
  return remaining;
}

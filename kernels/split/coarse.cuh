// coarse.py's search: rank r is lane r, sets of ranks are bits of a word, and a wave holds at most one copy of any rank.

// A rank's copy in a wave: its expert's ranks (none: no copy), the expert's load and the copy's part in units.
struct __align__(16) Cell {
  u32 mask;
  int need, part;
  u32 used;
};

const int HUGE_UNITS = 1 << 30;  // more than any load

// a / n for 0 <= a <= 2^30 + 32, rounded down; inverse[n] = (2^32 - 1) / n.
__device__ int over(const Problem &p, int a, int n) {
  int q = __umulhi(a, p.inverse_units[n]);
  return a - q * n >= n ? q + 1 : q;
}

__device__ int lowest_bit(u32 bits) { return __ffs(bits) - 1; }

// A wave of experts of two copies or more: the part of the lane's own.
__device__ int pour_wave(const Problem &p, const Cell &cell, int rest, int members, int lane) {
  u32 volume = 0, left = cell.mask;  // volume: what it takes to fill up to this rank
  bool lowest = cell.mask != 0;
#pragma unroll 2
  for (int i = 0; i < members; ++i, left &= left - 1) {
    int j = lowest_bit(left), theirs = __shfl_sync(ALL, rest, j);
    if (!left) theirs = HUGE_UNITS;
    volume = min(volume + max(rest - theirs, 0), static_cast<u32>(HUGE_UNITS));
    lowest = lowest && (theirs > rest || (theirs == rest && j >= lane));
  }
  bool wet = cell.mask && volume < static_cast<u32>(cell.need);
  left = __ballot_sync(ALL, wet) & cell.mask;
  int num = __popc(left), total = cell.need;
#pragma unroll 2
  for (int i = 0; i < members; ++i, left &= left - 1) {
    int theirs = __shfl_sync(ALL, rest, lowest_bit(left));
    if (left) total += theirs;
  }
  int level = num ? over(p, total, num) : 0;
  return (wet ? level - rest : 0) + (lowest ? total - level * num : 0);
}

__device__ void sweep(Problem &p, int &load, int lane) {
  u32 me = 1u << lane;
  bool mine = lane < p.ranks;
  Cell *cells = p.cells + (mine ? lane : 0), next = {0, 0, 0, 0};
  if (mine && p.waves) next = cells[0];
  for (int w = 0; w < p.waves; ++w) {
    Cell now = next;
    if (mine && w + 1 < p.waves) next = cells[(w + 1) * p.ranks];
    int rest = load - now.part, part;
    if (w < p.pair_waves) {
      u32 other = now.mask & ~me;
      int theirs = __shfl_sync(ALL, rest, other ? lowest_bit(other) : lane);
      bool first = other > me;
      int ahead = first ? theirs - rest : rest - theirs;
      part = min(max((ahead + now.need) >> 1, 0), now.need);
      if (!first) part = now.need - part;
    } else {
      part = pour_wave(p, now, rest, p.members[w], lane);
    }
    load = rest + part;
    if (now.mask) cells[w * p.ranks].part = part;
  }
  __syncwarp();
}

// The load that cannot leave a set of ranks, in units; bound: over the set's size.
struct Captive {
  u32 inside;
  int load, bound;
};

// Every lane looks at the set of ranks with no less load than its own.
__device__ Captive level_sets(const Problem &p, int load, int fixed, int lane) {
  u32 inside = 0;
  int captive = 0;
#pragma unroll 4
  for (int j = 0; j < p.ranks; ++j) {
    int theirs = __shfl_sync(ALL, load, j), held = __shfl_sync(ALL, fixed, j);
    bool more = theirs > load || (theirs == load && j <= lane);
    inside |= static_cast<u32>(more) << j;
    captive += more ? held : 0;
  }
#pragma unroll 4
  for (int k = 0; k < p.replicated; ++k) {
    uint2 expert = p.experts[k];
    captive += expert.x & ~inside ? 0 : static_cast<int>(expert.y);
  }
  int size = __popc(inside);
  int bound = lane < p.ranks ? over(p, captive + (p.whole ? size - 1 : 0), size) : 0;
  int best = __reduce_max_sync(ALL, static_cast<u32>(bound));
  int owner = lowest_bit(__ballot_sync(ALL, bound == best && lane < p.ranks));
  return {__shfl_sync(ALL, inside, owner), __shfl_sync(ALL, captive, owner), best};
}

// All trees first, then their flows, by depth from the leaves up.
__device__ void level_out(Problem &p, int &load, int lane) {
  bool mine = lane < p.ranks;
  Cell *cells = p.cells + (mine ? lane : 0);
  u32 near = 0;
#pragma unroll 2
  for (int w = 0; w < p.waves; ++w) {
    u32 mask = 0;
    int part = 0;
    if (mine) mask = cells[w * p.ranks].mask, part = cells[w * p.ranks].part;
    u32 used = __ballot_sync(ALL, part > 0) & mask;
    if (part <= 0) used = 0;
    near |= used;
    if (mine) cells[w * p.ranks].used = used;
  }
  u32 seen = __ballot_sync(ALL, !(near & ~(1u << lane)));  // connected to none
  int parent = lane, depth = 0, deepest = 0, mean = load;
  while (~seen) {
    u32 before = seen, now = ~seen & (seen + 1);
    seen |= now;
    int level = 0;
    while (true) {
      ++level;
      bool fresh = !(seen >> lane & 1) && (near & now);
      if (fresh) parent = lowest_bit(near & now), depth = level;
      now = __ballot_sync(ALL, fresh);
      if (!now) break;
      seen |= now;
    }
    deepest = max(deepest, level - 1);
    u32 those = seen & ~before;
    bool among = those >> lane & 1;
    int total = __reduce_add_sync(ALL, among ? load : 0);
    if (among) mean = over(p, total, __popc(those));
  }
  int edge = 0;
#pragma unroll 2
  for (int w = p.waves - 1; w >= 0; --w)
    if (depth && cells[w * p.ranks].used >> parent & 1) edge = w;
  // Of the ranks that would draw on one copy, those before this one.
  u32 earlier = __match_any_sync(ALL, depth ? edge << 5 | parent : -1 - lane) & ((1u << lane) - 1);
  int most_earlier = __reduce_max_sync(ALL, static_cast<u32>(__popc(earlier)));
  int *to = &p.cells[edge * p.ranks + (mine ? lane : 0)].part, *from = &p.cells[edge * p.ranks + parent].part;
  if (!depth) from = to;
  p.loads[lane] = load;
  __syncwarp();
  for (int level = deepest; level; --level) {
    bool moves = depth == level;
    int here = p.loads[lane], amount = moves ? here - mean : 0, drawn = 0, left = 0;
    if (moves) left = amount < 0 ? *from : *to;
    u32 ahead = earlier;
    for (int i = 0; i < most_earlier; ++i, ahead &= ahead - 1) {
      int theirs = __shfl_sync(ALL, amount, lowest_bit(ahead));
      if (ahead && theirs < 0) drawn = min(drawn - theirs, HUGE_UNITS);
    }
    __syncwarp();
    amount = amount < 0 ? -min(-amount, max(left - drawn, 0)) : min(amount, left);
    if (amount) {
      *to -= amount;
      p.loads[lane] = here - amount;
      atomicAdd(from, amount);
      atomicAdd(p.loads + parent, amount);
    }
    __syncwarp();
  }
  load = p.loads[lane];
}

struct Searched {
  Captive captive;
  int sweeps, top;
};

__device__ Searched search(Problem &p, int &load, int fixed, double tol, int limit, int lane) {
  auto largest = [&]() { return static_cast<int>(__reduce_max_sync(ALL, static_cast<u32>(load))); };
  int total = __reduce_add_sync(ALL, load), fullest = __reduce_max_sync(ALL, static_cast<u32>(fixed));
  Captive captive = {ALL >> (32 - p.ranks), total, over(p, total + (p.whole ? p.ranks - 1 : 0), p.ranks)};
  u32 full = __ballot_sync(ALL, fixed == fullest);
  if (fullest > captive.bound) captive = {full & -full, fullest, fullest};
  u32 spare = p.whole ? 0 : static_cast<u32>(static_cast<i64>(tol * 0.96875 * 4294967296.0));
  int top = largest(), sweeps = 0;
  auto above = [&]() { return top > captive.bound + static_cast<int>(__umulhi(captive.bound, spare)); };
  while (above()) {
    if (sweeps) {
      Captive found = level_sets(p, load, fixed, lane);
      if (found.bound > captive.bound) captive = found;
      if (!above()) break;
    }
    if (sweeps >= limit) break;
    if (sweeps >= UNLEVELLED && (sweeps <= LEVELLED || sweeps % 2)) {
      level_out(p, load, lane);
      top = largest();
      if (!above()) break;
    }
    sweep(p, load, lane);
    top = largest();
    ++sweeps;
  }
  return {captive, sweeps, top};
}

// As coarse.warm_start, from p.x; an expert a lane.
__device__ void warm_start(Problem &p, int lane) {
  for (int k = lane; k < p.replicated; k += 32) {
    int first = p.copy_start[k], last = p.copy_start[k + 1], largest = first;
    double total = 0.0;
    for (int c = first; c < last; ++c) {
      double part = most(p.x[c], 0.0);
      p.x[c] = part;
      total += part;
      if (part > p.x[largest]) largest = c;
    }
    if (!(0.0 < total && total <= 1.7976931348623157e308)) {
      for (int c = first; c < last; ++c) p.x[c] = 1.0;
      total = last - first;
      largest = first;
    }
    int rest = p.experts[k].y, largest_rank = 0;
    double scale = rest / total;
    Cell *cells = p.cells + p.wave_of[k] * p.ranks;
    u32 left = p.experts[k].x;
    for (int c = first; c < last; ++c, left &= left - 1) {
      int rank = lowest_bit(left);
      if (c == largest) {
        largest_rank = rank;
        continue;
      }
      double part = p.x[c] * scale;
      int units = part < rest ? static_cast<int>(part) : rest;
      cells[rank].part = units;
      rest -= units;
    }
    cells[largest_rank].part = rest;
  }
  __syncwarp();
}

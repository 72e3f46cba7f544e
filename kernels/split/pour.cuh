// The steps over experts in float64, mostly for more than 32 ranks: flow.water_fill (one wave of experts at a time),
// flow.rescale, and the sums of loads over ranks.

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
    pair.ranks = reinterpret_cast<const u32 *>(p.copy_rank)[pair.k];
    pair.need = p.demand[pair.k];
    pair.first = p.x[2 * pair.k], pair.second = p.x[2 * pair.k + 1];
  };
  int last = p.pair_waves, end = p.wave_start[last ? 1 : 0], next_end = p.wave_start[last > 1 ? 2 : last];
  fetch(now, lane, end);
  for (int wave = 0; wave < last; ++wave) {
    fetch(next, end + lane, next_end);
    end = next_end;
    next_end = p.wave_start[wave + 3 < last ? wave + 3 : last];  // loaded one wave ahead
    if (now.k >= 0) {
      int u = now.ranks & 0xffff, v = now.ranks >> 16;
      double a = p.load[u] - now.first, b = p.load[v] - now.second;
      double part = (b - a + now.need) * 0.5;
      if (p.whole) part = floor(part);
      part = minimum_by_bits(maximum_by_bits(part, 0.0), now.need);
      double other = now.need - part;
      p.load[u] = a + part, p.load[v] = b + other;
      p.x[2 * now.k] = part, p.x[2 * now.k + 1] = other;
    }
    __syncwarp();
    now = next;
  }
}

// Water-filling of an expert with at most MOST copies, in registers and without branches, so that loads from memory overlap.
// An unused register stands for a copy on a rank of infinite load. base_load: the load of a rank without this copy.
template <int MOST>
__device__ void pour(Problem &p, int first, int count, double need) {
  const double infinite = __longlong_as_double(0x7ff0000000000000ll);
  double base_load[MOST];
  int rank[MOST];
#pragma unroll
  for (int j = 0; j < MOST; ++j) rank[j] = p.copy_rank[first + (j < count ? j : 0)];
#pragma unroll
  for (int j = 0; j < MOST; ++j) {
    double here = p.load[rank[j]] - p.x[first + (j < count ? j : 0)];
    base_load[j] = j < count ? here : infinite;
  }
  double total = need, low = base_load[0];
  int lowest = 0;
#pragma unroll
  for (int j = 0; j < MOST; ++j) {
    total += j < count ? base_load[j] : 0.0;
    bool lower = base_load[j] < low;
    lowest = lower ? j : lowest, low = lower ? base_load[j] : low;
  }
  int wet = count;
  double level = divide(p, total, wet);
  while (true) {
    int under = 0;
    total = need;
#pragma unroll
    for (int j = 0; j < MOST; ++j) {
      bool below = base_load[j] < level;
      total += below ? base_load[j] : 0.0;
      under += below;
    }
    if (under >= wet || under == 0) break;
    wet = under;
    level = divide(p, total, wet);
  }
  if (p.whole) level = floor(level);
  double remaining = need;
#pragma unroll
  for (int j = 0; j < MOST; ++j) {
    double part = j != lowest && base_load[j] < level ? minimum(level - base_load[j], remaining) : 0.0;
    remaining -= part;
    if (j >= count || j == lowest) continue;
    p.x[first + j] = part;
    p.load[rank[j]] = base_load[j] + part;
  }
  p.x[first + lowest] = remaining;
  p.load[p.copy_rank[first + lowest]] = low + remaining;
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
  double remaining = need;
  for (int c = first; c < last; ++c) {
    double here = p.load[p.copy_rank[c]];
    if (c == lowest || !(here < level)) continue;
    double part = minimum(level - here, remaining);
    p.x[c] = part;
    p.load[p.copy_rank[c]] = here + part;
    remaining -= part;
  }
  p.x[lowest] = remaining;
  p.load[p.copy_rank[lowest]] += remaining;
}

__device__ void water_fill(Problem &p, int lane) {
  pour_pairs(p, lane);
  for (int wave = p.pair_waves; wave < p.waves; ++wave) {
    int k = p.wave_start[wave] + lane, first = 0, last = 0;
    if (k < p.wave_start[wave + 1]) first = p.copy_start[k], last = p.copy_start[k + 1];
    // All lanes take the branch of the largest expert: one branch for all is faster than two branches in turn.
    u32 most_copies = __reduce_max_sync(ALL, static_cast<u32>(last - first));
    if (last > first) {
      if (most_copies <= 4)
        pour<4>(p, first, last - first, p.demand[k]);
      else if (most_copies <= 8)
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
      p.x[c] = maximum(p.x[c], 0.0);
      total += p.x[c];
      if (p.x[c] > p.x[largest]) largest = c;
    }
    if (!(0.0 < total && total <= 1.7976931348623157e308 && need / total <= 1.7976931348623157e308)) {
      for (int c = first; c < last; ++c) p.x[c] = 1.0;
      total = last - first;
      largest = first;
    }
    double scale = total == need ? 1.0 : need / total, remaining = need;
    for (int c = first; c < last; ++c) {
      if (c == largest) continue;
      p.x[c] = minimum(p.x[c] * scale, remaining);
      remaining -= p.x[c];
    }
    p.x[largest] = remaining;
  }
  __syncwarp();
}

// Sets p.load to the fixed load plus the copies of each rank. Returns the peak load.
__device__ double add_copies(Problem &p, int lane) {
  double top = 0.0;
  for (int r = lane; r < p.ranks; r += 32) {
    double here = p.fixed[r];
    int end = p.rank_start[r + 1];
#pragma unroll 4
    for (int i = p.rank_start[r]; i < end; ++i) here += p.x[p.rank_copy[i]];
    p.load[r] = here;
    top = maximum(top, here);
  }
  __syncwarp();
  return warp_maximum(top);
}

__device__ void split_evenly(Problem &p, int lane) {
  for (int c = lane; c < p.copies; c += 32) p.x[c] = p.demand[p.copy_expert[c]] * p.share[c];
  __syncwarp();
}

// The peak load of the even split over slots.
__device__ double add_even(const Problem &p, int lane) {
  double top = 0.0;
  for (int r = lane; r < p.ranks; r += 32) {
    double here = p.fixed[r];
    for (int i = p.rank_start[r]; i < p.rank_start[r + 1]; ++i) {
      int c = p.rank_copy[i];
      here += p.demand[p.copy_expert[c]] * p.share[c];
    }
    top = maximum(top, here);
  }
  return warp_maximum(top);
}

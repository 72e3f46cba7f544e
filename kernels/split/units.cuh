// For up to 32 ranks: converts loads to integer units, runs the search, and converts the result back.

// Sets x to another batch's split. ahead: the loads of the thread's first two slots, which are already in registers.
template <int WARPS>
__device__ void write_start(Problem &p, const double *start, const double (&ahead)[2], int slots, int even_copies,
                            int thread) {
  auto place = [&](int s, double part) {
    if (s < slots && p.source[s] < even_copies) p.x[p.source[s]] = part;
  };
  if (WARPS > 1) {
    place(thread, ahead[0]);
    place(thread + 32 * WARPS, ahead[1]);
  }
#pragma unroll 4
  for (int s = thread + (WARPS > 1 ? 64 * WARPS : 0); s < slots; s += 32 * WARPS) place(s, start[s]);
  if (!p.twins) return;
  sync_problem<WARPS>();
  if (thread == 0)
    for (int pass = 0; pass < 2; ++pass)
      for (int i = 0; i < p.twins; ++i) {
        int s = p.twin[3 * i], from = p.source[s] & ~TWIN;
        if (from < even_copies) p.x[from] = pass ? p.x[from] + start[s] : 0.0;
      }
  sync_problem<WARPS>();
}

// The number of bits by which loads are shifted to the left so that their total has 30 bits.
__device__ int shift_of(const Problem &p, double total) {
  int shift = 0;
  if (total > 0.0) {
    shift = min(max(1052 - static_cast<int>(__double_as_longlong(total) >> 52), -1000), 1000);
    if (p.whole) shift = min(shift, 0);
  }
  return shift;
}

__device__ double power_of_two(int shift) { return __longlong_as_double(static_cast<i64>(1023 + shift) << 52); }

// cpu.near_split without its final check in float64. Lane r of the first warp holds rank r. All warps convert loads, and
// the second warp computes bounds during the search.
template <int WARPS>
__device__ Searched near_split(Problem &p, const Arguments &a, int shift, const i64 *expert_load, const double *start,
                               const double (&ahead)[2], int thread) {
  const int THREADS = 32 * WARPS;
  double unit = power_of_two(shift);
  bool exact = a.integral && shift >= 0;
  int lane = thread & 31;
  auto in_units = [&](i64 bits) {
    if (a.integral) return static_cast<int>(shift >= 0 ? bits << shift : bits >> -shift);
    return static_cast<int>(__longlong_as_double(bits) * unit);
  };
  if (exact) {
    // These loops have few iterations. Unrolling makes them slower, because more code is fetched.
#pragma unroll 1
    for (int i = thread; i < a.n.rows * p.ranks; i += THREADS) {
      int load = in_units(expert_load[p.fixed_row[i]]);
      if (load) atomicAdd(p.fixed_units + p.fixed_rank[i], load);
    }
  } else if (thread < p.ranks) {
    p.fixed_units[thread] = static_cast<int>(p.fixed[thread] * unit);
  }
#pragma unroll 1
  for (int k = thread; k < p.replicated; k += THREADS)
    p.experts[k] = {p.mask[k], static_cast<u32>(in_units(expert_load[p.expert[k]]))};
#pragma unroll 1
  for (int i = thread; i < p.waves * p.ranks; i += THREADS) {
    u32 others = p.wave_others[i];
    int rank = others >> 24;
    Cell cell = {p.wave_mask[i], 0, 0, others};
    if (cell.mask) {
      int copy = p.wave_copy[i] & 0xffff;
      cell.need = in_units(expert_load[p.expert[p.wave_copy[i] >> 16]]);
      int below = cell.mask & ((1u << rank) - 1) ? static_cast<int>(cell.need * p.until[copy - 1]) : 0;
      cell.part = static_cast<int>(cell.need * p.until[copy]) - below;
      atomicAdd(p.loads + rank, cell.part);
    }
    p.cells[i] = cell;
  }
  if (start) write_start<WARPS>(p, start, ahead, a.n.slots, (a.n.copies + 1) / 2 * 2, thread);
  sync_problem<WARPS>();
  int fixed = 0, load = 0, even_top = 0, unlevelled = COLD;
  if (thread < 64 || start) fixed = p.fixed_units[lane];
  if (thread < 32 || start) {
    load = fixed + p.loads[lane];
    even_top = __reduce_max_sync(ALL, static_cast<u32>(load));
    if (thread == 0) *p.even_top = even_top;
  }
  if (start) {
    u32 *warm_units = p.partly_used;
#pragma unroll 1
    for (int i = thread; i < p.waves * p.ranks; i += THREADS) {
      Cell cell = p.cells[i];
      if (!cell.mask) continue;
      warm_units[i] = warm_part(p, p.wave_copy[i] >> 16, cell.need, p.wave_copy[i] & 0xffff);
      atomicAdd(p.warm_loads + (cell.others >> 24), static_cast<int>(warm_units[i]));
    }
    sync_problem<WARPS>();
    int warm = fixed + p.warm_loads[lane], total = __reduce_add_sync(ALL, load), mean = over(p, total, p.ranks);
    int above = static_cast<int>(__reduce_max_sync(ALL, static_cast<u32>(warm))) - mean, even_above = even_top - mean;
    if (above < even_above) {
      unlevelled = above < even_above >> 1 ? 0 : WARM;
      load = warm;
#pragma unroll 1
      for (int i = thread; i < p.waves * p.ranks; i += THREADS)
        if (p.cells[i].mask) p.cells[i].part = warm_units[i];
    }
    sync_problem<WARPS>();
  }
  if (thread < 32) {
    int limit = min(a.limit, p.whole ? MOST_WHOLE : MOST_SWEEPS);
    Searched searched = search<WARPS>(p, load, fixed, a.tol, limit, unlevelled, lane);
    if (lane == 0) *p.searched = searched;
  } else if (WARPS > 1) {
    compute_bounds<WARPS>(p, fixed, thread / 32, lane);
  }
  sync_problem<WARPS>();
  return *p.searched;
}

// Sets x from the cells, and adds to each expert's first copy the load that is lost by rounding to units.
template <int WARPS>
__device__ void write_parts(Problem &p, int shift, bool exact, int thread) {
  double inverse = power_of_two(-shift);
  for (int i = thread; i < p.waves * p.ranks; i += 32 * WARPS) {
    u32 mask = p.cells[i].mask, copy = p.wave_copy[i];
    if (!mask) continue;
    double part = p.cells[i].part * inverse;
    if (!exact && !(mask & ((1u << (p.cells[i].others >> 24)) - 1)))
      part += p.demand[copy >> 16] - static_cast<int>(p.experts[copy >> 16].y) * inverse;
    p.x[copy & 0xffff] = part;
  }
  sync_problem<WARPS>();
}

// Augmenting paths in float64 for up to 32 ranks, for problems that the integer search does not solve. Lane r holds rank r,
// and a set of ranks is a 32-bit mask.

// A lane's node of the search tree: its position in the queue, its parent rank, and the fields of flow.Search.
struct Reached {
  int position, root, parent, from, to;
};

// Fills p.reach, in the order of rank_copy: for each copy with a load above `tiny`, the ranks of its expert. over: ranks by
// expert. Returns the ranks that rank `lane` reaches in one step.
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

// Processes rank u of the queue: calls visit(new ranks, root) for each expert that leads to new ranks, in the order of
// flow.py.
template <class Visit>
__device__ void expand(const Problem &p, int u, u32 &seen, int &tail, Reached &node, int lane, Visit visit) {
  u32 below = (1u << lane) - 1;
  int root = __shfl_sync(ALL, node.root, u);
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
        node.position = tail + __popc(fresh & below);
        node.root = root, node.parent = u, node.from = from;
        node.to = p.copy_start[expert] + __popc(p.mask[expert] & below);
      }
      seen |= fresh;
      tail += __popc(fresh);
      visit(fresh, root);
    }
  }
}

// flow.push. Returns whether load was pushed. seen: on entry the ranks above the bound, on return the ranks reached.
__device__ bool push(Problem &p, double &load, double cap, double slack, double tiny, u32 &seen, int lane) {
  Reached node = {__popc(seen & ((1u << lane) - 1)), lane, lane, 0, 0};
  int tail = __popc(seen);
  bool pushed = false;
  u32 near = find_neighbours(p, p.mask, tiny, lane);
  while (true) {
    // Ranks of the queue that reach no new rank are skipped. `near` stays valid after a push, because pushes change x only
    // for experts whose ranks have all been reached.
    double source_load = __shfl_sync(ALL, load, node.root);
    bool open = (seen >> lane & 1) && (near & ~seen) && source_load > cap;
    u32 first = __reduce_min_sync(ALL, open ? static_cast<u32>(node.position << 5 | lane) : ALL);
    if (first == ALL) break;
    expand(p, first & 31, seen, tail, node, lane, [&](u32 fresh, int source) {
      u32 wanting = __ballot_sync(ALL, (fresh >> lane & 1) && cap - load > slack);
      while (wanting) {
        int v = __ffs(wanting) - 1;
        wanting &= wanting - 1;
        double amount = minimum(cap - __shfl_sync(ALL, load, v), __shfl_sync(ALL, load, source) - cap);
        if (amount <= 0.0) break;
        u32 path = 0;
        for (int w = v; w != source; w = __shfl_sync(ALL, node.parent, w)) {
          amount = minimum(amount, p.x[__shfl_sync(ALL, node.from, w)]);
          path |= 1u << w;
        }
        if (amount <= 0.0) continue;
        pushed = true;
        __syncwarp();
        if (path >> lane & 1) {
          p.x[node.from] -= amount;
          p.x[node.to] += amount;
        }
        if (lane == source) load -= amount;
        if (lane == v) load += amount;
        __syncwarp();
      }
    });
  }
  return pushed;
}

// flow.level_out. It builds all trees first, then computes their flows from the leaves to the roots.
__device__ void level_out_near(Problem &p, double &load, int lane) {
  for (int k = lane; k < p.replicated; k += 32) p.used[k] = 0;
  __syncwarp();
  for (int c = lane; c < p.copies; c += 32)
    if (p.x[c] > 0.0) atomicOr(&p.used[p.copy_expert[c]], 1u << p.copy_rank[c]);
  __syncwarp();
  u32 near = find_neighbours(p, p.used, 0.0, lane);
  u32 everyone = ALL >> (32 - p.ranks), seen = 0;
  Reached node = {0, lane, lane, -1, 0};
  int tail = 0, begin = 0, end = 0;
  while (seen != everyone) {
    int top = __ffs(~seen) - 1, first_position = tail;
    u32 before = seen;
    if (lane == top) node.position = tail;
    seen |= 1u << top;
    ++tail;
    while (true) {
      bool open = (seen >> lane & 1) && (near & ~seen);
      u32 first = __reduce_min_sync(ALL, open ? static_cast<u32>(node.position << 5 | lane) : ALL);
      if (first == ALL) break;
      expand(p, first & 31, seen, tail, node, lane, [](u32, int) {});
    }
    if ((seen & ~before) >> lane & 1) begin = first_position, end = tail;
  }
  // From here on, lane i holds the i-th rank of the queue.
  bool mine = lane < p.ranks;
  if (mine) {
    p.queue[node.position] = lane;
    p.load[node.position] = load;
  }
  __syncwarp();
  double mean = 0.0;
#pragma unroll 4
  for (int i = begin; i < end; ++i) mean += p.load[i];
  if (mine) mean = divide(p, mean, end - begin);
  int rank = mine ? p.queue[lane] : lane;
  double here = mine ? p.load[lane] : 0.0;
  mean = __shfl_sync(ALL, mean, rank);
  int from = __shfl_sync(ALL, node.from, rank), to = __shfl_sync(ALL, node.to, rank);
  int parent = __shfl_sync(ALL, node.position, __shfl_sync(ALL, node.parent, rank));
  bool moves = mine && from >= 0;
  double from_part = moves ? p.x[from] : 0.0, to_part = moves ? p.x[to] : 0.0;
#pragma unroll 4
  for (int i = tail - 1; i > 0; --i) {
    double amount = moves ? maximum(minimum(here - mean, to_part), -from_part) : 0.0;
    amount = __shfl_sync(ALL, amount, i);
    int above = __shfl_sync(ALL, parent, i), giver = __shfl_sync(ALL, from, i);
    if (lane == i) here -= amount, to_part -= amount;
    if (lane == above) here += amount;
    if (from == giver) from_part += amount;
  }
  __syncwarp();
  // Lanes with the same `from` have the same value for it. The first of them writes it.
  u32 mates = __match_any_sync(ALL, from);
  if (moves) {
    if (__ffs(mates) - 1 == lane) p.x[from] = from_part;
    p.x[to] = to_part;
  }
  load = __shfl_sync(ALL, here, node.position);
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

// Augmenting paths, levelling and bounds for more than 32 ranks, with the queues of flow.py. The lanes examine the copies of
// a rank, and the ranks of an expert, in parallel. They add new ranks to the queue in the order of flow.py. Load moves along
// one path at a time.

// Processes rank u of the queue. For each expert that leads to new ranks, marks these as seen, adds them to the queue (up to
// 32 at a time), and calls visit(whether this lane has a new rank, the rank). It follows copies with a load above `tiny`,
// to copies for which leads(copy) is true.
template <class Leads, class Visit>
__device__ void expand_far(Problem &p, int u, int source, double tiny, int mark, int &tail, int lane, Leads leads,
                           Visit visit) {
  u32 below = (1u << lane) - 1;
  int end = p.rank_start[u + 1];
  for (int base = p.rank_start[u]; base < end; base += 32) {
    int c = 0, k = 0;
    bool open = false;
    if (base + lane < end) {
      c = p.rank_copy[base + lane];
      if (p.x[c] > tiny) {
        k = p.copy_expert[c];
        for (int d = p.copy_start[k]; d < p.copy_start[k + 1]; ++d)
          open = open || (p.seen[p.copy_rank[d]] != mark && leads(d));
      }
    }
    // `open` stays valid while visit() pushes load: a push changes only copies of experts whose ranks have all been seen, or
    // copies earlier on the path.
    for (u32 left = __ballot_sync(ALL, open); left; left &= left - 1) {
      int owner = __ffs(left) - 1, from = __shfl_sync(ALL, c, owner), expert = __shfl_sync(ALL, k, owner);
      int last = p.copy_start[expert + 1];
      for (int first = p.copy_start[expert]; first < last; first += 32) {
        int d = first + lane, v = 0;
        bool fresh = false;
        if (d < last) {
          v = p.copy_rank[d];
          fresh = p.seen[v] != mark && leads(d);
        }
        u32 lanes = __ballot_sync(ALL, fresh);
        if (fresh) {
          p.seen[v] = mark;
          p.root[v] = source, p.from[v] = from, p.to[v] = d;
          p.queue[tail + __popc(lanes & below)] = v;
        }
        tail += __popc(lanes);
        __syncwarp();
        visit(fresh, v);
      }
    }
  }
}

// flow.push.
__device__ int push_far(Problem &p, double cap, double slack, double tiny, int mark, int lane) {
  int head = 0, tail = 0;
  for (int base = 0; base < p.ranks; base += 32) {
    int r = base + lane;
    bool above = r < p.ranks && p.load[r] > cap + slack;
    u32 lanes = __ballot_sync(ALL, above);
    if (above) {
      p.seen[r] = mark;
      p.root[r] = r;
      p.queue[tail + __popc(lanes & ((1u << lane) - 1))] = r;
    }
    tail += __popc(lanes);
  }
  __syncwarp();
  bool pushed = false;
  while (head < tail) {
    int u = p.queue[head++], source = p.root[u];
    if (p.load[source] <= cap) continue;
    auto push_to = [&](bool fresh, int to) {
      u32 wanting = __ballot_sync(ALL, fresh && cap - p.load[to] > slack);
      for (; wanting; wanting &= wanting - 1) {
        int v = __shfl_sync(ALL, to, __ffs(wanting) - 1);
        double amount = minimum(cap - p.load[v], p.load[source] - cap);
        if (amount <= 0.0) break;
        for (int w = v; w != source; w = p.copy_rank[p.from[w]]) amount = minimum(amount, p.x[p.from[w]]);
        if (amount <= 0.0) continue;
        pushed = true;
        __syncwarp();
        if (lane == 0) {
          for (int w = v; w != source; w = p.copy_rank[p.from[w]]) {
            p.x[p.from[w]] -= amount;
            p.x[p.to[w]] += amount;
          }
          p.load[source] -= amount;
          p.load[v] += amount;
        }
        __syncwarp();
      }
    };
    expand_far(p, u, source, tiny, mark, tail, lane, [](int) { return true; }, push_to);
  }
  return pushed ? -1 : tail;
}

// flow.level_out.
__device__ void level_out_far(Problem &p, int mark, int lane) {
  int tail = 0;
  for (int base = 0; base < p.ranks; base += 32) {
    while (true) {
      u32 unseen = __ballot_sync(ALL, base + lane < p.ranks && p.seen[base + lane] != mark);
      if (!unseen) break;
      int root = base + __ffs(unseen) - 1, head = tail, begin = tail++;
      __syncwarp();
      if (lane == 0) {
        p.seen[root] = mark;
        p.queue[begin] = root;
      }
      __syncwarp();
      double total = 0.0;
      while (head < tail) {
        int u = p.queue[head++];
        total += p.load[u];
        expand_far(p, u, root, 0.0, mark, tail, lane, [&](int d) { return p.x[d] > 0.0; }, [](bool, int) {});
      }
      double mean = divide(p, total, tail - begin);
      for (int next = tail - 1; next > begin; next -= 32) {
        int v = 0, c = 0, d = 0, above = 0;
        if (next - lane > begin) {
          v = p.queue[next - lane];
          c = p.from[v], d = p.to[v];
          above = p.copy_rank[c];
        }
        for (int i = 0; i < 32 && next - i > begin; ++i) {
          int child = __shfl_sync(ALL, v, i), from = __shfl_sync(ALL, c, i), to = __shfl_sync(ALL, d, i);
          int parent = __shfl_sync(ALL, above, i);
          if (lane) continue;
          double amount = maximum(minimum(p.load[child] - mean, p.x[to]), -p.x[from]);
          p.x[to] -= amount;
          p.x[from] += amount;
          p.load[child] -= amount;
          p.load[parent] += amount;
        }
      }
      __syncwarp();
    }
  }
}

// flow.captive_load.
__device__ double captive_load_far(const Problem &p, int mark, int lane) {
  double captive = 0.0;
  auto add = [&](bool inside, double load) {
    for (u32 lanes = __ballot_sync(ALL, inside); lanes; lanes &= lanes - 1)
      captive += __shfl_sync(ALL, load, __ffs(lanes) - 1);
  };
  for (int base = 0; base < p.ranks; base += 32) {
    int r = base + lane;
    add(r < p.ranks && p.seen[r] == mark, r < p.ranks ? p.fixed[r] : 0.0);
  }
  for (int base = 0; base < p.replicated; base += 32) {
    int k = base + lane;
    bool inside = k < p.replicated;
    for (int c = inside ? p.copy_start[k] : 0; inside && c < p.copy_start[k + 1]; ++c)
      inside = p.seen[p.copy_rank[c]] == mark;
    add(inside, k < p.replicated ? p.demand[k] : 0.0);
  }
  return captive;
}

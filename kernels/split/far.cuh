// Steps over ranks where there are more than 32: flow.py's queues, walked by one lane.

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

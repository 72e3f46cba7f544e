// An expert's copies divide the interval 0 .. 2^20 in proportion to the split. This file computes the upper end of each
// copy's interval (rounding.fixed_point, then running sums), and the tables in shared memory with which a token finds its
// copy.

struct Ends {
  u32 *end, *part;  // [slots], in order of copies: the upper end of each copy's interval, and the interval's length
  u32 *experts;     // [experts]: first copy | number of copies << 16
  u32 *rank_tokens; // [experts]: the number of this rank's tokens
  u16 *slot;        // [slots]: the slot of each copy
  u32 shift;        // shifts the offsets of this rank, so that ranks round differently
};

__device__ Ends allocate_ends(const Arguments &a, char *&at) {
  Ends ends;
  ends.end = allocate<u32>(at, a.slots), ends.part = allocate<u32>(at, a.slots);
  ends.experts = allocate<u32>(at, a.experts), ends.rank_tokens = allocate<u32>(at, a.experts);
  ends.slot = allocate<u16>(at, a.slots);
  ends.shift = (static_cast<u32>(a.rank) << BITS) / a.ranks;
  return ends;
}

// rounding.offsets for one expert. shift: that of the source rank.
__device__ u32 offset(u32 shift, u32 expert) { return (shift + expert * 648055) & (ONE - 1); }

__device__ u32 part_of(const Arguments &a, const Copy &copy) {
  double above = 1.0, below = copy.number;
  if (a.split) {
    double part = static_cast<const double *>(a.split)[copy.slot], load = static_cast<double>(a.loads[copy.expert]);
    if (load > 0.0) above = part, below = load;
  }
  double fraction = above / below;
  double rounded = rint(fraction * ONE);
  return static_cast<u32>(rounded < 0.0 ? 0.0 : rounded > ONE ? static_cast<double>(ONE) : rounded);
}

// Fills the tables. Loads the results of `count` and the placement, waits for the previous kernel, then loads its results.
// All threads must call it; they are synchronised at the end.
__device__ void find_ends(const Arguments &a, const Ends &ends) {
  if (a.follow == STATIC) {
    wait_for_previous_kernel();
    return;
  }
  for (int e = threadIdx.x; e < a.experts; e += THREADS) {
    ends.experts[e] = a.first[e] | static_cast<u32>(a.first[e + 1] - a.first[e]) << 16;
    ends.rank_tokens[e] = static_cast<u32>(a.rank_counts[e]);
  }
  for (int p = threadIdx.x; p < a.slots; p += THREADS) ends.slot[p] = a.copies[p].slot;
  wait_for_previous_kernel();
  for (int p = threadIdx.x; p < a.slots; p += THREADS) {
    Copy copy = a.copies[p];
    if (copy.number <= 1)  // number is 0 for an empty slot
      ends.end[p] = copy.number == 0 ? 0 : a.follow == GATHERED ? static_cast<u32>(a.rank_counts[copy.expert]) : ONE;
    else if (a.follow == GATHERED)
      ends.end[p] = a.ends[p];
    else
      ends.part[p] = part_of(a, copy);
  }
  __syncthreads();
  if (a.follow == GATHERED) return;
  for (int p = threadIdx.x; p < a.slots; p += THREADS) {
    Copy copy = a.copies[p];
    if (copy.number <= 1) continue;
    u32 sum = 0;
    for (int q = p - copy.index; q <= p && sum < ONE; ++q) sum += ends.part[q];
    ends.end[p] = copy.index + 1 == copy.number || sum > ONE ? ONE : sum;
  }
  __syncthreads();
}

// Returns the slot of the copy whose interval contains the point, by binary search. The expert's copies are first ..
// first + number - 1.
__device__ int slot_at(const Ends &ends, u32 first, u32 number, u32 point) {
  u32 low = first, high = first + number - 1;
  while (low < high) {
    u32 middle = (low + high) / 2;
    if (ends.end[middle] > point)
      high = middle;
    else
      low = middle + 1;
  }
  return ends.slot[low];
}

// The point of a token: floor(((index << 20) + offset) / number). It is exact in floating point, because no quotient of
// such numbers is rounded up to an integer.
__device__ u32 point_of(u32 index, u32 offset, u32 number) {
  double above = static_cast<double>(static_cast<i64>(index) << BITS | offset);
  return static_cast<u32>(above / static_cast<double>(number));
}

// Returns how many of a source rank's `number` tokens have a point below `end`: ceil((end * number - offset) / 2^20).
__device__ i64 points_below(i64 end, i64 number, i64 offset) {
  return end * (number >> BITS) + ((end * (number & (ONE - 1)) - offset + (ONE - 1)) >> BITS);
}

// Returns how many of a source rank's `number` tokens of an expert go to copy p. shift: that of the source rank.
__device__ i64 quota(const Arguments &a, const Ends &ends, int p, const Copy &copy, u32 shift, i64 number) {
  i64 before = copy.index ? ends.end[p - 1] : 0;
  if (a.follow == GATHERED) return ends.end[p] - before;
  i64 from = offset(shift, copy.expert);
  return points_below(ends.end[p], number, from) - points_below(before, number, from);
}

// From a split to the upper ends of the copies' intervals (rounding.fixed_point, then cumulative), in shared memory.

// end [slots]: in order of copies. Ends with all threads in step.
__device__ void find_ends(const Arguments &a, u32 *end) {
  if (a.follow == STATIC) return;
  for (int p = threadIdx.x; p < a.slots; p += blockDim.x) {
    int e = a.expert[p], number = a.first[e + 1] - a.first[e];
    if (a.follow == GATHERED) {
      end[p] = static_cast<u32>(number > 1 ? a.ends[p] : a.own[e]);
      continue;
    }
    if (number == 1) {
      end[p] = ONE;
      continue;
    }
    double fraction = 1.0 / number;
    if (a.split && a.loads[e] > 0)
      fraction = static_cast<const double *>(a.split)[a.slot[p]] / static_cast<double>(a.loads[e]);
    double rounded = rint(fraction * ONE);
    end[p] = static_cast<u32>(rounded < 0.0 ? 0.0 : rounded > ONE ? static_cast<double>(ONE) : rounded);
  }
  __syncthreads();
  if (a.follow != GATHERED)
    for (int e = threadIdx.x; e < a.experts; e += blockDim.x) {
      int first = a.first[e], last = a.first[e + 1] - 1;
      if (first == last) continue;
      u32 sum = 0;
      for (int p = first; p < last; ++p) {
        sum = sum + end[p] < ONE ? sum + end[p] : ONE;
        end[p] = sum;
      }
      end[last] = ONE;
    }
  __syncthreads();
}

// The copy, in their order, in whose interval the point falls.
__device__ int copy_at(const Arguments &a, const u32 *end, u32 expert, u32 point) {
  int low = a.first[expert], high = a.first[expert + 1] - 1;
  while (low < high) {
    int middle = (low + high) / 2;
    if (end[middle] > point)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

// How many of a source rank's tokens have their points below an end: ceil((end * number - offset) / 2^20).
__device__ i64 points_below(i64 end, i64 number, i64 shift) {
  return end * (number >> BITS) + ((end * (number & (ONE - 1)) - shift + (ONE - 1)) >> BITS);
}

// How many of a source rank's `number` tokens of its expert go to a copy.
__device__ i64 quota(const Arguments &a, const u32 *end, int p, i64 rank, i64 number) {
  int e = a.expert[p];
  i64 before = p > a.first[e] ? end[p - 1] : 0;
  if (a.follow == GATHERED) return end[p] - before;
  i64 shift = offset(a, rank, e);
  return points_below(end[p], number, shift) - points_below(before, number, shift);
}

// The arguments of split.cu, the tables and the state of a problem in shared memory, and arithmetic functions.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#define ALL 0xffffffffu
const i64 TOO_MUCH = 1ll << 53;

#define TWIN 0x8000u  // bit of `source` that marks a slot of a copy with several slots

enum { OK, BAD_LOAD, TOO_LARGE, BAD_LAYER };

const int NUM_SWEEPS = 3, NUM_LEVELLED = 3, NUM_INVERSES = 33, WIDE = 8;  // WIDE: warps per problem in small launches
const int COLD = 2, WARM = 1, LEVELLED = 8, MOST_SWEEPS = 40, MOST_WHOLE = 8;  // as in coarse.py

// The maximum of each size over layers. Every layer's table has sections of these lengths. staged: the bytes of the table
// that are copied to shared memory.
struct Sizes {
  int ranks, experts, slots, fixed, rows, replicated, copies, waves, twins, staged;
};

template <int WARPS>
__device__ void sync_problem() {
  if (WARPS > 1)
    __syncthreads();
  else
    __syncwarp();
}

struct Cell;

// A set of ranks (inside, as bits), the load in units that cannot leave it, and the bound: load / number of ranks.
struct Captive {
  u32 inside;
  int load, bound;
};

struct Searched {
  Captive captive;
  int sweeps, top;
};

// Pointers to the table of one layer and to the state of a problem, in shared memory. Parts of the table that are not staged
// stay in global memory. cuda.py packs the table from structure.Tables and the waves. A wave is a group of consecutive
// experts that share no rank; waves of experts with two copies come first. values: x [copies], then the experts' loads.
struct Problem {
  const double *share, *until;
  double *values, *x, *fixed, *load, *demand, *inverse;
  const u32 *mask, *inverse_units, *wave_mask, *wave_copy, *wave_others;
  u32 *used, *reach, *partly_used;
  const u16 *fixed_start, *fixed_expert, *fixed_row, *expert, *copy_start, *copy_rank, *copy_expert, *rank_start, *rank_copy;
  const u8 *fixed_rank;
  const u16 *source, *wave_start, *members, *twin;
  u16 *queue, *root, *from, *to;
  int *seen, *loads, *fixed_units, *warm_loads, *even_top, *ended;
  u64 *totals;
  Captive *new_bound;
  Searched *searched;
  Cell *cells;
  uint2 *experts;  // the expert's ranks, and its load in units
  int ranks, replicated, copies, paired, waves, pair_waves, twins;
  bool whole;
};

struct Arguments {
  const char *tables;   // [layers, table_bytes]
  const i64 *loads;     // [problems, experts], int64 if integral, else float64
  const i64 *layer;     // [problems]
  const double *start;  // [problems, slots], or null
  void *split;          // [problems, slots], or null; int64 if whole, else float64
  double *peak, *bound;
  void *numerator;  // int64 if integral, else float64
  i64 *size, *sweeps, *status;
  double tol, too_large;
  int problems, layers, table_bytes, integral, limit, whole;
  Sizes n;
};

struct Bound {
  double numerator;
  int size;
};

template <class T, class At>
__device__ T *allocate(At *&at, int count) {
  T *here = reinterpret_cast<T *>(at);
  at += (count * sizeof(T) + 7) / 8 * 8;
  return here;
}

template <bool FAR>
__device__ void bind_table(Problem &p, const char *staged, const char *table, const Sizes &n) {
  const char *at = staged;
  const u16 *counts = allocate<const u16>(at, 8);
  p.replicated = counts[0], p.copies = counts[1], p.paired = counts[2];
  p.waves = counts[3], p.pair_waves = counts[4], p.twins = counts[5];
  p.mask = allocate<const u32>(at, n.replicated);
  p.expert = allocate<const u16>(at, n.replicated);
  p.copy_start = allocate<const u16>(at, n.replicated + 1);
  p.source = allocate<const u16>(at, n.slots);
  p.twin = allocate<const u16>(at, 3 * n.twins);
  if (FAR) {
    p.fixed_start = allocate<const u16>(at, n.ranks + 1);
    p.fixed_expert = allocate<const u16>(at, n.fixed);
    p.wave_start = allocate<const u16>(at, n.waves + 1);
  } else {
    p.until = allocate<const double>(at, n.copies);
    p.inverse_units = allocate<const u32>(at, NUM_INVERSES);
    p.wave_mask = allocate<const u32>(at, n.waves * n.ranks);
    p.wave_copy = allocate<const u32>(at, n.waves * n.ranks);
    p.wave_others = allocate<const u32>(at, n.waves * n.ranks);
    p.fixed_row = allocate<const u16>(at, n.rows * n.ranks);
    p.fixed_rank = allocate<const u8>(at, n.rows * n.ranks);
    p.members = allocate<const u16>(at, n.waves + 1);
    at = table + n.staged;
  }
  p.share = allocate<const double>(at, n.copies);
  p.copy_rank = allocate<const u16>(at, n.copies);
  p.copy_expert = allocate<const u16>(at, n.copies);
  p.rank_start = allocate<const u16>(at, n.ranks + 1);
  p.rank_copy = allocate<const u16>(at, n.copies);
}

__device__ double minimum(double a, double b) { return b < a ? b : a; }
__device__ double maximum(double a, double b) { return b > a ? b : a; }

// Minimum and maximum of two numbers of which at least one is not negative. Their bits compare as integers in the same
// order, which is faster.
__device__ double minimum_by_bits(double a, double b) { return __double_as_longlong(b) < __double_as_longlong(a) ? b : a; }
__device__ double maximum_by_bits(double a, double b) { return __double_as_longlong(b) > __double_as_longlong(a) ? b : a; }

// The maximum over the lanes. Values are not negative, so their bits compare as the values do.
__device__ double warp_maximum(double value) {
  i64 bits = __double_as_longlong(value);
  u32 high = static_cast<u32>(bits >> 32), top = __reduce_max_sync(ALL, high);
  u32 low = __reduce_max_sync(ALL, high == top ? static_cast<u32>(bits) : 0u);
  return __longlong_as_double(static_cast<i64>(top) << 32 | low);
}

// a / n, correctly rounded, with Markstein's correction step from a rounded inverse. Much faster than a division.
__device__ double divide(const Problem &p, double a, int n) {
  if (!p.inverse || n >= NUM_INVERSES) return a / n;
  double inverse = p.inverse[n], q = a * inverse;
  return __fma_rn(__fma_rn(-q, static_cast<double>(n), a), inverse, q);
}

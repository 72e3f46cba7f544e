// Runs split.cu on the host: a warp is 32 fibers that take turns. At every warp-wide operation a lane gives way until all
// 32 have come to the same one, in ascending order of lanes or, to expose races, in descending order. Warps of a block
// take turns between such operations; at a block's barrier a warp waits for the others.

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define __device__ inline
#define __global__
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)

#define __align__(bytes) alignas(bytes)

struct uint4 {
  unsigned x, y, z, w;
};

struct uint2 {
  unsigned x, y;
};

struct Place {
  int x;
};

static Place threadIdx, blockIdx;
static char *all_shared, *shared_memory;  // ends where no one may read on
const size_t MOST_SHARED = 1 << 18;
const int MOST_LANES = 256;
static ucontext_t lanes[MOST_LANES], scheduler;
static std::vector<char> stacks(MOST_LANES << 17);
static int current, all_line_of[MOST_LANES];
static unsigned long long all_value_of[MOST_LANES];
static bool done[MOST_LANES];
static int block_votes;
#define line_of (all_line_of + current / 32 * 32)
#define value_of (all_value_of + current / 32 * 32)

// Returns when all lanes have called it.
static void meet(int line) {
  all_line_of[current] = line;
  swapcontext(&lanes[current], &scheduler);
}

static void offer(int line, unsigned long long value) {
  all_value_of[current] = value;
  meet(line);
}

static unsigned ballot(int line, bool value) {
  offer(line, value);
  unsigned mask = 0;
  for (int i = 0; i < 32; ++i) mask |= static_cast<unsigned>(value_of[i]) << i;
  meet(line);
  return mask;
}

template <class T>
static T shuffle(int line, T value, int lane) {
  unsigned long long bits = 0;
  memcpy(&bits, &value, sizeof(T));
  offer(line, bits);
  memcpy(&value, &value_of[lane & 31], sizeof(T));
  meet(line);
  return value;
}

static unsigned minimum(int line, unsigned value) {
  offer(line, value);
  for (int i = 0; i < 32; ++i)
    if (value_of[i] < value) value = static_cast<unsigned>(value_of[i]);
  meet(line);
  return value;
}

static unsigned maximum(int line, unsigned value) { return ~minimum(line, ~value); }

// Signed or not, as on a GPU.
template <typename T> static T addition(int line, T value) {
  offer(line, static_cast<unsigned>(value));
  unsigned total = 0;
  for (int i = 0; i < 32; ++i) total += static_cast<unsigned>(value_of[i]);
  meet(line);
  return static_cast<T>(total);
}

static unsigned match(int line, int value) {
  offer(line, static_cast<unsigned>(value));
  unsigned mask = 0;
  for (int i = 0; i < 32; ++i) mask |= static_cast<unsigned>(value_of[i] == static_cast<unsigned>(value)) << i;
  meet(line);
  return mask;
}

static const int BARRIER = 1 << 20;  // added to the line of a block's barrier

static bool any_of_block(int line, bool value) {
  block_votes += value;
  meet(line + BARRIER);
  bool found = block_votes;
  meet(line + BARRIER);
  block_votes = 0;
  return found;
}

#define __syncthreads() meet(__LINE__ + BARRIER)
#define __syncthreads_or(value) any_of_block(__LINE__, value)
#define __syncwarp() meet(__LINE__)
#define __ballot_sync(mask, value) ballot(__LINE__, value)
#define __shfl_sync(mask, value, lane) shuffle(__LINE__, value, lane)
#define __reduce_max_sync(mask, value) maximum(__LINE__, value)
#define __reduce_min_sync(mask, value) minimum(__LINE__, value)
#define __reduce_add_sync(mask, value) addition(__LINE__, value)
#define __match_any_sync(mask, value) match(__LINE__, value)

static int __popc(unsigned bits) { return __builtin_popcount(bits); }
static int __ffs(int bits) { return __builtin_ffs(bits); }
static long long __double_as_longlong(double value) {
  long long bits;
  memcpy(&bits, &value, 8);
  return bits;
}

static double __longlong_as_double(long long bits) {
  double value;
  memcpy(&value, &bits, 8);
  return value;
}

static double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
static unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned long long>(a) * b >> 32; }
static void atomicOr(unsigned *at, unsigned bits) { *at |= bits; }
static void atomicAdd(int *at, int amount) { *at += amount; }
#define wait_for_previous_kernel()
#define allow_next_kernel()

template <class T>
static T __ldcg(const T *at) {
  return *at;
}

using std::floor;
using std::max;
using std::min;

#include SOURCE

static const Arguments *arguments;

static bool wide;

static void lane_main() {
  if (arguments->n.ranks > 32)
    split_far(*arguments);
  else if (wide)
    split_wide(*arguments);
  else
    split_near(*arguments);
  done[current] = true;
  all_line_of[current] = 0;
  swapcontext(&lanes[current], &scheduler);
}

// Returns 0, or a line of split.cu where lanes met at different lines.
extern "C" int run_on_host(const Arguments *given, int descending, int in_wide, int shared_bytes) {
  if (!all_shared) {
    void *place = mmap(nullptr, MOST_SHARED + (1 << 16), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    all_shared = static_cast<char *>(place);
    mprotect(all_shared + MOST_SHARED, 1 << 16, PROT_NONE);
  }
  shared_memory = all_shared + MOST_SHARED - (shared_bytes + 15) / 16 * 16;
  arguments = given;
  wide = in_wide && given->n.ranks <= 32;
  int warps = wide ? WIDE : 1;
  for (blockIdx.x = 0; blockIdx.x < given->problems; ++blockIdx.x) {
    memset(all_shared, 0xff, MOST_SHARED);
    for (int i = 0; i < 32 * warps; ++i) {
      getcontext(&lanes[i]);
      lanes[i].uc_stack.ss_sp = &stacks[i << 17];
      lanes[i].uc_stack.ss_size = 1 << 17;
      lanes[i].uc_link = nullptr;
      makecontext(&lanes[i], lane_main, 0);
      done[i] = false;
      all_line_of[i] = 0;
    }
    while (true) {
      int waiting = 0, ended = 0;
      for (int w = 0; w < warps; ++w) ended += done[32 * w], waiting += all_line_of[32 * w] > BARRIER;
      if (ended == warps) break;
      bool all_wait = waiting + ended == warps;
      for (int i = 0; i < warps; ++i) {
        int warp = descending ? warps - 1 - i : i, first = 32 * warp;
        if (done[first] || (all_line_of[first] > BARRIER && !all_wait)) continue;
        for (int j = 0; j < 32; ++j) {
          current = first + (descending ? 31 - j : j);
          threadIdx.x = current;
          swapcontext(&scheduler, &lanes[current]);
        }
        for (int j = first; j < first + 32; ++j)
          if (all_line_of[j] != all_line_of[first] || done[j] != done[first])
            return all_line_of[j] ? all_line_of[j] : all_line_of[first];
      }
    }
  }
  return 0;
}

extern "C" int bytes_of_arguments() { return sizeof(Arguments); }

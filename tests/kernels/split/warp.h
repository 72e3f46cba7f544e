// Runs split.cu on the host: a warp is 32 fibers that take turns. At every warp-wide operation a lane gives way until all
// 32 have come to the same one, in ascending order of lanes or, to expose races, in descending order.

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
static uint4 shared_memory[1 << 16];
static ucontext_t lanes[32], scheduler;
static std::vector<char> stacks(32 << 17);
static int current, line_of[32];
static unsigned long long value_of[32];
static bool done[32];

// Comes back when all lanes have come here.
static void meet(int line) {
  line_of[current] = line;
  swapcontext(&lanes[current], &scheduler);
}

static void offer(int line, unsigned long long value) {
  value_of[current] = value;
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

static int sum(int line, int value) {
  offer(line, static_cast<unsigned>(value));
  unsigned total = 0;
  for (int i = 0; i < 32; ++i) total += static_cast<unsigned>(value_of[i]);
  meet(line);
  return static_cast<int>(total);
}

static unsigned match(int line, int value) {
  offer(line, static_cast<unsigned>(value));
  unsigned mask = 0;
  for (int i = 0; i < 32; ++i) mask |= static_cast<unsigned>(value_of[i] == static_cast<unsigned>(value)) << i;
  meet(line);
  return mask;
}

#define __syncwarp() meet(__LINE__)
#define __ballot_sync(mask, value) ballot(__LINE__, value)
#define __shfl_sync(mask, value, lane) shuffle(__LINE__, value, lane)
#define __reduce_max_sync(mask, value) maximum(__LINE__, value)
#define __reduce_min_sync(mask, value) minimum(__LINE__, value)
#define __reduce_add_sync(mask, value) sum(__LINE__, value)
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
using std::floor;
using std::max;
using std::min;

#include SOURCE

static const Arguments *arguments;

static void lane_main() {
  if (arguments->n.ranks <= 32)
    split_near(*arguments);
  else
    split_far(*arguments);
  done[current] = true;
  line_of[current] = 0;
  swapcontext(&lanes[current], &scheduler);
}

// Returns 0, or a line of split.cu where lanes met at different lines.
extern "C" int run_on_host(const Arguments *given, int descending) {
  arguments = given;
  for (blockIdx.x = 0; blockIdx.x < given->problems; ++blockIdx.x) {
    memset(shared_memory, 0xff, sizeof shared_memory);
    for (int i = 0; i < 32; ++i) {
      getcontext(&lanes[i]);
      lanes[i].uc_stack.ss_sp = &stacks[i << 17];
      lanes[i].uc_stack.ss_size = 1 << 17;
      lanes[i].uc_link = nullptr;
      makecontext(&lanes[i], lane_main, 0);
      done[i] = false;
    }
    while (!done[0]) {
      for (int i = 0; i < 32; ++i) {
        current = descending ? 31 - i : i;
        threadIdx.x = current;
        swapcontext(&scheduler, &lanes[current]);
      }
      for (int i = 0; i < 32; ++i)
        if (line_of[i] != line_of[0] || done[i] != done[0]) return line_of[i] ? line_of[i] : line_of[0];
    }
  }
  return 0;
}

extern "C" int bytes_of_arguments() { return sizeof(Arguments); }

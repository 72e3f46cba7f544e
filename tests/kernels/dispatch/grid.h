// Runs dispatch.cu on the host: every thread of a block, or of a cluster of blocks, is a fiber that runs until it waits
// for others: for its warp at a warp-wide operation, for its block, or for its cluster. Fibers take turns in ascending
// order or, to expose races, in descending order.

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#define __device__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)

struct uint4 {
  unsigned x, y, z, w;
};

struct Place {
  int x, y;
};

static Place threadIdx, blockIdx, gridDim, blockDim;

enum State { READY, AT_WARP, AT_BLOCK, AT_CLUSTER, DONE };
const size_t STACK = 1 << 16, MOST_SHARED = 1 << 17, MOST_FIBERS = 1024, MOST_BLOCKS = 8;

static ucontext_t fibers[MOST_FIBERS], scheduler;
static std::vector<char> stacks(STACK * MOST_FIBERS);
static State state[MOST_FIBERS];
static int line_of[MOST_FIBERS], current;
static unsigned long long value_of[MOST_FIBERS];
alignas(16) static char shared_of[MOST_BLOCKS][MOST_SHARED];

static void wait(State for_whom, int line) {
  state[current] = for_whom;
  line_of[current] = line;
  swapcontext(&fibers[current], &scheduler);
}

#define shared_memory (shared_of[current / blockDim.x])
#define __syncwarp() wait(AT_WARP, __LINE__)
#define __syncthreads() wait(AT_BLOCK, __LINE__)
#define cluster_arrive() wait(AT_CLUSTER, __LINE__)  // a stricter order than the device's
#define cluster_wait()
#define wait_for_previous_kernel()
#define allow_next_kernel()
static unsigned block_of_cluster() { return current / blockDim.x; }

static unsigned read_of_block(const unsigned *mine, unsigned block) {
  size_t place = reinterpret_cast<const char *>(mine) - shared_memory;
  return *reinterpret_cast<unsigned *>(shared_of[block] + place);
}

// The values that the lanes of a warp exchange, by lane. They are valid until the second wait.
static const unsigned long long *exchange(int line, unsigned long long value) {
  value_of[current] = value;
  wait(AT_WARP, line);
  return value_of + current / 32 * 32;
}

template <class T>
static T shuffle(int line, T value, int lane) {
  unsigned long long bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = exchange(line, bits)[lane < 0 ? current % 32 : lane];
  memcpy(&value, &bits, sizeof(T));
  wait(AT_WARP, line);
  return value;
}

static unsigned ballot(int line, bool value) {
  const unsigned long long *values = exchange(line, value);
  unsigned mask = 0;
  for (int i = 0; i < 32; ++i) mask |= static_cast<unsigned>(values[i]) << i;
  wait(AT_WARP, line);
  return mask;
}

static unsigned sum(int line, unsigned value) {
  const unsigned long long *values = exchange(line, value);
  unsigned long long all = 0;
  for (int i = 0; i < 32; ++i) all += values[i];
  wait(AT_WARP, line);
  return static_cast<unsigned>(all);
}

#define __shfl_sync(mask, value, lane) shuffle(__LINE__, value, lane)
#define __shfl_up_sync(mask, value, by) shuffle(__LINE__, value, current % 32 - (by))
#define __shfl_xor_sync(mask, value, by) shuffle(__LINE__, value, current % 32 ^ (by))
#define __ballot_sync(mask, value) ballot(__LINE__, value)
#define __reduce_add_sync(mask, value) sum(__LINE__, value)

static int __popc(unsigned bits) { return __builtin_popcount(bits); }

template <class T>
static void atomicAdd(T *at, T value) {
  *at += value;
}

static void atomicOr(unsigned *at, unsigned bits) { *at |= bits; }

using std::rint;

#include SOURCE

typedef void (*Kernel)(const Arguments);
static Kernel kernel;
static const Arguments *arguments;

static void fiber_main() {
  kernel(*arguments);
  state[current] = DONE;
  swapcontext(&fibers[current], &scheduler);
}

// When all fibers of a group wait, they continue. If the lanes of a warp wait at different lines, returns a line.
static int release(int first, int num, State waiting, bool &progress) {
  for (int i = first; i < first + num; ++i)
    if (state[i] != waiting) return 0;
  for (int i = first; i < first + num; ++i)
    if (line_of[i] != line_of[first]) return line_of[i];
  for (int i = first; i < first + num; ++i) state[i] = READY;
  progress = true;
  return 0;
}

// Runs one block, or all blocks of a cluster. Returns 0, or the line at which threads diverged or wait forever.
static int run_together(int num_blocks, int first_block, bool descending) {
  int threads = blockDim.x, num = num_blocks * threads;
  memset(shared_of, 0xff, sizeof shared_of);
  for (int i = 0; i < num; ++i) {
    getcontext(&fibers[i]);
    fibers[i].uc_stack.ss_sp = &stacks[i * STACK];
    fibers[i].uc_stack.ss_size = STACK;
    fibers[i].uc_link = nullptr;
    makecontext(&fibers[i], fiber_main, 0);
    state[i] = READY;
  }
  while (true) {
    bool progress = false, done = true;
    for (int i = 0; i < num; ++i) {
      current = descending ? num - 1 - i : i;
      if (state[current] != READY) continue;
      threadIdx.x = current % threads;
      if (num_blocks > 1) blockIdx.x = first_block + current / threads;
      progress = true;
      swapcontext(&scheduler, &fibers[current]);
    }
    int line = 0;
    for (int i = 0; i < num && !line; i += 32) line = release(i, 32, AT_WARP, progress);
    for (int i = 0; i < num && !line; i += threads) line = release(i, threads, AT_BLOCK, progress);
    if (!line) line = release(0, num, AT_CLUSTER, progress);
    if (line) return line;
    for (int i = 0; i < num; ++i) done = done && state[i] == DONE;
    if (done) return 0;
    for (int i = 0; i < num && !progress; ++i)
      if (state[i] != DONE) return line_of[i];
  }
}

extern "C" int run_on_host(const char *name, int grid_x, int grid_y, int threads, const Arguments *given,
                           int descending) {
  bool cluster = !strcmp(name, "count");
  kernel = cluster                   ? count
           : !strcmp(name, "total")  ? total
           : !strcmp(name, "quotas") ? quotas
           : !strcmp(name, "serve")  ? serve
                                     : assign;
  arguments = given;
  blockDim.x = threads, gridDim.x = grid_x, gridDim.y = grid_y;
  if (cluster) return run_together(grid_x, 0, descending);
  for (int i = 0; i < grid_x * grid_y; ++i) {
    int block = descending ? grid_x * grid_y - 1 - i : i;
    blockIdx.x = block % grid_x, blockIdx.y = block / grid_x;
    int line = run_together(1, 0, descending);
    if (line) return line;
  }
  return 0;
}

extern "C" int bytes_of_arguments() { return sizeof(Arguments); }

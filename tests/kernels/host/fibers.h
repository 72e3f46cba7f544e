// Runs a kernel on the host. Every thread of every block is a fiber; a fiber that waits lets another one run. STAND_IN is
// the header that replaces the kernel's header of instructions.
//
// The threads of a warp exchange values through the cells of the warp, between two barriers of its 32 threads.

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

struct uint4 { unsigned x, y, z, w; };
struct float4 { float x, y, z, w; };
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
struct Place { int x; };
static Place threadIdx, blockIdx, gridDim, blockDim;

struct Meeting { int there = 0, round = 0; };
struct Warp { Meeting meeting; unsigned long long cell[32][6]; };
struct Block { Meeting all, part; int votes[2] = {0, 0}; std::vector<Warp> warps; std::vector<uint4> memory; };
struct Fiber { ucontext_t context; std::unique_ptr<char[]> stack; int block, thread, begun = 0; bool done = false; };
static std::vector<Block> blocks;
static std::vector<Fiber> fibers;
static Meeting everyone;
static ucontext_t scheduler;
static int current;

// Copies of the copy engine, which are done later, at any time.
static std::vector<std::function<void()>> pending;

static void give_way() {
    const int own = current;
    swapcontext(&fibers[own].context, &scheduler);
}

static void meet_of(Meeting &meeting, int threads) {
    const int round = meeting.round;
    if (++meeting.there == threads) meeting.there = 0, ++meeting.round;
    else while (meeting.round == round) give_way();
}

static Block &block() { return blocks[blockIdx.x]; }
static Warp &warp_here() { return block().warps[threadIdx.x / 32]; }
static void meet_warp() { meet_of(warp_here().meeting, 32); }
static void __syncwarp() { meet_warp(); }
static void __syncthreads() { meet_of(block().all, blockDim.x); }
static int __syncthreads_count(int yes) {
    const int turn = block().all.round % 2;
    block().votes[turn] += yes != 0;
    __syncthreads();
    const int votes = block().votes[turn];
    __syncthreads();
    block().votes[turn] = 0;
    return votes;
}

template <typename T> static void put(T value, int cell = 0) {
    unsigned long long bits = 0;
    memcpy(&bits, &value, sizeof(T));
    warp_here().cell[threadIdx.x % 32][cell] = bits;
}
template <typename T> static T got(int lane, int cell = 0) {
    T value;
    memcpy(&value, &warp_here().cell[lane][cell], sizeof(T));
    return value;
}
template <typename T, typename F> static T over_warp(T value, F &&make) {
    put(value);
    meet_warp();
    const T made = make();
    meet_warp();
    return made;
}
template <typename T> static T __shfl_sync(unsigned, T value, int from) {
    return over_warp(value, [&] { return got<T>(from); });
}
template <typename T> static T __shfl_xor_sync(unsigned, T value, int far) {
    return over_warp(value, [&] { return got<T>(threadIdx.x % 32 ^ far); });
}
template <typename T> static T __shfl_up_sync(unsigned, T value, int far) {
    const int lane = threadIdx.x % 32;
    return over_warp(value, [&] { return got<T>(lane >= far ? lane - far : lane); });
}
static unsigned __ballot_sync(unsigned, bool yes) {
    return over_warp((unsigned)yes, [] {
        unsigned bits = 0;
        for (int lane = 0; lane < 32; ++lane) bits |= got<unsigned>(lane) << lane;
        return bits;
    });
}
static bool __any_sync(unsigned mask, bool yes) { return __ballot_sync(mask, yes) != 0; }
template <typename T, typename F> static T fold(T value, F &&join) {
    return over_warp(value, [&] {
        T whole = got<T>(0);
        for (int lane = 1; lane < 32; ++lane) whole = join(whole, got<T>(lane));
        return whole;
    });
}
template <typename T> static T __reduce_max_sync(unsigned, T v) { return fold(v, [](T a, T b) { return a > b ? a : b; }); }
template <typename T> static T __reduce_min_sync(unsigned, T v) { return fold(v, [](T a, T b) { return a < b ? a : b; }); }
template <typename T> static T __reduce_add_sync(unsigned, T v) { return fold(v, [](T a, T b) { return a + b; }); }

static int __popc(unsigned bits) { return __builtin_popcount(bits); }
static int __ffs(unsigned bits) { return __builtin_ffs(bits); }
static int __popcll(unsigned long long bits) { return __builtin_popcountll(bits); }
static int __float_as_int(float value) { int bits; memcpy(&bits, &value, 4); return bits; }
static float __int_as_float(int bits) { float value; memcpy(&value, &bits, 4); return value; }
static float exp_of(float value) { return std::exp(value); }
#define __expf exp_of
template <typename T> static T __ldcg(const T *at) { return *at; }
static void __threadfence() {}
static unsigned atomicOr(unsigned *at, unsigned bits) { const unsigned old = *at; *at |= bits; return old; }
static unsigned long long atomicOr(unsigned long long *at, unsigned long long bits) {
    const unsigned long long old = *at;
    *at |= bits;
    return old;
}
static unsigned long long atomicAdd(unsigned long long *at, unsigned long long more) {
    const unsigned long long old = *at;
    *at += more;
    return old;
}
static unsigned char *block_memory() { return (unsigned char *)block().memory.data(); }

#include STAND_IN
#include SOURCE

static Arguments arguments;

static void one() {
    KERNEL(arguments);
    fibers[current].done = true;
    while (true) give_way();
}

// argument: a struct Arguments. order: the order of threads in every round: 0 ascending, 1 descending, otherwise the seed
// of a random order. Returns 0, or 1 if threads wait for each other forever.
extern "C" int run(const void *argument, int num_blocks, int threads, int bytes, int order) {
    memcpy(&arguments, argument, sizeof arguments);
    gridDim.x = num_blocks, blockDim.x = threads;
    blocks = std::vector<Block>(num_blocks);
    fibers = std::vector<Fiber>(num_blocks * threads);
    everyone = Meeting();
    for (auto &block : blocks) block.warps.resize(threads / 32), block.memory.assign(bytes / 16 + 1, {0xa5a5a5a5u});
    for (int i = 0; i < (int)fibers.size(); ++i) {
        Fiber &fiber = fibers[i];
        fiber.block = i / threads, fiber.thread = i % threads;
        fiber.stack.reset(new char[1 << 16]);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get(), fiber.context.uc_stack.ss_size = 1 << 16;
        makecontext(&fiber.context, one, 0);
    }
    std::vector<int> turn(fibers.size());
    for (int i = 0; i < (int)turn.size(); ++i) turn[i] = order == 1 ? turn.size() - 1 - i : i;
    srand(order);
    pending.clear();
    int left = fibers.size();
    for (long round = 0; left; ++round) {
        if (round > 100000) return 1;
        if (order > 1)
            for (int i = turn.size() - 1; i > 0; --i) std::swap(turn[i], turn[rand() % (i + 1)]);
        for (int i : turn) {
            Fiber &fiber = fibers[current = i];
            if (fiber.done) continue;
            threadIdx.x = fiber.thread, blockIdx.x = fiber.block;
            swapcontext(&scheduler, &fiber.context);
            left -= fiber.done;
            if (pending.size() && rand() % 8 == 0) {
                std::swap(pending[rand() % pending.size()], pending.back());
                pending.back()();
                pending.pop_back();
            }
        }
    }
    return 0;
}

// A mixture-of-experts layer of which each token reads only the channels that matter to it, in one launch.
//
// Compiled for one shape: HIDDEN (a multiple of 128, at most 3,072), INTER, COLUMNS (experts of a token), COORDINATES
// (of 128, read by the screen; a multiple of 16), RANK (32, or 0 for no restoring), GELU (0 for SiLU), GATHERING (warps
// that gather, as shared memory has room for) and SHARED (bytes). One block a multiprocessor, all at once; they wait for
// each other twice. What a block does once is kept short: fetching instructions is most of its time.
//
// screen   A task is a token's expert and a sector of 32 bytes of each code row, 80 channels. A warp has blocks of 128
//          coordinates: it rotates the token's, lists the largest, and multiplies their codes by tensor cores. A code's
//          digit 0, 1, 2 is a subnormal number of fp16 as it is; x is three fp16 numbers, so that nothing is rounded.
// choose   The blocks of a token each find the same channels: a radix select over the bits of all its scores.
// gather   A warp has a kept channel: gate, up and down rows are loaded at once. Skipped channels add their b.
// finish   Sums over a token's blocks in fixed order, so that every run gives the same bits; the map U; bfloat16.

#include "hopper.cuh"
#include "halves.cuh"

struct Arguments {
    const u16 *x;               // [tokens, stride] bf16
    const long long *ids;       // [tokens, COLUMNS], -1 for none
    const float *weights;       // [tokens, COLUMNS]
    const u8 *codes;            // [experts, HIDDEN, ROW]
    const u16 *scales;          // [experts, HIDDEN / 128, 2, INTER] fp16
    const u16 *norms;           // [experts, INTER] bf16
    const signed char *signs;   // [HIDDEN]
    const u16 *basis;           // [HIDDEN, RANK] bf16
    const u16 *coefficients;    // [experts, INTER, RANK] bf16
    const u16 *gate_up;         // [experts, 2 INTER, HIDDEN] bf16
    const u16 *down;            // [experts, INTER, HIDDEN] bf16: transposed
    const int *kept_of;         // [COLUMNS + 1]: channels that a token of so many experts keeps
    float *estimates;           // [tokens, COLUMNS, INTER]: activation(gate) up
    float *scores;              // [tokens, COLUMNS, INTER]
    float *parts;               // [larger of blocks and tokens, HIDDEN]: sums of a block's kept channels
    float *mapped;              // [the same, RANK]: sums of a block's w b p
    u32 *bins;                  // [tokens, BINS]: channels of a token by the upper bits of their scores; all 0, and left so
    u32 *kept;                  // [tokens, WORDS] bits, slot-major; or null
    u16 *output;                // [tokens, HIDDEN] bf16
    u64 *arrived;               // over all launches of as many blocks: 0 at first, then left alone
    long long stride;
    int tokens;
};

constexpr int WARPS = 16, THREADS = 32 * WARPS;
constexpr int BLOCKS = HIDDEN / 128;
constexpr int BYTES = (INTER + 4) / 5, STRIPS = (2 * BYTES + 31) / 32, ROW = STRIPS * 32;
constexpr int STRIP = 80, PAIRED = 2 * STRIP;     // Channels of a strip; gate and up values.
constexpr int STEPS = COORDINATES / 16;
constexpr int CHANNELS = COLUMNS * INTER, WORDS = (CHANNELS + 31) / 32;
constexpr int OWN = (CHANNELS + THREADS - 1) / THREADS;  // Keys of a thread.
constexpr int BINS = 4096, FINE = 19;                    // Keys' upper bits are bins; so many are below.
constexpr u32 INFINITE = 0x7f800000;                     // Bits of the largest score: a score that is no number has it.
constexpr int RIVALS = 1024;                             // Most keys of a bin that are compared one by one.
constexpr int NARROW = 1024;                             // Bins of a step where they are more.

static_assert(HIDDEN % 128 == 0 && HIDDEN <= 3072 && COORDINATES % 16 == 0 && COORDINATES <= 128, "shape");
static_assert(COLUMNS <= 32 && CHANNELS <= 16384 && (RANK == 32 || RANK == 0), "shape");

// The largest coordinates of a block of Rx: which, and x / unit in three parts of falling size.
struct Screened {
    u16 part[3][COORDINATES];
    u8 coordinate[COORDINATES];
    float unit, sum;
};

struct Shared {
    union {
        struct {
            u32 code[BLOCKS][STEPS * 4][32];  // As lanes multiply them.
            float products[BLOCKS][PAIRED];
        };
        u16 row[GATHERING][3][HIDDEN];        // Gate, up and down of a warp's channel.
    };
    union {
        struct {
            u64 rival[RIVALS];
            u32 key[CHANNELS];
            int bin[NARROW];
        };
        float sums[GATHERING][HIDDEN];
    };
    uint4 x[HIDDEN / 8];
    alignas(16) float mapped[WARPS][32];
    u64 full[GATHERING][2];     // Gate and up, and down, of a warp's channel have come.
    Screened screened[BLOCKS];
    float pair[THREADS];
    u32 bits[OWN * WARPS];      // Which channels are kept.
    int before[OWN * WARPS];    // Kept channels before these 32.
    int across[WARPS];
    int found[3], rivals;
    u16 list[CHANNELS];         // Of kept channels that are this block's.
};
static_assert(sizeof(Shared) <= SHARED, "shared memory");

__device__ __forceinline__ float low(u32 bits) { return __int_as_float(bits << 16); }
__device__ __forceinline__ float high(u32 bits) { return __int_as_float(bits & 0xffff0000u); }
__device__ __forceinline__ float wide(u16 bits) { return __int_as_float((u32)bits << 16); }

// Of a channel that is there; 0 of one that is not. Scores are at least 0, so that their bits are in their order.
__device__ __forceinline__ u32 key_of(float score) { return (u32)__float_as_int(score) + 1; }

__device__ __forceinline__ float activation(float gate) {
#if GELU
    const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
    return gate / (1 + __expf(-2 * inner));
#else
    return gate / (1 + __expf(-gate));
#endif
}

// All blocks' writes before it are seen by all blocks behind it.
__device__ void meet_all(const Arguments &a) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        const u64 goal = (atomicAdd(a.arrived, 1ull) / gridDim.x + 1) * gridDim.x;
        while (newest(a.arrived) < goal) {}
        __threadfence();
    }
    __syncthreads();
}

#include "screen.cuh"
#include "choose.cuh"
#include "gather.cuh"

// 32 columns of a token at a time: its blocks' sums and the map.
__device__ void finish(const Arguments &a, Shared &shared, int warp, int lane) {
    constexpr int UNITS = HIDDEN / 32, AHEAD = 9;
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < a.tokens * BINS; i += gridDim.x * THREADS) a.bins[i] = 0;
    const bool shared_out = a.tokens <= (int)gridDim.x;
    for (int unit = blockIdx.x; unit < a.tokens * UNITS; unit += gridDim.x) {
        const int token = unit / UNITS, column = unit % UNITS * 32 + lane;
        const int first = shared_out ? (int)((long long)token * gridDim.x / a.tokens) : token;
        const int last = shared_out ? (int)((long long)(token + 1) * gridDim.x / a.tokens) : token + 1;
        float sum = 0, through = 0;
        for (int begin = first + warp; begin < last; begin += AHEAD * WARPS) {
            float part[AHEAD], some[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                const int row = begin + i * WARPS;
                part[i] = row < last ? __ldcg(a.parts + (long long)row * HIDDEN + column) : 0;
                some[i] = RANK && row < last ? __ldcg(a.mapped + row * 32 + lane) : 0;
            }
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) sum += part[i], through += some[i];
        }
        shared.pair[threadIdx.x] = sum;
        shared.mapped[warp][lane] = through;
        __syncthreads();
        if (warp == 0) {
            float whole = 0, across = 0;
#pragma unroll
            for (int other = 0; other < WARPS; ++other) whole += shared.pair[other * 32 + lane], across += shared.mapped[other][lane];
#if RANK
            const u32 *u = (const u32 *)(a.basis + (long long)column * 32);
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const float one = __shfl_sync(~0u, across, 2 * i), other = __shfl_sync(~0u, across, 2 * i + 1);
                whole += low(u[i]) * one + high(u[i]) * other;
            }
#endif
            a.output[(long long)token * HIDDEN + column] = rounded(whole);
        }
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) reader(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 memory[];
    Shared &shared = *(Shared *)memory;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, blocks = gridDim.x;
    if (threadIdx.x == 0)
        for (int i = 0; i < GATHERING * 2; ++i) start(shared.full[i / 2][i % 2], 1);
    const bool alone = a.tokens > blocks;  // A block has whole tokens, or a part of one.
    int token = alone ? (int)blockIdx.x : (int)(((long long)(blockIdx.x + 1) * a.tokens - 1) / blocks);
    const int first = (int)((long long)token * blocks / a.tokens), last = (int)((long long)(token + 1) * blocks / a.tokens);
    screen(a, shared, warp, lane);
    started();  // What was written in shared memory comes before the copy engine's.
    meet_all(a);
    u32 parity = 0;
    do {
        for (int i = threadIdx.x; i < HIDDEN / 8; i += THREADS) shared.x[i] = *(const uint4 *)(a.x + token * a.stride + i * 8);
        const int part = alone ? 0 : blockIdx.x - first, parts = alone ? 1 : last - first;
        gather(a, shared, token, part, parts, alone ? token : (int)blockIdx.x, parity, warp, lane);
        __syncthreads();
        token += blocks;
    } while (alone && token < a.tokens);
    meet_all(a);
    finish(a, shared, warp, lane);
}

// A mixture-of-experts layer in which each token reads only the channels that matter to it, in one launch.
//
// Compiled for one shape: HIDDEN (a multiple of 128, at most 3,072), INTER, COLUMNS (experts per token), COORDINATES (how
// many of each 128 the screen reads; a multiple of 16), RANK (32, or 0 for no restoring), GELU (1 for GELU, 0 for SiLU),
// BUFFERS (screen tasks whose codes fit in shared memory, 1 or 2), GATHERING (channels whose rows fit in shared memory, at
// most one per warp) and SHARED (bytes). There is one thread block per multiprocessor, and all run at the same time. Words
// that blocks exchange carry a tag, the number of the launch. A block polls single words and never waits for a barrier of
// all blocks. Code that runs once is kept short, because fetching instructions takes much of the time.
//
// screen   A task is a token, one of its experts, and a strip: one sector of 32 bytes (80 channels) of each code row. A
//          warp processes blocks of 128 coordinates: it rotates the token's block, lists the largest coordinates, and
//          multiplies their codes with tensor cores. x has 23 bits relative to the largest value of its block, so that
//          the sums of code * x are exact.
// choose   All blocks of a token find the same channels. Each block counts the scores in a histogram and compares the
//          scores of the bin in which the last kept channel is.
// gather   A warp multiplies the gate and up rows of a kept channel; all warps multiply its down row. A skipped channel
//          adds its coefficients b in the map, weighted by its estimate.
// finish   Sums over the blocks of a token in a fixed order, so that every run gives the same bits. Then it multiplies the
//          sum of b with the map U and writes bfloat16.

#include "../experts/hopper.cuh"
#include "halves.cuh"
#include "values.cuh"

struct Arguments {
    const u16 *x;               // [tokens, stride] bf16
    const long long *ids;       // [tokens, COLUMNS]: experts, -1 for none
    const float *weights;       // [tokens, COLUMNS]
    const u8 *codes;            // [experts, HIDDEN, ROW]
    const u16 *scales;          // [experts, HIDDEN / 128, 2, INTER] fp16
    const u16 *norms;           // [experts, INTER] bf16
    const signed char *signs;   // [HIDDEN]
    const u16 *basis;           // [HIDDEN, RANK] bf16
    const u16 *coefficients;    // [experts, INTER, RANK] bf16
    const u16 *gate_up;         // [experts, 2 INTER, HIDDEN] bf16
    const u16 *down;            // [experts, INTER, HIDDEN] bf16: transposed
    const int *kept_of;         // [COLUMNS + 1]: channels to keep, by the token's number of experts
    u64 *estimates;             // [tokens, COLUMNS, INTER] tagged: activation(gate) up
    u64 *scores;                // [tokens, SCORES] tagged: bits of the score (>= 0) + 1, which compare as scores do; 0 if
                                // the token has no expert in this column
    u64 *parts;                 // [max(blocks, tokens), HIDDEN] tagged: sums over a block's kept channels
    u64 *mapped;                // [max(blocks, tokens), 32] tagged: sums of w b p over a block's skipped channels
    u32 *kept;                  // [tokens, WORDS]: kept channels as bits, column after column; or null
    u16 *output;                // [tokens, HIDDEN] bf16
    u64 *ended;                 // blocks that have ended, over all launches (each has the same number); 0 at first
    long long stride;
    int tokens;
};

constexpr int WARPS = 16, THREADS = 32 * WARPS;
constexpr int BLOCKS = HIDDEN / 128;
constexpr int BYTES = (INTER + 4) / 5, STRIPS = (2 * BYTES + 31) / 32, ROW = STRIPS * 32;
constexpr int STRIP = 80, PAIRED = 2 * STRIP;     // Channels of a strip; gate and up values of a strip.
constexpr int STEPS = COORDINATES / 16, A_TOKEN = STRIPS * COLUMNS;  // A_TOKEN: tasks per token.
constexpr int CHANNELS = COLUMNS * INTER, WORDS = (CHANNELS + 31) / 32;
constexpr int SCORES = (CHANNELS + 63) / 64 * 64;
constexpr int EACH = (SCORES / 2 + THREADS - 1) / THREADS;  // Pairs of scores per thread.
constexpr int BIN_BITS = 12, BINS = 1 << BIN_BITS;
constexpr int LOWEST = (127 - 48) << 6;  // The first bin begins at 2^-48. A bin is the exponent and 6 mantissa bits of a key.
constexpr u32 INFINITE = 0x7f800000;     // Bits of the largest score, which NaN also gets.
constexpr int MOST_CANDIDATES = 1024;    // The most channels of a bin that are compared one by one.

static_assert(HIDDEN % 128 == 0 && HIDDEN <= 3072 && COORDINATES % 16 == 0 && COORDINATES <= 128, "shape");
static_assert(COLUMNS <= 32 && CHANNELS <= 16384 && (RANK == 32 || RANK == 0) && GATHERING <= WARPS, "shape");

// The largest coordinates of a block of the rotated x: their indices, and x / unit in two parts (see list_largest).
struct Screened {
    u16 part[2][COORDINATES];
    u8 coordinate[COORDINATES];
    float unit;
};

struct Shared {
    union {
        struct {
            u32 code[BUFFERS][BLOCKS][COORDINATES][8];  // One sector per coordinate, in the order of row_of.
            Screened screened[BUFFERS][BLOCKS];
            float products[2][BLOCKS][PAIRED];
            alignas(16) int bin[BINS];
            alignas(16) u64 candidate[MOST_CANDIDATES];
        };
        alignas(16) u16 row[GATHERING][3][HIDDEN];     // Gate, up and down rows of a channel.
    };
    uint4 x[HIDDEN / 8];
    alignas(16) float mapped[WARPS][32];
    u64 full[GATHERING][2];     // Barriers that complete when a channel's gate and up rows (0), or its down row (1), arrive.
    u64 last_kept;
    u32 tag;
    float2 dots[WARPS];         // Gate and up of a warp's channel, or of its half of a channel.
    float pair[THREADS];
    u32 bits[WORDS];            // The token's kept channels.
    int per_warp[WARPS], kept[WARPS];
    int found[3], num_candidates;
    u16 list[CHANNELS];         // This block's kept channels.
};
static_assert(sizeof(Shared) <= SHARED, "shared memory");

// The index of a channel's score. The two channels of a thread (see Keys) are adjacent in memory.
__device__ __forceinline__ int score_at(int channel) { return (channel & ~63) | (channel & 31) << 1 | (channel >> 5 & 1); }

__device__ __forceinline__ void await_tag(const u64 *at, u32 tag) {
    while ((u32)(get_tagged(at) >> 32) != tag) {}
}

#include "screen.cuh"
#include "choose.cuh"
#include "gather.cuh"

// Sums over the blocks of each token and applies the map, 32 columns at a time. The more blocks a token has, the more warps
// form a team that sums them.
__device__ __forceinline__ void finish(const Arguments &a, Shared &shared, u32 tag, int warp, int lane) {
    constexpr u32 UNITS = HIDDEN / 32, EACH_WARP = 9;
    const u32 blocks = gridDim.x, tokens = a.tokens, rows = tokens <= blocks ? (blocks + tokens - 1) / tokens : 1;
    u32 team = WARPS;  // The number of warps of a team.
    while (team > 1 && team / 2 * EACH_WARP >= rows) team /= 2;
    const u32 member = warp % team, teams = WARPS / team;
#pragma unroll 1
    for (u32 begin = blockIdx.x * teams; begin < tokens * UNITS; begin += blocks * teams) {
        const u32 unit = begin + warp / team, token = unit / UNITS, column = unit % UNITS * 32 + lane;
        const bool valid = token < tokens;
        const int first = tokens <= blocks ? token * blocks / tokens : token;
        const int last = !valid ? first : tokens <= blocks ? (token + 1) * blocks / tokens : token + 1;
#if RANK
        uint4 u[4];
        if (valid && member == 0)
#pragma unroll
            for (int i = 0; i < 4; ++i) u[i] = ((const uint4 *)(a.basis + (long long)column * 32))[i];
#endif
        float sum = 0, mapped_sum = 0;
#pragma unroll 1
        for (int row = first + member; row < last; row += EACH_WARP * team) {
            u64 part[EACH_WARP], mapped_part[EACH_WARP];
            // Polls only the last word of a row first, to keep the memory free for blocks that still write.
            const int own = row + (lane < EACH_WARP ? lane : 0) * team;
            if (own < last) await_tag(a.parts + (long long)(own + 1) * HIDDEN - 1, tag);
            __syncwarp();
            u32 late;
#pragma unroll 1
            do {
                late = 0;
#pragma unroll
                for (int i = 0; i < EACH_WARP; ++i) {
                    const int at = row + i * team;
                    part[i] = at < last ? get_tagged(a.parts + (long long)at * HIDDEN + column) : tagged(0, tag);
                    mapped_part[i] = RANK && at < last ? get_tagged(a.mapped + at * 32 + lane) : tagged(0, tag);
                }
#pragma unroll
                for (int i = 0; i < EACH_WARP; ++i) late |= ((u32)(part[i] >> 32) ^ tag) | ((u32)(mapped_part[i] >> 32) ^ tag);
            } while (__any_sync(~0u, late != 0));
#pragma unroll
            for (int i = 0; i < EACH_WARP; ++i) sum += __int_as_float((u32)part[i]), mapped_sum += __int_as_float((u32)mapped_part[i]);
        }
        shared.pair[threadIdx.x] = sum;
        shared.mapped[warp][lane] = mapped_sum;
        __syncthreads();
        if (valid && member == 0) {
            float total = 0, per_warp = 0;
#pragma unroll
            for (int other = 0; other < WARPS; ++other)
                if (other < team) total += shared.pair[(warp + other) * 32 + lane], per_warp += shared.mapped[warp + other][lane];
#if RANK
            __syncwarp();
            shared.mapped[warp][lane] = per_warp;
            __syncwarp();
            total = through_map(u, shared.mapped[warp], total);
#endif
            a.output[(long long)token * HIDDEN + column] = rounded(total);
        }
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) reader(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 memory[];
    Shared &shared = *(Shared *)memory;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 blocks = gridDim.x, tokens = a.tokens, tasks = tokens * A_TOKEN;
    const int begin = tasks * blockIdx.x / blocks, end = tasks * (blockIdx.x + 1) / blocks;
    if (threadIdx.x < GATHERING * 2) {
        init_barrier(shared.full[threadIdx.x / 2][threadIdx.x % 2], 1);
        fence_barrier_init();
    }
    clear_bins(shared);
    wait_for_previous_kernel();
    allow_next_kernel();
    const u64 ended = get_tagged(a.ended);
    screen(a, shared, begin, end, ended, warp, lane);
    const bool alone = a.tokens > (int)blocks;  // Whether a block processes whole tokens, not a part of one token.
    u32 token = alone ? blockIdx.x : ((blockIdx.x + 1) * tokens - 1) / blocks;
    const int first = token * blocks / tokens, last = (token + 1) * blocks / tokens;
    const u32 tag = shared.tag;
    u32 parity = 0;
    while (true) {
        const int part = alone ? 0 : blockIdx.x - first, parts = alone ? 1 : last - first;
        gather(a, shared, tag, token, part, parts, alone ? token : blockIdx.x, parity, warp, lane);
        token += blocks;
        if (!alone || token >= tokens) break;
        __syncthreads();
        clear_bins(shared);
        __syncthreads();
    }
    __syncthreads();
    finish(a, shared, tag, warp, lane);
    if (threadIdx.x == 0) atomicAdd(a.ended, 1ull);
}

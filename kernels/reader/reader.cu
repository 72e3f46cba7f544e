// A mixture-of-experts layer in which each token reads only the channels that matter to it, in one launch.
//
// Compiled for one shape: HIDDEN (a multiple of 128, at most 3,072), INTER, COLUMNS (experts per token), COORDINATES
// (of each 128, read by the screen; a multiple of 16), RANK (32, or 0 for no restoring), GELU (0 for SiLU), BUFFERS (screen
// tasks whose codes are held, 1 or 2), GATHERING (channels held, at most one per warp) and SHARED (bytes). One block per
// multiprocessor; all run at once. Words that they exchange carry the launch's number, and a block waits for single words,
// never for all other blocks. Code that runs once is kept short, because fetching instructions takes much of the time.
//
// screen   A task is an expert of a token and a sector of 32 bytes (80 channels) of each code row. A warp has blocks of
//          128 coordinates: it rotates the token's, lists the largest, and multiplies their codes with tensor cores. x
//          has 23 bits relative to the largest of its block, so that sums of codes times x are exact.
// choose   Each block of a token finds the same channels: it counts all scores in bins and compares those of the last bin.
// gather   A warp has a kept channel's gate and up rows; all warps have its down row. Skipped channels add their b.
// finish   Sums over a token's blocks in fixed order, so that every run gives the same bits; applies U; writes bfloat16.

#include "../experts/hopper.cuh"
#include "halves.cuh"
#include "values.cuh"

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
    const int *kept_of;         // [COLUMNS + 1]: channels to keep, by the token's number of experts
    u64 *estimates;             // [tokens, COLUMNS, INTER] tagged: activation(gate) up
    u64 *scores;                // [tokens, SCORES] tagged: a score's bits + 1 (scores are >= 0, so bits have their order); 0 without an expert
    u64 *parts;                 // [larger of blocks and tokens, HIDDEN] tagged: sums of a block's kept channels
    u64 *mapped;                // [the same, 32] tagged: sums of a block's w b p
    u32 *kept;                  // [tokens, WORDS] bits, slot-major; or null
    u16 *output;                // [tokens, HIDDEN] bf16
    u64 *ended;                 // ended blocks over all launches, which have equally many; 0 at first
    long long stride;
    int tokens;
};

constexpr int WARPS = 16, THREADS = 32 * WARPS;
constexpr int BLOCKS = HIDDEN / 128;
constexpr int BYTES = (INTER + 4) / 5, STRIPS = (2 * BYTES + 31) / 32, ROW = STRIPS * 32;
constexpr int STRIP = 80, PAIRED = 2 * STRIP;     // Channels of a strip; gate and up values.
constexpr int STEPS = COORDINATES / 16, A_TOKEN = STRIPS * COLUMNS;  // Tasks of a token.
constexpr int CHANNELS = COLUMNS * INTER, WORDS = (CHANNELS + 31) / 32;
constexpr int SCORES = (CHANNELS + 63) / 64 * 64;
constexpr int EACH = (SCORES / 2 + THREADS - 1) / THREADS;  // Pairs of scores per thread.
constexpr int BIN_BITS = 12, BINS = 1 << BIN_BITS;
constexpr int LOWEST = (127 - 48) << 6;  // The first bin, 2^-48: the exponent and 6 bits of a key.
constexpr u32 INFINITE = 0x7f800000;  // Bits of the largest score, which NaN also gets.
constexpr int MOST_CANDIDATES = 1024;          // The most channels of a bin that are compared one by one.

static_assert(HIDDEN % 128 == 0 && HIDDEN <= 3072 && COORDINATES % 16 == 0 && COORDINATES <= 128, "shape");
static_assert(COLUMNS <= 32 && CHANNELS <= 16384 && (RANK == 32 || RANK == 0) && GATHERING <= WARPS, "shape");

// The largest coordinates of a block of Rx: their indices, and x / unit in two parts.
struct Screened {
    u16 part[2][COORDINATES];
    u8 coordinate[COORDINATES];
    float unit;
};

struct Shared {
    union {
        struct {
            u32 code[BUFFERS][BLOCKS][COORDINATES][8];  // Sectors, see row_of.
            Screened screened[BUFFERS][BLOCKS];
            float products[2][BLOCKS][PAIRED];
            alignas(16) int bin[BINS];
            alignas(16) u64 candidate[MOST_CANDIDATES];
        };
        alignas(16) u16 row[GATHERING][3][HIDDEN];     // Gate, up and down rows of a channel.
    };
    uint4 x[HIDDEN / 8];
    alignas(16) float mapped[WARPS][32];
    u64 full[GATHERING][2];     // Barriers: a channel's gate and up rows, and its down row, are copied.
    u64 last_kept;
    u32 tag;
    float2 dots[WARPS];         // Gate and up of a warp's channel, or of half of one.
    float pair[THREADS];
    u32 bits[WORDS];            // The kept channels.
    int per_warp[WARPS], kept[WARPS];
    int found[3], num_candidates;
    u16 list[CHANNELS];         // This block's kept channels.
};
static_assert(sizeof(Shared) <= SHARED, "shared memory");

// The index of a channel's score: the lower and the upper half of 64 alternate, so that a thread's two are adjacent.
__device__ __forceinline__ int score_at(int channel) { return (channel & ~63) | (channel & 31) << 1 | (channel >> 5 & 1); }

__device__ __forceinline__ void await_tag(const u64 *at, u32 tag) {
    while ((u32)(get_tagged(at) >> 32) != tag) {}
}

#include "screen.cuh"
#include "choose.cuh"
#include "gather.cuh"

// Sums a token's blocks and applies the map, 32 columns at a time, with as many warps as its blocks keep busy.
__device__ __forceinline__ void finish(const Arguments &a, Shared &shared, u32 tag, int warp, int lane) {
    constexpr u32 UNITS = HIDDEN / 32, EACH_WARP = 9;
    const u32 blocks = gridDim.x, tokens = a.tokens, rows = tokens <= blocks ? (blocks + tokens - 1) / tokens : 1;
    u32 team = WARPS;  // Warps of a team.
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
            // Polls a row's last word first, so as not to disturb blocks that still write.
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
    const bool alone = a.tokens > (int)blocks;  // A block has whole tokens, or else a part of one.
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

// The channel reader for a batch whose tokens share one set of kept channels, in seven launches. Each launch begins while
// the previous one ends. Compiled for one shape: HIDDEN, INTER, COORDINATES (how many of each block of 128 are read), RANK
// (of the map that restores skipped channels, 0 for none) and GELU (1 for GELU, 0 for SiLU).
//
// A pair is a token and one of its experts. Sorted pairs are in order of expert, then token.
//
//   prepare  chooses the coordinates of each block of 128 for the batch, extracts them from the tokens, and sorts pairs
//   screen   estimates the activations of an expert's channels for all its tokens, and sums the scores over tokens
//   choose   finds the last channel to keep, in the order of scores
//   enlist   lists the kept channels of each expert, and units of 8 kept channels
//   extend   computes gate and up of kept channels, and the activation
//   project  multiplies kept channels with their down rows, and skipped channels with the map, for each pair
//   finish   sums over the experts of each token
//
// Atomic operations add only counts (integers), so every run gives the same bits.

#include "../experts/hopper.cuh"
#include "halves.cuh"
#include "batch_ops.cuh"
#include "values.cuh"

struct State {
    u64 last_kept;   // rank_of the last kept channel: channels with this value or a larger one are kept.
    int active;      // The number of experts with tokens.
    u32 candidates;  // The number of channels in the bin of the last kept channel.
    u32 arrived;     // The number of blocks of `choose` that have listed their candidates.
    u32 room;        // How many of the candidates are kept.
    u32 units;       // The number of units of `extend`.
};

struct Arguments {
    const u16 *x;               // [tokens, stride] bf16
    const long long *ids;       // [tokens, columns]: experts, distinct in a row, -1 for none
    const float *weights;       // [tokens, columns]
    const u8 *codes;            // [experts, HIDDEN, ROW]
    const u16 *scales;          // [experts, BLOCKS, 2, INTER] fp16
    const u16 *norms;           // [experts, INTER] bf16
    const signed char *signs;   // [HIDDEN]
    const u16 *basis;           // [HIDDEN, 32] bf16
    const u16 *coefficients;    // [experts, INTER, 32] bf16
    const u16 *gate_up;         // [experts, 2 INTER, HIDDEN] bf16
    const u16 *down;            // [experts, INTER, HIDDEN] bf16
    const int *kept_of;         // [experts + 1]: channels to keep, by number of active experts
    State *state;
    u8 *coordinate;             // [BLOCKS, COORDINATES]
    u8 *record;                 // [BLOCKS, tokens, RECORD]: see prepare
    int *expert;                // [experts]: active experts, ascending, then -1
    int *start;                 // [experts + 1]: the first sorted pair of each active expert
    int *token;                 // [pairs]: the token of each sorted pair
    float *weight;              // [pairs]: the weight of each sorted pair
    int *pair_of;               // [tokens, columns]: index of the sorted pair; -1 for none
    float *amounts;             // [pairs, INTER]: w p, weight times estimated activation
    u32 *scores;                // [experts, INTER]: bits of the sums of scores, by active expert
    u32 *bins;                  // [BINS]: number of channels by the upper bits of their scores
    u64 *candidates;            // [experts INTER]: rank_of the channels in the bin of the last kept channel
    u16 *channels;              // [experts, INTER]: kept channels by active expert, ascending
    int *number;                // [experts]: number of kept channels by active expert
    u32 *bits;                  // [experts, WORDS]: kept channels as bits, by active expert
    u32 *unit;                  // [experts INTER / 8]: active expert << 16 | index of eight kept channels
    u16 *activated;             // [pairs, PADDED] bf16: w act(gate) up of kept channels
    float *parts;               // [pairs, HIDDEN]
    float *mapped;              // [pairs, 32]: sum of w p b over skipped channels; b: a channel's coefficients in the map
    u32 *kept;                  // [experts, WORDS]: kept channels as bits, by expert; or null
    u16 *output;                // [tokens, HIDDEN] bf16
    long long stride;
    int tokens, experts, columns, stages;  // columns: experts per token; stages: of `extend`, 2 to 4
};

__host__ __device__ constexpr int over(int a, int b) { return (a + b - 1) / b; }

constexpr int BLOCKS = HIDDEN / 128, STEPS = COORDINATES / 16, WORDS = (INTER + 31) / 32, PADDED = WORDS * 32;
constexpr int ROW = (2 * ((INTER + 4) / 5) + 31) / 32 * 32;
constexpr int RECORD = COORDINATES * 2 + 16;
constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int FINE = 19, BINS = 4096;  // The scores of a bin differ only in their lower FINE bits.
constexpr u32 INFINITE = 0x7f800000u;

static_assert(HIDDEN % 128 == 0 && INTER % 8 == 0 && COORDINATES % 16 == 0 && (RANK == 0 || RANK == 32), "shape");

// The absolute value's bits, which compare as the values do; NaN counts as infinite.
__device__ __forceinline__ u32 ordered(float value) {
    const u32 bits = (u32)__float_as_int(value) & 0x7fffffffu;
    return bits > INFINITE ? INFINITE : bits;
}

// One number per channel that orders all channels of the batch: by score; of equal scores, the lower channel is larger.
__device__ __forceinline__ u64 rank_of(u32 score, int active_index, int channel) {
    return (u64)score << 32 | (0xffffffffu - (u32)(active_index * INTER + channel));
}

#include "batch_prepare.cuh"
#include "batch_screen.cuh"
#include "batch_choose.cuh"
#include "batch_extend.cuh"
#include "batch_project.cuh"

// A channel reader's layer for a batch that reads one set of channels, in seven launches; each begins while the one
// before it ends. Compiled for one shape: HIDDEN, INTER, COORDINATES (read of each 128), RANK (0: no restoring), GELU
// (else SiLU).
//
//   prepare  chooses the batch's coordinates per block of 128, extracts them from tokens, sorts pairs by expert
//   screen   estimates a share of an expert's channels for all its tokens, and sums their scores
//   choose   finds the score from which channels are kept
//   enlist   lists the kept channels by expert, and units of 8 of them
//   extend   computes gate, up and their product for kept channels
//   project  multiplies kept channels with their down rows, by pair, and skipped ones with the map
//   finish   sums over a token's experts
//
// Atomics only add counts, so every run gives the same bits.

#include "../experts/hopper.cuh"
#include "halves.cuh"
#include "batch_ops.cuh"
#include "values.cuh"

struct State {
    u64 last_kept;       // The order from which a channel is kept.
    int active;      // Experts with tokens.
    u32 candidates;      // Channels in the bin of the last kept channel.
    u32 arrived;     // Blocks of `choose` that have listed their rivals.
    u32 room;        // How many of the rivals are kept.
    u32 units;       // Units of `extend`.
};

struct Arguments {
    const u16 *x;               // [tokens, stride] bf16
    const long long *ids;       // [tokens, columns], -1 for none, different in a row
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
    int *start;                 // [experts + 1]: the first sorted pair of each
    int *token;                 // [pairs]: the token of each sorted pair
    float *weight;              // [pairs]
    int *pair_of;                 // [tokens, columns]: index of the sorted pair; -1 for none
    float *amounts;             // [pairs, INTER]: w p
    u32 *scores;                // [experts, INTER]: bits of sums of scores, by active expert
    u32 *bins;                  // [BINS]: channels by their scores' upper bits
    u64 *candidates;                // [experts INTER]
    u16 *channels;              // [experts, INTER]: kept channels by active expert, ascending
    int *number;                // [experts]: how many are kept
    u32 *bits;                  // [experts, WORDS]: the same as bits
    u32 *unit;                  // [experts INTER / 8]: active expert << 16 | index of eight kept channels
    u16 *activated;             // [pairs, PADDED] bf16: w act(gate) up of kept channels
    float *parts;               // [pairs, HIDDEN]
    float *mapped;              // [pairs, 32]: sums of w p b of skipped channels
    u32 *kept;                  // [experts, WORDS] bits; or null
    u16 *output;                // [tokens, HIDDEN] bf16
    long long stride;
    int tokens, experts, columns, stages;  // stages: 2 to 4, of `extend`
};

__host__ __device__ constexpr int over(int a, int b) { return (a + b - 1) / b; }

constexpr int BLOCKS = HIDDEN / 128, STEPS = COORDINATES / 16, WORDS = (INTER + 31) / 32, PADDED = WORDS * 32;
constexpr int ROW = (2 * ((INTER + 4) / 5) + 31) / 32 * 32;
constexpr int RECORD = COORDINATES * 2 + 16;
constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int FINE = 19, BINS = 4096;  // A bin holds scores that differ in their lower FINE bits.
constexpr u32 INFINITE = 0x7f800000u;

static_assert(HIDDEN % 128 == 0 && INTER % 8 == 0 && COORDINATES % 16 == 0 && (RANK == 0 || RANK == 32), "shape");

// Bits in the order of values >= 0; NaN counts as infinite.
__device__ __forceinline__ u32 ordered(float value) {
    const u32 bits = (u32)__float_as_int(value) & 0x7fffffffu;
    return bits > INFINITE ? INFINITE : bits;
}

// The order of channels: by score, then the lower channel first; all are distinct.
__device__ __forceinline__ u64 rank_of(u32 score, int active_index, int channel) {
    return (u64)score << 32 | (0xffffffffu - (u32)(active_index * INTER + channel));
}

#include "batch_prepare.cuh"
#include "batch_screen.cuh"
#include "batch_choose.cuh"
#include "batch_extend.cuh"
#include "batch_project.cuh"

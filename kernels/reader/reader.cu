// A mixture-of-experts layer of which each token reads only the channels that matter to it, in one launch.
//
// Compiled for one shape: HIDDEN (a multiple of 128, at most 3,072), INTER, COLUMNS (experts of a token), COORDINATES
// (of 128, read by the screen; a multiple of 16), RANK (32, or 0 for no restoring) and GELU (0 for SiLU). One block a
// multiprocessor, all at once; they wait for each other twice:
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

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int BLOCKS = HIDDEN / 128, ROUNDS = (BLOCKS + WARPS - 1) / WARPS;
constexpr int BYTES = (INTER + 4) / 5, STRIPS = (2 * BYTES + 31) / 32, ROW = STRIPS * 32;
constexpr int STRIP = 80, PAIRED = 2 * STRIP;     // Channels of a strip; gate and up values.
constexpr int STEPS = COORDINATES / 16;
constexpr int CHANNELS = COLUMNS * INTER, WORDS = (CHANNELS + 31) / 32;
constexpr int OWN = (CHANNELS + THREADS - 1) / THREADS;  // Keys of a thread.
constexpr int VECTORS = (HIDDEN + 255) / 256;            // Of 8 values a lane has of a row.
#define AT_ONCE (HIDDEN <= 2048)                         // Whether registers hold all three rows of a channel.
constexpr int BINS = 4096, FINE = 19;                    // Keys' upper bits are bins; so many are below.
constexpr int RIVALS = 1024;                             // Most keys of a bin that are compared one by one.

static_assert(HIDDEN % 128 == 0 && HIDDEN <= 3072 && COORDINATES % 16 == 0 && COORDINATES <= 128, "shape");
static_assert(CHANNELS <= 16384 && (RANK == 32 || RANK == 0), "shape");

// The largest coordinates of a block of Rx: which, and x / unit in three parts of falling size.
struct Screened {
    u16 part[3][COORDINATES];
    u8 coordinate[COORDINATES];
    float unit, sum;
};

struct Shared {
    Screened screened[BLOCKS];
    float products[BLOCKS][PAIRED];
    float pair[PAIRED];
    uint4 x[HIDDEN / 8];
    u32 bits[OWN * WARPS];      // Which channels are kept.
    int before[OWN * WARPS];    // Kept channels before these 32.
    u16 list[CHANNELS];         // Of kept channels that are this block's.
    alignas(16) int bin[1 << 10];
    u64 rival[RIVALS];
    int rivals;
    int across[WARPS];
    int found[3];
    alignas(16) float mapped[WARPS][32];
    alignas(16) float sums[WARPS][HIDDEN];
};

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

// A warp's blocks of 128 coordinates, 4 a lane: rotated, and the largest listed. Step by step for all of them, so that one
// does not wait for the other.
__device__ void list_largest(const Arguments &a, int token, int warp, int lane, Screened *to) {
    float v[ROUNDS][4];
    u32 key[ROUNDS][4], most[ROUNDS], least[ROUNDS], beyond[ROUNDS];
    int there[ROUNDS], past[ROUNDS];
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        const int at = (warp + round * WARPS) * 128 + lane * 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) v[round][i] = at < HIDDEN ? wide(a.x[token * a.stride + at + i]) * a.signs[at + i] : 0;
    }
#pragma unroll
    for (int far = 1; far < 4; far *= 2)
#pragma unroll
        for (int j = 0; j < ROUNDS * 4; ++j)
            if (!(j & far)) {
                float &one = v[j / 4][j % 4], &other = v[j / 4][j % 4 | far];
                const float sum = one + other;
                other = one - other, one = sum;
            }
#pragma unroll
    for (int far = 1; far < 32; far *= 2)
#pragma unroll
        for (int j = 0; j < ROUNDS * 4; ++j) {
            float &own = v[j / 4][j % 4];
            const float other = __shfl_xor_sync(~0u, own, far);
            own = lane & far ? other - own : own + other;
        }
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        most[round] = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            v[round][i] *= 0.08838834764831845f;
            key[round][i] = __float_as_int(v[round][i]) & 0x7fffffff;
            most[round] = key[round][i] > most[round] ? key[round][i] : most[round];
        }
        most[round] = __reduce_max_sync(~0u, most[round]);
        // `there` keys, COORDINATES or more, are at least `least`; `past`, fewer, are at least `beyond`.
        least[round] = 0, beyond[round] = most[round] + 1, there[round] = 128, past[round] = 0;
    }
    // First guesses by a straight line between the two, then by halves of what is left of their bits.
    for (int turn = 0;; ++turn) {
        bool open = false;
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            if (there[round] == COORDINATES || beyond[round] - least[round] <= 1) continue;
            open = true;
            u32 middle = least[round] + (beyond[round] - least[round]) / 2;
            if (turn < 8) {
                const float low = __int_as_float(least[round]), high = __int_as_float(beyond[round]);
                const float share = (there[round] - COORDINATES + 0.5f) / (there[round] - past[round]);
                const u32 guess = __float_as_int(low + (high - low) * share);
                if (guess > least[round] && guess < beyond[round]) middle = guess;
            }
            int count = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) count += key[round][i] >= middle;
            count = __reduce_add_sync(~0u, count);
            if (count >= COORDINATES) least[round] = middle, there[round] = count;
            else beyond[round] = middle, past[round] = count;
        }
        if (!open) break;
    }
    const u32 before = (1u << lane) - 1;
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        const int block = warp + round * WARPS;
        if (block >= BLOCKS) break;
        // Too many equals: the first of them are taken.
        const bool tied = there[round] != COORDINATES;
        int ties = 0, all = 0, own = 0;
        if (tied) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 equal = __ballot_sync(~0u, key[round][i] == least[round]);
                ties += __popc(equal & before), all += __popc(equal);
            }
        }
        const int room = all - (there[round] - COORDINATES);
        // Halves hold up to 65,504 units.
        const int found = most[round] >> 23, exponent = found < 1 ? 1 : found > 253 ? 253 : found;
        const float one_over = __int_as_float((254 - exponent) << 23);
        int place = 0;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const bool equal = key[round][i] == least[round];
            const bool taken = key[round][i] >= least[round] && !(tied && equal && ties + own >= room);
            own += equal;
            const u32 everyone = __ballot_sync(~0u, taken);
            if (taken) {
                const int at = place + __popc(everyone & before);
                const float whole = v[round][i] * one_over;
                const u16 first = to_half(whole);
                const float rest = (whole - from_half(first)) * 2048;
                const u16 second = to_half(rest);
                to[block].coordinate[at] = lane * 4 + i;
                to[block].part[0][at] = first, to[block].part[1][at] = second;
                to[block].part[2][at] = to_half((rest - from_half(second)) * 2048);
                sum += v[round][i];
            }
            place += __popc(everyone);
        }
#pragma unroll
        for (int far = 1; far < 32; far *= 2) sum += __shfl_xor_sync(~0u, sum, far);
        if (lane == 0) to[block].unit = __int_as_float(exponent << 23), to[block].sum = sum;
    }
    __syncwarp();
}

// Bytes `which` and `which + 1` of two words, side by side.
__device__ __forceinline__ u32 beside(u32 one, u32 other, int which) {
    return which ? (one >> 16) | (other & 0xffff0000u) : (one & 0xffffu) | (other << 16);
}

// The lowest base-3 digits of the two halves, which are below 243; they are divided by 3.
__device__ __forceinline__ u32 digits(u32 &halves) {
    const u32 third = (halves * 171 >> 9) & 0x007f007fu, rest = halves - 3 * third;
    halves = third;
    return rest;
}

// Codes of a strip in a block of coordinates: a lane has those of coordinates 2t, 2t + 1, 2t + 8, 2t + 9 of 16, four
// bytes each: words 2g and 2g + 1, each a byte of gate and a byte of up.
__device__ __forceinline__ void load_codes(const u8 *codes, const Screened &from, int lane, u32 (&word)[STEPS][4]) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = from.coordinate[step * 16 + lane % 4 * 2 + i % 2 + i / 2 * 8];
            word[step][i] = passing_word(codes + (long long)at * ROW + lane / 4 * 4);
        }
}

// -> products [PAIRED]: of a word's 10 values, gate's five come first. sum of code times x.
__device__ __forceinline__ void screen_block(const Screened &from, u32 (&word)[STEPS][4], int lane, float *products) {
    const int g = lane / 4, t = lane % 4;
    float4 sum[2][5];
#pragma unroll
    for (int i = 0; i < 10; ++i) sum[i / 5][i % 5] = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        u32 b0 = 0, b1 = 0;
        if (g < 3) {
            b0 = *(const u32 *)&from.part[g][step * 16 + t * 2];
            b1 = *(const u32 *)&from.part[g][step * 16 + t * 2 + 8];
        }
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const u32 one = beside(word[step][0], word[step][1], which), other = beside(word[step][2], word[step][3], which);
            u32 gate0 = one & 0x00ff00ffu, up0 = (one >> 8) & 0x00ff00ffu;
            u32 gate1 = other & 0x00ff00ffu, up1 = (other >> 8) & 0x00ff00ffu;
#pragma unroll
            for (int digit = 0; digit < 4; ++digit)
                multiply_halves(sum[which][digit], digits(gate0), digits(up0), digits(gate1), digits(up1), b0, b1);
            multiply_halves(sum[which][4], gate0, up0, gate1, up1, b0, b1);
        }
    }
#pragma unroll
    for (int which = 0; which < 2; ++which)
#pragma unroll
        for (int digit = 0; digit < 5; ++digit) {
            const float4 own = sum[which][digit];
            const float third[2] = {__shfl_sync(~0u, own.x, g * 4 + 1), __shfl_sync(~0u, own.z, g * 4 + 1)};
            if (t == 0) {
                // Digits are in units of 2^-24, the smallest number of fp16, and one above the code.
                const float unit = from.unit * 16777216.0f, part = 1.0f / 2048;
                float *to = products + (2 * g + which) * 10 + digit;
                to[0] = (own.x + (own.y + third[0] * part) * part) * unit - from.sum;
                to[5] = (own.z + (own.w + third[1] * part) * part) * unit - from.sum;
            }
        }
}

__device__ void screen(const Arguments &a, Shared &shared, int warp, int lane) {
    const long long tasks = (long long)a.tokens * COLUMNS * STRIPS;
    const int begin = (int)(tasks * blockIdx.x / gridDim.x), end = (int)(tasks * (blockIdx.x + 1) / gridDim.x);
    int listed = -1;
    for (int task = begin; task < end; ++task) {
        const int pair = task / STRIPS, strip = task % STRIPS, token = pair / COLUMNS;
        const long long expert = a.ids[pair];
        if (expert < 0) continue;
        const int value = threadIdx.x, word = value / 10, kind = value % 10 / 5;
        const int channel = (strip * 16 + word) * 5 + value % 5;
        const bool there = value < PAIRED && channel < INTER;
        u16 scale[BLOCKS];
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block)
            scale[block] = there ? a.scales[((expert * BLOCKS + block) * 2 + kind) * INTER + channel] : 0;
        if (token != listed) list_largest(a, token, warp, lane, shared.screened);
        listed = token;
        const u8 *codes = a.codes + expert * HIDDEN * ROW + strip * 32;
        u32 words[ROUNDS][STEPS][4];
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            const int block = warp + round * WARPS;
            if (block < BLOCKS)
                load_codes(codes + (long long)block * 128 * ROW, shared.screened[block], lane, words[round]);
        }
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            const int block = warp + round * WARPS;
            if (block < BLOCKS) screen_block(shared.screened[block], words[round], lane, shared.products[block]);
        }
        __syncthreads();
        if (value < PAIRED) {
            float sum = 0;
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) sum += from_half(scale[block]) * shared.products[block][value];
            shared.pair[value] = sum;
        }
        __syncthreads();
        if (there && kind == 0) {
            const float active = activation(shared.pair[value]) * shared.pair[value + 5];
            const long long at = (long long)pair * INTER + channel;
            const float size = a.weights[pair] * wide(a.norms[expert * INTER + channel]);
            const float score = size * (active < 0 ? -active : active);
            a.estimates[at] = active;
            a.scores[at] = score;
            atomicAdd(a.bins + token * BINS + (key_of(score) >> FINE), 1u);
        }
    }
}

// Inclusive sum over the block's threads before and at this one.
__device__ __forceinline__ int sum_upto(Shared &shared, int value, int warp, int lane) {
#pragma unroll
    for (int far = 1; far < 32; far *= 2) {
        const int other = __shfl_up_sync(~0u, value, far);
        if (lane >= far) value += other;
    }
    if (lane == 31) shared.across[warp] = value;
    __syncthreads();
    for (int other = 0; other < warp; ++other) value += shared.across[other];
    __syncthreads();
    return value;
}

// Counts of bins from the top down, EACH a thread: where the `wanted`th is. found: its bin, how many of the bin are wanted,
// how many there are.
template <int EACH>
__device__ void find_bin(Shared &shared, const int (&count)[EACH], int wanted, int top, int warp, int lane) {
    int total = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) total += count[i];
    int before = sum_upto(shared, total, warp, lane) - total;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        if (before < wanted && wanted <= before + count[i]) {
            shared.found[0] = top - (threadIdx.x * EACH + i);
            shared.found[1] = wanted - before, shared.found[2] = count[i];
        }
        before += count[i];
    }
    __syncthreads();
}

// Of the keys whose upper bits are `prefix`, the one `wanted`th from the top: its next `width` bits, down to `shift`, are
// added to the prefix. Returns how many of the keys with these bits are still wanted; `equal`: how many there are.
__device__ int narrow(Shared &shared, const u32 (&key)[OWN], u32 &prefix, int shift, int width, int wanted, int &equal, int warp, int lane) {
    constexpr int ALL = 1 << 10, EACH = ALL / THREADS;
    for (int i = threadIdx.x; i < ALL; i += THREADS) shared.bin[i] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < OWN; ++i)
        if (key[i] >> (shift + width) == prefix) atomicAdd(&shared.bin[key[i] >> shift & ((1u << width) - 1)], 1);
    __syncthreads();
    int count[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) count[i] = shared.bin[ALL - 1 - (threadIdx.x * EACH + i)];
    find_bin(shared, count, wanted, ALL - 1, warp, lane);
    prefix = prefix << width | (u32)shared.found[0];
    equal = shared.found[2];
    const int left = shared.found[1];
    __syncthreads();
    return left;
}

// Bits of the channels whose keys are above `least`, and of the first `left` of those that are equal.
__device__ void mark(Shared &shared, const u32 (&key)[OWN], u32 least, int left, bool tied, int warp, int lane) {
    if (tied) {
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const u32 all = __ballot_sync(~0u, key[i] == least);
            if (lane == 0) shared.before[i * WARPS + warp] = __popc(all);
        }
        __syncthreads();
    }
    int earlier = 0, done = 0;  // Equals before this thread's i-th key.
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        bool taken = key[i] >= least;
        if (tied) {
            const u32 all = __ballot_sync(~0u, key[i] == least);
            for (; done < i * WARPS + warp; ++done) earlier += shared.before[done];
            if (key[i] == least) taken = earlier + __popc(all & ((1u << lane) - 1)) < left;
        }
        const u32 bits = __ballot_sync(~0u, taken);
        if (lane == 0) shared.bits[i * WARPS + warp] = bits;
    }
    __syncthreads();
}

// The first `left` of the keys of one bin, ties to the lower channel, each compared with all others.
__device__ void add_best(Shared &shared, const u32 (&key)[OWN], u32 bin, int left, int lane) {
#pragma unroll
    for (int i = 0; i < OWN; ++i)
        if (key[i] >> FINE == bin)
            shared.rival[atomicAdd(&shared.rivals, 1)] = (u64)key[i] << 16 | (u32)(65535 - (i * THREADS + threadIdx.x));
    __syncthreads();
    const int number = shared.rivals;
    for (int i = threadIdx.x; i < number; i += THREADS) {
        const u64 own = shared.rival[i];
        int better = 0;
        for (int other = 0; other < number; ++other) better += shared.rival[other] > own;
        const int channel = 65535 - (int)(own & 65535);
        if (better < left) atomicOr(&shared.bits[channel / 32], 1u << channel % 32);
    }
    __syncthreads();
}

// The `wanted` channels of the largest scores, ties to the lower: bits, and how many come before each 32.
__device__ void choose(const Arguments &a, Shared &shared, int token, int warp, int lane) {
    const long long *ids = a.ids + (long long)token * COLUMNS;
    int experts = 0;
    for (int i = 0; i < COLUMNS; ++i) experts += ids[i] >= 0;
    const int wanted = a.kept_of[experts];
    u32 key[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        // Keys of a thread lie THREADS apart.
        const int channel = i * THREADS + threadIdx.x;
        const bool there = channel < CHANNELS && ids[channel / INTER] >= 0;
        key[i] = there ? key_of(__ldcg(a.scores + (long long)token * CHANNELS + channel)) : 0;
    }
    if (wanted > 0 && wanted < experts * INTER) {
        constexpr int EACH = BINS / THREADS;
        int count[EACH];
        const uint4 *bins = (const uint4 *)(a.bins + token * BINS) + (THREADS - 1 - threadIdx.x) * (EACH / 4);
#pragma unroll
        for (int i = 0; i < EACH / 4; ++i) {
            const uint4 four = __ldcg(bins + EACH / 4 - 1 - i);
            count[4 * i] = four.w, count[4 * i + 1] = four.z, count[4 * i + 2] = four.y, count[4 * i + 3] = four.x;
        }
        if (threadIdx.x == 0) shared.rivals = 0;
        find_bin(shared, count, wanted, BINS - 1, warp, lane);
        u32 bin = shared.found[0];
        int left = shared.found[1], equal = shared.found[2];
        if (equal <= RIVALS) {
            mark(shared, key, (bin + 1) << FINE, 0, false, warp, lane);
            add_best(shared, key, bin, left, lane);
        } else {
            __syncthreads();
            left = narrow(shared, key, bin, 9, 10, left, equal, warp, lane);
            left = narrow(shared, key, bin, 0, 9, left, equal, warp, lane);
            mark(shared, key, bin, left, equal != left, warp, lane);
        }
    } else {
        mark(shared, key, wanted > 0 ? 1 : ~0u, 0, false, warp, lane);
    }
    constexpr int ALL = OWN * WARPS, EACH = (ALL + THREADS - 1) / THREADS;
    int count = 0;
    for (int i = 0; i < EACH; ++i)
        if (threadIdx.x * EACH + i < ALL) count += __popc(shared.bits[threadIdx.x * EACH + i]);
    int before = sum_upto(shared, count, warp, lane) - count;
    for (int i = 0; i < EACH; ++i)
        if (threadIdx.x * EACH + i < ALL) {
            shared.before[threadIdx.x * EACH + i] = before;
            before += __popc(shared.bits[threadIdx.x * EACH + i]);
        }
    __syncthreads();
}

__device__ __forceinline__ float dot(const uint4 &one, const uint4 &other, float sum) {
    sum += low(one.x) * low(other.x), sum += high(one.x) * high(other.x);
    sum += low(one.y) * low(other.y), sum += high(one.y) * high(other.y);
    sum += low(one.z) * low(other.z), sum += high(one.z) * high(other.z);
    sum += low(one.w) * low(other.w), sum += high(one.w) * high(other.w);
    return sum;
}

__device__ __forceinline__ void load_row(const u16 *row, int lane, uint4 (&to)[VECTORS]) {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const int at = v * 256 + lane * 8;
        to[v] = at < HIDDEN ? passing(row + at) : make_uint4(0, 0, 0, 0);
    }
}

__device__ __forceinline__ void add_row(float amount, const uint4 (&row)[VECTORS], float (&sum)[VECTORS][8]) {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const u32 bits[4] = {row[v].x, row[v].y, row[v].z, row[v].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sum[v][2 * i] += amount * low(bits[i]);
            sum[v][2 * i + 1] += amount * high(bits[i]);
        }
    }
}

// A part of a token's channels, the `part`th of `parts`: kept ones in full, of the others b.
__device__ void gather(const Arguments &a, Shared &shared, int token, int part, int parts, int row, int warp, int lane) {
    const long long *ids = a.ids + (long long)token * COLUMNS;
    const float *weights = a.weights + (long long)token * COLUMNS;
    for (int i = threadIdx.x; i < HIDDEN / 8; i += THREADS) shared.x[i] = *(const uint4 *)(a.x + token * a.stride + i * 8);
    choose(a, shared, token, warp, lane);
    int number = 0;
    for (int word = warp; word < OWN * WARPS; word += WARPS) {
        const u32 bits = shared.bits[word];
        const int rank = shared.before[word] + __popc(bits & ((1u << lane) - 1));
        if (bits >> lane & 1 && rank % parts == part) shared.list[rank / parts] = word * 32 + lane;
    }
    const int kept = shared.before[OWN * WARPS - 1] + __popc(shared.bits[OWN * WARPS - 1]);
    number = kept > part ? (kept - part + parts - 1) / parts : 0;
    if (a.kept && part == 0)
        for (int word = threadIdx.x; word < WORDS; word += THREADS) a.kept[(long long)token * WORDS + word] = shared.bits[word];
    __syncthreads();
    float sum[VECTORS][8];
#pragma unroll
    for (int i = 0; i < VECTORS * 8; ++i) sum[i / 8][i % 8] = 0;
    for (int i = warp; i < number; i += WARPS) {
        const int at = shared.list[i], slot = at / INTER, channel = at % INTER;
        const long long expert = ids[slot];
        uint4 gate[VECTORS], up[VECTORS];
        const u16 *rows = a.gate_up + (expert * 2 * INTER + channel) * HIDDEN;
        const u16 *back = a.down + (expert * INTER + channel) * HIDDEN;
        load_row(rows, lane, gate);
        load_row(rows + (long long)INTER * HIDDEN, lane, up);
#if AT_ONCE
        uint4 down[VECTORS];
        load_row(back, lane, down);
#endif
        float one = 0, other = 0;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            if (v * 256 + lane * 8 < HIDDEN) {
                const uint4 x = shared.x[v * 32 + lane];
                one = dot(gate[v], x, one), other = dot(up[v], x, other);
            }
        }
#pragma unroll
        for (int far = 16; far; far /= 2) {
            one += __shfl_xor_sync(~0u, one, far);
            other += __shfl_xor_sync(~0u, other, far);
        }
        const float amount = activation(one) * other * weights[slot];
#if AT_ONCE
        add_row(amount, down, sum);
#else
        load_row(back, lane, gate);
        add_row(amount, gate, sum);
#endif
    }
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const int at = v * 256 + lane * 8;
        if (at < HIDDEN) {
            float4 *to = (float4 *)(shared.sums[warp] + at);
            to[0] = make_float4(sum[v][0], sum[v][1], sum[v][2], sum[v][3]);
            to[1] = make_float4(sum[v][4], sum[v][5], sum[v][6], sum[v][7]);
        }
    }
#if RANK
    // Eight lanes a channel, four numbers each.
    float4 through = make_float4(0, 0, 0, 0);
    for (int word = part * WARPS + warp; word < WORDS; word += parts * WARPS) {
        const u32 bits = shared.bits[word];
#pragma unroll
        for (int four = 0; four < 8; ++four) {
            const int which = four * 4 + lane / 8, channel = word * 32 + which;
            if (channel >= CHANNELS || bits >> which & 1) continue;
            const int slot = channel / INTER;
            const long long expert = ids[slot];
            if (expert < 0) continue;
            const float amount = weights[slot] * __ldcg(a.estimates + (long long)token * CHANNELS + channel);
            const u32 *b = (const u32 *)(a.coefficients + (expert * INTER + channel % INTER) * 32) + lane % 8 * 2;
            through.x += amount * low(b[0]), through.y += amount * high(b[0]);
            through.z += amount * low(b[1]), through.w += amount * high(b[1]);
        }
    }
#pragma unroll
    for (int far = 8; far < 32; far *= 2) {
        through.x += __shfl_xor_sync(~0u, through.x, far), through.y += __shfl_xor_sync(~0u, through.y, far);
        through.z += __shfl_xor_sync(~0u, through.z, far), through.w += __shfl_xor_sync(~0u, through.w, far);
    }
    if (lane < 8) *(float4 *)(shared.mapped[warp] + lane * 4) = through;
#endif
    __syncthreads();
    for (int column = threadIdx.x; column < HIDDEN; column += THREADS) {
        float whole = 0;
#pragma unroll
        for (int other = 0; other < WARPS; ++other) whole += shared.sums[other][column];
        a.parts[(long long)row * HIDDEN + column] = whole;
    }
#if RANK
    if (threadIdx.x < 32) {
        float whole = 0;
#pragma unroll
        for (int other = 0; other < WARPS; ++other) whole += shared.mapped[other][lane];
        a.mapped[row * 32 + lane] = whole;
    }
#endif
    __syncthreads();
}

// 32 columns of a token at a time: its blocks' sums and the map.
__device__ void finish(const Arguments &a, Shared &shared, int warp, int lane) {
    constexpr int UNITS = HIDDEN / 32, AHEAD = 17;
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
        shared.sums[warp][lane] = sum;
        shared.mapped[warp][lane] = through;
        __syncthreads();
        if (warp == 0) {
            float whole = 0, across = 0;
#pragma unroll
            for (int other = 0; other < WARPS; ++other) whole += shared.sums[other][lane], across += shared.mapped[other][lane];
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
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    screen(a, shared, warp, lane);
    meet_all(a);
    if (a.tokens <= (int)gridDim.x) {
        const int token = (int)(((long long)(blockIdx.x + 1) * a.tokens - 1) / gridDim.x);
        const int first = (int)((long long)token * gridDim.x / a.tokens);
        const int last = (int)((long long)(token + 1) * gridDim.x / a.tokens);
        gather(a, shared, token, blockIdx.x - first, last - first, blockIdx.x, warp, lane);
    } else {
        for (int token = blockIdx.x; token < a.tokens; token += gridDim.x) gather(a, shared, token, 0, 1, token, warp, lane);
    }
    meet_all(a);
    finish(a, shared, warp, lane);
}

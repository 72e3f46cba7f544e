// A mixture-of-experts layer of which each token reads only the channels that matter to it, in one launch.
//
// Compiled for one shape: HIDDEN (a multiple of 128, at most 3,072), INTER, COLUMNS (experts of a token), COORDINATES
// (of 128, read by the screen; a multiple of 16), RANK (32, or 0 for no restoring), GELU (0 for SiLU), GATHERING (warps
// that gather, as shared memory has room for) and SHARED (bytes). One block a multiprocessor, all at once; they wait for
// each other twice. What a block does once is kept short: fetching instructions is most of its time.
//
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
constexpr int BLOCKS = HIDDEN / 128, ROUNDS = (BLOCKS + WARPS - 1) / WARPS;
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

// A block of 128 coordinates, 4 a lane: rotated, and the largest listed. One warp.
__device__ void list_largest(const Arguments &a, int token, int block, int lane, Screened &to) {
    float v[4];
    const u16 *x = a.x + token * a.stride + block * 128 + lane * 4;
    const signed char *signs = a.signs + block * 128 + lane * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = wide(x[i]) * signs[i];
#pragma unroll
    for (int far = 1; far < 4; far *= 2)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (!(i & far)) {
                const float one = v[i], other = v[i | far];
                v[i] = one + other, v[i | far] = one - other;
            }
#pragma unroll 1
    for (int far = 1; far < 32; far *= 2)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float other = __shfl_xor_sync(~0u, v[i], far);
            v[i] = lane & far ? other - v[i] : v[i] + other;
        }
    u32 key[4], most = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        v[i] *= 0.08838834764831845f;
        key[i] = __float_as_int(v[i]) & 0x7fffffff;
        most = key[i] > most ? key[i] : most;
    }
    most = __reduce_max_sync(~0u, most);
    // `there` keys, COORDINATES or more, are at least `least`; `past`, fewer, are at least `beyond`. First guesses by a
    // straight line between the two, then by halves of what is left of their bits.
    u32 least = 0, beyond = most + 1;
    int there = 128, past = 0;
#pragma unroll 1
    for (int turn = 0; there != COORDINATES && beyond - least > 1; ++turn) {
        u32 middle = least + (beyond - least) / 2;
        if (turn < 8) {
            const float from = __int_as_float(least), upto = __int_as_float(beyond);
            const u32 guess = __float_as_int(from + (upto - from) * (there - COORDINATES + 0.5f) / (there - past));
            if (guess > least && guess < beyond) middle = guess;
        }
        int count = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) count += key[i] >= middle;
        count = __reduce_add_sync(~0u, count);
        if (count >= COORDINATES) least = middle, there = count;
        else beyond = middle, past = count;
    }
    // Too many equals: the first of them are taken.
    const u32 before = (1u << lane) - 1;
    const bool tied = there != COORDINATES;
    int ties = 0, room = COORDINATES - there, own = 0;
    if (tied) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 equal = __ballot_sync(~0u, key[i] == least);
            ties += __popc(equal & before), room += __popc(equal);
        }
    }
    // Halves hold up to 65,504 units.
    const int found = most >> 23, exponent = found < 1 ? 1 : found > 253 ? 253 : found;
    const float one_over = __int_as_float((254 - exponent) << 23);
    int place = 0;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const bool equal = key[i] == least;
        const bool taken = key[i] >= least && !(tied && equal && ties + own >= room);
        own += equal;
        const u32 all = __ballot_sync(~0u, taken);
        if (taken) {
            const int at = place + __popc(all & before);
            const float whole = v[i] * one_over;
            const u16 first = to_half(whole);
            const float rest = (whole - from_half(first)) * 2048;
            const u16 second = to_half(rest);
            to.coordinate[at] = lane * 4 + i;
            to.part[0][at] = first, to.part[1][at] = second, to.part[2][at] = to_half((rest - from_half(second)) * 2048);
            sum += v[i];
        }
        place += __popc(all);
    }
#pragma unroll
    for (int far = 1; far < 32; far *= 2) sum += __shfl_xor_sync(~0u, sum, far);
    if (lane == 0) to.unit = __int_as_float(exponent << 23), to.sum = sum;
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
__device__ __forceinline__ void load_codes(const u8 *codes, const Screened &from, int lane, u32 (&code)[STEPS * 4][32]) {
#pragma unroll 4
    for (int i = 0; i < STEPS * 4; ++i) {
        const int at = from.coordinate[i / 4 * 16 + lane % 4 * 2 + i % 2 + i / 2 % 2 * 8];
        copy_word(&code[i][lane], codes + at * ROW + lane / 4 * 4);
    }
}

// -> products [PAIRED]: of a word's 10 values, gate's five come first. sum of code times x.
__device__ __forceinline__ void screen_block(const Screened &from, const u32 (&code)[STEPS * 4][32], int lane, float *products) {
    const int g = lane / 4, t = lane % 4;
    float4 sum[2][5];
#pragma unroll
    for (int i = 0; i < 10; ++i) sum[i / 5][i % 5] = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int step = 0; step < STEPS; ++step) {
        u32 b0 = 0, b1 = 0;
        if (g < 3) {
            b0 = *(const u32 *)&from.part[g][step * 16 + t * 2];
            b1 = *(const u32 *)&from.part[g][step * 16 + t * 2 + 8];
        }
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const u32 one = beside(code[step * 4][lane], code[step * 4 + 1][lane], which);
            const u32 other = beside(code[step * 4 + 2][lane], code[step * 4 + 3][lane], which);
            u32 gate0 = one & 0x00ff00ffu, up0 = (one >> 8) & 0x00ff00ffu;
            u32 gate1 = other & 0x00ff00ffu, up1 = (other >> 8) & 0x00ff00ffu;
#pragma unroll
            for (int digit = 0; digit < 4; ++digit)
                multiply_halves(sum[which][digit], digits(gate0), digits(up0), digits(gate1), digits(up1), b0, b1);
            multiply_halves(sum[which][4], gate0, up0, gate1, up1, b0, b1);
        }
    }
    // Digits are in units of 2^-24, the smallest number of fp16, and one above the code.
    const float unit = from.unit * 16777216.0f, part = 1.0f / 2048;
#pragma unroll
    for (int which = 0; which < 2; ++which)
#pragma unroll
        for (int digit = 0; digit < 5; ++digit) {
            const float4 own = sum[which][digit];
            const float third[2] = {__shfl_sync(~0u, own.x, g * 4 + 1), __shfl_sync(~0u, own.z, g * 4 + 1)};
            if (t == 0) {
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
#pragma unroll 1
    for (int task = begin; task < end; ++task) {
        const int pair = task / STRIPS, strip = task % STRIPS, token = pair / COLUMNS;
        const long long expert = a.ids[pair];
        const int value = threadIdx.x, word = value / 10, kind = value % 10 / 5;
        const int channel = (strip * 16 + word) * 5 + value % 5;
        const bool there = value < PAIRED && channel < INTER;
        const long long at = (long long)pair * INTER + channel;
        if (expert < 0) {
            if (there && kind == 0) a.scores[at] = __int_as_float(-1);  // Of key 0.
            continue;
        }
        u16 scale[BLOCKS];
        if (there)
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block)
                scale[block] = a.scales[(expert * BLOCKS * 2 + kind) * INTER + channel + block * 2 * INTER];
        const u8 *codes = a.codes + expert * HIDDEN * ROW + strip * 32;
#pragma unroll 1
        for (int block = warp; block < BLOCKS; block += WARPS) {
            if (token != listed) list_largest(a, token, block, lane, shared.screened[block]);
            load_codes(codes + block * (128 * ROW), shared.screened[block], lane, shared.code[block]);
        }
        listed = token;
        copied();
#pragma unroll 1
        for (int block = warp; block < BLOCKS; block += WARPS)
            screen_block(shared.screened[block], shared.code[block], lane, shared.products[block]);
        __syncthreads();
        if (there) {
            float sum = 0;
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) sum += from_half(scale[block]) * shared.products[block][value];
            shared.pair[value] = sum;
        }
        __syncthreads();
        if (there && kind == 0) {
            const float active = activation(shared.pair[value]) * shared.pair[value + 5];
            const float size = a.weights[pair] * wide(a.norms[expert * INTER + channel]);
            const u32 bits = (u32)__float_as_int(size * active) & 0x7fffffffu;  // No -0, whose key would be the largest.
            const float score = __int_as_float(bits > INFINITE ? INFINITE : bits);
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
__device__ __noinline__ int narrow(Shared &shared, u32 &prefix, int shift, int width, int wanted, int &equal, int warp, int lane) {
    constexpr int EACH = NARROW / THREADS;
    for (int i = threadIdx.x; i < NARROW; i += THREADS) shared.bin[i] = 0;
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < CHANNELS; i += THREADS) {
        const u32 key = shared.key[i];
        if (key >> (shift + width) == prefix) atomicAdd(&shared.bin[key >> shift & ((1u << width) - 1)], 1);
    }
    __syncthreads();
    int count[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) count[i] = shared.bin[NARROW - 1 - (threadIdx.x * EACH + i)];
    find_bin(shared, count, wanted, NARROW - 1, warp, lane);
    prefix = prefix << width | (u32)shared.found[0];
    equal = shared.found[2];
    const int left = shared.found[1];
    __syncthreads();
    return left;
}

__device__ __forceinline__ u32 key_at(const Shared &shared, int channel) {
    return channel < CHANNELS ? shared.key[channel] : 0;
}

// Bits of the channels whose keys are above `least`, and of the first `left` of those that are equal, if not of all.
__device__ __noinline__ void mark(Shared &shared, u32 least, int left, bool tied, int warp, int lane) {
    if (tied) {
#pragma unroll 1
        for (int word = warp; word < OWN * WARPS; word += WARPS) {
            const u32 all = __ballot_sync(~0u, key_at(shared, word * 32 + lane) == least);
            if (lane == 0) shared.before[word] = __popc(all);
        }
        __syncthreads();
    }
    int earlier = 0, done = 0;  // Equals before this word's.
#pragma unroll 4
    for (int word = warp; word < OWN * WARPS; word += WARPS) {
        const u32 key = key_at(shared, word * 32 + lane);
        bool taken = key >= least;
        if (tied) {
            const u32 all = __ballot_sync(~0u, key == least);
            for (; done < word; ++done) earlier += shared.before[done];
            if (key == least) taken = earlier + __popc(all & ((1u << lane) - 1)) < left;
        }
        const u32 bits = __ballot_sync(~0u, taken);
        if (lane == 0) shared.bits[word] = bits;
    }
    __syncthreads();
}

// Bits of the channels above a bin, and of the first `left` in it, ties to the lower channel: each of these is compared
// with all others.
__device__ __forceinline__ void mark_bin(Shared &shared, u32 bin, int left, int warp, int lane) {
#pragma unroll 4
    for (int word = warp; word < OWN * WARPS; word += WARPS) {
        const int channel = word * 32 + lane;
        const u32 key = key_at(shared, channel), bits = __ballot_sync(~0u, key >> FINE > bin);
        if (lane == 0) shared.bits[word] = bits;
        if (key >> FINE == bin) shared.rival[atomicAdd(&shared.rivals, 1)] = (u64)key << 16 | (u32)(65535 - channel);
    }
    __syncthreads();
    const int number = shared.rivals;
#pragma unroll 1
    for (int i = threadIdx.x; i < number; i += THREADS) {
        const u64 own = shared.rival[i];
        int better = 0;
#pragma unroll 8
        for (int other = 0; other < number; ++other) better += shared.rival[other] > own;
        const int channel = 65535 - (int)(own & 65535);
        if (better < left) atomicOr(&shared.bits[channel / 32], 1u << channel % 32);
    }
    __syncthreads();
}

// The `wanted` channels of the largest scores, ties to the lower: bits, and how many come before each 32.
__device__ __forceinline__ void choose(const Arguments &a, Shared &shared, int token, int warp, int lane) {
    constexpr int BIN_EACH = BINS / THREADS;
    int count[BIN_EACH];
    const uint4 *bins = (const uint4 *)(a.bins + token * BINS) + (THREADS - 1 - threadIdx.x) * (BIN_EACH / 4);
#pragma unroll
    for (int i = 0; i < BIN_EACH / 4; ++i) {
        const uint4 four = __ldcg(bins + BIN_EACH / 4 - 1 - i);
        count[4 * i] = four.w, count[4 * i + 1] = four.z, count[4 * i + 2] = four.y, count[4 * i + 3] = four.x;
    }
    const float *scores = a.scores + (long long)token * CHANNELS;
#pragma unroll 12
    for (int i = threadIdx.x; i < CHANNELS; i += THREADS) shared.key[i] = key_of(__ldcg(scores + i));
    const u32 live = __ballot_sync(~0u, lane < COLUMNS && a.ids[(long long)token * COLUMNS + (lane < COLUMNS ? lane : 0)] >= 0);
    const int experts = __popc(live), wanted = a.kept_of[experts];
    if (threadIdx.x == 0) shared.rivals = 0;
    if (wanted > 0 && wanted < experts * INTER) {
        find_bin(shared, count, wanted, BINS - 1, warp, lane);
        u32 bin = shared.found[0];
        int left = shared.found[1], equal = shared.found[2];
        if (equal <= RIVALS) {
            mark_bin(shared, bin, left, warp, lane);
        } else {
            __syncthreads();
            left = narrow(shared, bin, 9, 10, left, equal, warp, lane);
            left = narrow(shared, bin, 0, 9, left, equal, warp, lane);
            mark(shared, bin, left, equal != left, warp, lane);
        }
    } else {
        __syncthreads();
        mark(shared, wanted > 0 ? 1 : ~0u, 0, false, warp, lane);
    }
    constexpr int ALL = OWN * WARPS, EACH = (ALL + THREADS - 1) / THREADS;
    int own = 0;
    for (int i = 0; i < EACH; ++i)
        if (threadIdx.x * EACH + i < ALL) own += __popc(shared.bits[threadIdx.x * EACH + i]);
    int before = sum_upto(shared, own, warp, lane) - own;
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

// Sums of w b p over a part of the channels that are skipped. Eight lanes a channel, four numbers each.
__device__ __forceinline__ void restore(const Arguments &a, Shared &shared, int token, int part, int parts, int warp, int lane) {
    const long long *ids = a.ids + (long long)token * COLUMNS;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int word = part * WARPS + warp; word < WORDS; word += parts * WARPS) {
        const u32 bits = shared.bits[word];
#pragma unroll 4
        for (int which = lane / 8; which < 32; which += 4) {
            const int channel = word * 32 + which;
            if (channel >= CHANNELS || bits >> which & 1) continue;
            const int slot = channel / INTER;
            const long long expert = ids[slot];
            if (expert < 0) continue;
            const float amount = a.weights[token * COLUMNS + slot] * __ldcg(a.estimates + (long long)token * CHANNELS + channel);
            const uint2 b = *(const uint2 *)(a.coefficients + (expert * INTER + channel % INTER) * 32 + lane % 8 * 4);
            sum.x += amount * low(b.x), sum.y += amount * high(b.x);
            sum.z += amount * low(b.y), sum.w += amount * high(b.y);
        }
    }
#pragma unroll
    for (int far = 8; far < 32; far *= 2) {
        sum.x += __shfl_xor_sync(~0u, sum.x, far), sum.y += __shfl_xor_sync(~0u, sum.y, far);
        sum.z += __shfl_xor_sync(~0u, sum.z, far), sum.w += __shfl_xor_sync(~0u, sum.w, far);
    }
    if (lane < 8) *(float4 *)(shared.mapped[warp] + lane * 4) = sum;
}

// A part of a token's channels, the `part`th of `parts`: kept ones in full, of the others b. parity: of the barriers.
__device__ __forceinline__ void gather(const Arguments &a, Shared &shared, int token, int part, int parts, int row, u32 &parity, int warp, int lane) {
    const long long *ids = a.ids + (long long)token * COLUMNS;
    const u64 policy = read_once();
    choose(a, shared, token, warp, lane);
    const int kept = shared.before[OWN * WARPS - 1] + __popc(shared.bits[OWN * WARPS - 1]);
    const int begin = kept * part / parts, number = kept * (part + 1) / parts - begin;
#pragma unroll 4
    for (int word = warp; word < OWN * WARPS; word += WARPS) {
        const u32 bits = shared.bits[word];
        const int place = shared.before[word] + __popc(bits & ((1u << lane) - 1)) - begin;
        if (bits >> lane & 1 && place >= 0 && place < number) shared.list[place] = word * 32 + lane;
    }
    __syncthreads();
    // The two halves of a channel's rows: gate and up, then down.
    auto fetch = [&](int i, int half) {
        if (i >= number || lane) return;
        const int slot = shared.list[i] / INTER, channel = shared.list[i] % INTER;
        const long long expert = ids[slot];
        arrive_expecting(shared.full[warp][half], (half ? 1 : 2) * HIDDEN * 2);
        if (half) {
            copy_in(shared.row[warp][2], a.down + (expert * INTER + channel) * HIDDEN, HIDDEN * 2, shared.full[warp][1], policy);
        } else {
            const u16 *from = a.gate_up + (expert * 2 * INTER + channel) * HIDDEN;
            copy_in(shared.row[warp][0], from, HIDDEN * 2, shared.full[warp][0], policy);
            copy_in(shared.row[warp][1], from + INTER * HIDDEN, HIDDEN * 2, shared.full[warp][0], policy);
        }
    };
    const bool gathering = warp < GATHERING;
    if (gathering) fetch(warp, 0), fetch(warp, 1);
    if (a.kept && part == 0)
        for (int word = threadIdx.x; word < WORDS; word += THREADS) a.kept[(long long)token * WORDS + word] = shared.bits[word];
#if RANK
    restore(a, shared, token, part, parts, warp, lane);
#endif
    if (gathering) {
        for (int at = lane * 4; at < HIDDEN; at += 128) *(float4 *)(shared.sums[warp] + at) = make_float4(0, 0, 0, 0);
        const uint4 *gate = (const uint4 *)shared.row[warp][0], *up = (const uint4 *)shared.row[warp][1];
        const uint2 *down = (const uint2 *)shared.row[warp][2];
#pragma unroll 1
        for (int i = warp; i < number; i += GATHERING) {
            float one = 0, other = 0;
            wait(shared.full[warp][0], parity);
#pragma unroll 2
            for (int at = lane; at < HIDDEN / 8; at += 32) {
                const uint4 x = shared.x[at];
                one = dot(gate[at], x, one), other = dot(up[at], x, other);
            }
#pragma unroll
            for (int far = 16; far; far /= 2) {
                one += __shfl_xor_sync(~0u, one, far);
                other += __shfl_xor_sync(~0u, other, far);
            }
            fetch(i + GATHERING, 0);  // Only now have all lanes' values come: a barrier alone can overtake them.
            const float amount = activation(one) * other * a.weights[token * COLUMNS + shared.list[i] / INTER];
            wait(shared.full[warp][1], parity);
#pragma unroll 2
            for (int at = lane; at < HIDDEN / 4; at += 32) {
                float4 &sum = *(float4 *)(shared.sums[warp] + at * 4);
                const uint2 d = down[at];
                sum.x += amount * low(d.x), sum.y += amount * high(d.x);
                sum.z += amount * low(d.y), sum.w += amount * high(d.y);
            }
            __syncwarp();
            fetch(i + GATHERING, 1);
            parity ^= 1;
        }
    }
    __syncthreads();
    for (int column = threadIdx.x; column < HIDDEN; column += THREADS) {
        float whole = 0;
#pragma unroll
        for (int other = 0; other < GATHERING; ++other) whole += shared.sums[other][column];
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
}

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

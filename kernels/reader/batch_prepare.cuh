// The first launch of batch.cu: one thread block per block of 128 coordinates, and one more that sorts pairs.

constexpr int PREPARING = 1024;  // Threads per block.

// Rotates a block of 128 coordinates of a token, 4 per lane. Called by one warp.
__device__ __forceinline__ float4 rotate(const Arguments &a, int token, int block, int lane) {
    const uint2 x = *(const uint2 *)(a.x + token * a.stride + block * 128 + lane * 4);
    const signed char *signs = a.signs + block * 128 + lane * 4;
    float v[4] = {low(x.x) * signs[0], high(x.x) * signs[1], low(x.y) * signs[2], high(x.y) * signs[3]};
    hadamard(v, lane);
    const float factor = 0.08838834764831845f;
    return make_float4(v[0] * factor, v[1] * factor, v[2] * factor, v[3] * factor);
}

// Writes a record: a token's values at the chosen coordinates of a block, in fp16, in the order in which `screen` reads
// them. The values are divided by a power of two, so that they are below 2. The record ends with this divisor times 2^24,
// in fp32.
__device__ void write_record(const Arguments &a, const float *values, const u8 *chosen, int token, int block, int lane) {
    float v[(COORDINATES + 31) / 32];
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < (COORDINATES + 31) / 32; ++i) {
        const int at = i * 32 + lane;
        v[i] = at < COORDINATES ? values[token * 128 + chosen[at]] : 0;
        const u32 size = (u32)__float_as_int(v[i]) & 0x7fffffffu;
        most = size > most ? size : most;
    }
    most = __reduce_max_sync(~0u, most);
    const bool finite = most < INFINITE;  // Otherwise the token's estimates are NaN.
    const int exponent_bits = most >> 23, exponent = exponent_bits < 1 ? 1 : exponent_bits > 230 ? 230 : exponent_bits;
    const float inverse_unit = __int_as_float((254 - exponent) << 23);
    u8 *to = a.record + ((long long)block * a.tokens + token) * RECORD;
#pragma unroll
    for (int i = 0; i < (COORDINATES + 31) / 32; ++i) {
        const int at = i * 32 + lane, inner = at % 16;
        if (at >= COORDINATES) break;
        const u16 half = finite ? to_half(v[i] * inverse_unit) : 0;
        ((u16 *)to)[at / 16 * 16 + inner % 8 / 2 * 4 + inner % 2 + inner / 8 * 2] = half;
    }
    if (lane == 0) *(float *)(to + COORDINATES * 2) = __int_as_float(finite ? (exponent + 24) << 23 : 0x7fc00000);
}

// Chooses the coordinates of a block of 128 with the largest sum of squares over tokens that have experts.
__device__ void choose_coordinates(const Arguments &a, u8 *memory, int block) {
    float *values = (float *)memory;              // [tokens, 128]
    u32 *sizes = (u32 *)(values + a.tokens * 128);  // [128]
    u32 *votes = sizes + 128;                     // [4]
    u8 *chosen = (u8 *)(votes + 4), *served = chosen + 128;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, own = threadIdx.x;
    for (int token = own; token < a.tokens; token += PREPARING) served[token] = false;
    __syncthreads();
    for (int i = own; i < a.tokens * a.columns; i += PREPARING)
        if (a.ids[i] >= 0) served[i / a.columns] = true;
#pragma unroll 2
    for (int token = warp; token < a.tokens; token += PREPARING / 32)
        ((float4 *)values)[token * 32 + lane] = rotate(a, token, block, lane);
    __syncthreads();
    if (own < 128) {
        float sum = 0;
#pragma unroll 8
        for (int token = 0; token < a.tokens; ++token) {
            const float value = values[token * 128 + own], square = value * value;
            if (served[token]) sum = sum + square;
        }
        sizes[own] = ordered(sum);
    }
    __syncthreads();
    bool taken = false;
    if (own < 128) {
        const u32 size = sizes[own];
        int before = 0;
#pragma unroll 8
        for (int other = 0; other < 128; ++other)
            before += sizes[other] > size || sizes[other] == size && other < own;
        taken = before < COORDINATES;
        const u32 all = __ballot_sync(~0u, taken);
        if (lane == 0) votes[warp] = all;
    }
    __syncthreads();
    if (taken) {
        int at = __popc(votes[warp] & ((1u << lane) - 1));
        for (int other = 0; other < warp; ++other) at += __popc(votes[other]);
        chosen[at] = own;
        a.coordinate[block * COORDINATES + at] = own;
    }
    __syncthreads();
    for (int token = warp; token < a.tokens; token += PREPARING / 32) write_record(a, values, chosen, token, block, lane);
}

// Sorts the pairs by expert, then token, and sets the counters of later launches to 0.
__device__ void sort_pairs(const Arguments &a, u8 *memory) {
    const int pairs = a.tokens * a.columns, groups = (a.tokens + 31) / 32;
    u32 *mask = (u32 *)memory;              // [experts, groups]: the tokens of each expert, as bits
    int *first = (int *)(mask + a.experts * groups);  // [experts]
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < a.experts * groups; i += PREPARING) mask[i] = 0;
    for (int i = threadIdx.x; i < BINS; i += PREPARING) a.bins[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < pairs; i += PREPARING) {
        const int expert = a.ids[i], token = i / a.columns;
        if (expert >= 0) atomicOr(mask + expert * groups + token / 32, 1u << token % 32);
    }
    __syncthreads();
    if (warp == 0) {
        int active = 0, sorted = 0;
        for (int base = 0; base < a.experts; base += 32) {
            const int expert = base + lane;
            int own = 0;
            for (int i = 0; i < groups && expert < a.experts; ++i) own += __popc(mask[expert * groups + i]);
            const u32 active_lanes = __ballot_sync(~0u, own > 0);
            int inclusive = own;
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2) {
                const int other = __shfl_up_sync(~0u, inclusive, distance);
                if (lane >= distance) inclusive += other;
            }
            if (own) {
                const int at = active + __popc(active_lanes & ((1u << lane) - 1));
                a.expert[at] = expert, a.start[at] = first[expert] = sorted + inclusive - own;
            }
            active += __popc(active_lanes), sorted += __shfl_sync(~0u, inclusive, 31);
        }
        if (lane == 0) {
            a.start[active] = sorted;
            *a.state = State{0, active, 0, 0, 0, 0};
        }
        for (int i = active + lane; i < a.experts; i += 32) a.expert[i] = -1;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < pairs; i += PREPARING) {
        const int expert = a.ids[i], token = i / a.columns;
        int at = -1;
        if (expert >= 0) {
            const u32 *own = mask + expert * groups;
            at = first[expert] + __popc(own[token / 32] & ((1u << token % 32) - 1));
            for (int j = 0; j < token / 32; ++j) at += __popc(own[j]);
            a.token[at] = token, a.weight[at] = a.weights[i];
        }
        a.pair_of[i] = at;
    }
}

extern "C" __global__ void __launch_bounds__(PREPARING) prepare(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 memory[];
    wait_for_previous_kernel();
    if (blockIdx.x == BLOCKS) sort_pairs(a, memory);
    else choose_coordinates(a, memory, blockIdx.x);
    allow_next_kernel();
}

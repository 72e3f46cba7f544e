// The last three launches of batch.cu: kept channels are read, skipped ones restored, and sums made.

// Kept channels of an active expert: `bits` [WORDS], and `listed` in ascending order -> how many. 256 threads.
__device__ int list_kept(const Arguments &a, int place, u32 *bits, u16 *listed) {
    const int lane = threadIdx.x % 32;
    const u64 least = a.state->least;
#pragma unroll
    for (int base = 0; base < PADDED; base += THREADS) {
        const int channel = base + threadIdx.x;
        if (base + (int)threadIdx.x / 32 * 32 >= PADDED) break;
        const bool kept = channel < INTER && rank_of(a.scores[place * INTER + channel], place, channel) >= least;
        const u32 all = __ballot_sync(~0u, kept);
        if (lane == 0) bits[channel / 32] = all;
    }
    __syncthreads();
    int number = 0;
    for (int base = 0; base < PADDED; base += THREADS) {
        const int channel = base + threadIdx.x;
        if (channel < PADDED && bits[channel / 32] >> lane & 1) {
            int at = __popc(bits[channel / 32] & ((1u << lane) - 1));
            for (int word = 0; word < channel / 32; ++word) at += __popc(bits[word]);
            listed[at] = channel;
        }
    }
    for (int word = 0; word < WORDS; ++word) number += __popc(bits[word]);
    __syncthreads();
    return number;
}

// Eight kept channels, gate in rows 0 to 7 of a product and up in rows 8 to 15, times all tokens of the expert. A warp
// has a share of the inner dimension, PASSES times SPAN blocks of 32, 8 neighbouring values a lane.
constexpr int OWN = over(HIDDEN / 32, WARPS), PASSES = over(OWN, 8), SPAN = over(OWN, PASSES);

__device__ void extend_channels(
    const Arguments &a, float4 *partial, const u16 *listed, int number, int first, int expert, int start, int pairs) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int tiles = over(pairs, 8);
    const bool there = first + g < number;
    const u16 *gate = a.gate_up + ((long long)expert * 2 * INTER + (there ? listed[first + g] : 0)) * HIDDEN + t * 8;
#pragma unroll 1
    for (int pass = 0; pass < PASSES; ++pass) {
        const int block = warp * OWN + pass * SPAN;
        const int blocks = min(min(SPAN, OWN - pass * SPAN), HIDDEN / 32 - block);
        uint4 low[SPAN], high[SPAN];
#pragma unroll
        for (int i = 0; i < SPAN; ++i) {
            low[i] = high[i] = make_uint4(0, 0, 0, 0);
            if (there && i < blocks) {
                low[i] = read_sixteen(gate + (block + i) * 32);
                high[i] = read_sixteen(gate + (long long)INTER * HIDDEN + (block + i) * 32);
            }
        }
        for (int tile = 0; tile < tiles; ++tile) {
            const int pair = tile * 8 + g;
            const u16 *x = a.x + (pair < pairs ? a.token[start + pair] : 0) * a.stride + t * 8;
            float4 sum = make_float4(0, 0, 0, 0), *to = partial + (warp * tiles + tile) * 32 + lane;
            if (pass) sum = *to;
            uint4 value[SPAN];
#pragma unroll
            for (int i = 0; i < SPAN; ++i) {
                value[i] = make_uint4(0, 0, 0, 0);
                if (pair < pairs && i < blocks) value[i] = *(const uint4 *)(x + (block + i) * 32);
            }
#pragma unroll
            for (int i = 0; i < SPAN; ++i) {
                multiply(sum, low[i].x, high[i].x, low[i].y, high[i].y, value[i].x, value[i].y);
                multiply(sum, low[i].z, high[i].z, low[i].w, high[i].w, value[i].z, value[i].w);
            }
            *to = sum;
        }
    }
    __syncthreads();
    for (int cell = threadIdx.x; cell < tiles * 32; cell += THREADS) {
        float4 whole = partial[cell];
#pragma unroll
        for (int other = 1; other < WARPS; ++other) {
            const float4 more = partial[other * tiles * 32 + cell];
            whole.x += more.x, whole.y += more.y, whole.z += more.z, whole.w += more.w;
        }
        const int pair = cell / 32 * 8 + lane % 4 * 2;
        u16 *to = a.activated + (long long)(start + pair) * PADDED + first + g;
        if (pair < pairs) to[0] = rounded(activation(whole.x) * whole.z * a.weight[start + pair]);
        if (pair + 1 < pairs) to[PADDED] = rounded(activation(whole.y) * whole.w * a.weight[start + pair + 1]);
    }
    __syncthreads();
}

// What an expert's skipped channels add by the map, for 8 tokens at a time: a lane has a coefficient, a warp every
// eighth word of channels.
__device__ void restore(const Arguments &a, float *sums, const u32 *bits, int expert, int start, int pairs) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int first = 0; first < pairs; first += 8) {
        float sum[8] = {};
#pragma unroll 1
        for (int word = warp; word < WORDS; word += WARPS) {
            const int channel = word * 32 + lane;
            const u32 skipped = ~bits[word];
            float amount[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const bool there = first + i < pairs && channel < INTER && (skipped >> lane & 1);
                amount[i] = there ? a.amounts[(long long)(start + first + i) * INTER + channel] : 0;
            }
            const u16 *from = a.coefficients + ((long long)expert * INTER + word * 32) * 32 + lane;
#pragma unroll 8
            for (int j = 0; j < 32; ++j) {
                const bool there = word * 32 + j < INTER && (skipped >> j & 1);
                const float own = there ? wide(from[j * 32]) : 0;
#pragma unroll
                for (int i = 0; i < 8; ++i) sum[i] += __shfl_sync(~0u, amount[i], j) * own;
            }
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[(warp * 8 + i) * 32 + lane] = sum[i];
        __syncthreads();
        float whole = 0;
#pragma unroll
        for (int other = 0; other < WARPS; ++other) whole += sums[other * 256 + threadIdx.x];
        if (first + warp < pairs) a.mapped[(start + first) * 32 + threadIdx.x] = whole;
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) extend(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 memory[];
    u32 *bits = (u32 *)memory;
    u16 *listed = (u16 *)(bits + WORDS);
    float4 *partial = (float4 *)(memory + over(WORDS * 4 + PADDED * 2, 16) * 16);
    const int roles = a.shares + (RANK > 0), place = blockIdx.x / roles, share = blockIdx.x % roles - (RANK > 0);
    let_next_begin();
    wait_for_last();
    if (place >= a.state->active) return;
    const int expert = a.expert[place], start = a.start[place], pairs = a.start[place + 1] - start;
    const int number = list_kept(a, place, bits, listed);
    if (share < 0) return restore(a, (float *)partial, bits, expert, start, pairs);
    if (share == 0) {
        for (int i = threadIdx.x; i < number; i += THREADS) a.channels[place * INTER + i] = listed[i];
        if (threadIdx.x == 0) a.number[place] = number;
        if (a.kept)
            for (int i = threadIdx.x; i < WORDS; i += THREADS) a.kept[expert * WORDS + i] = bits[i];
    }
    for (int first = share * 8; first < number; first += a.shares * 8)
        extend_channels(a, partial, listed, number, first, expert, start, pairs);
}

// A warp has 64 columns of an expert's kept down rows, 8 neighbouring ones a lane, and 16 tokens at a time.
constexpr int COLUMNS = 256, STRIPS = over(HIDDEN, COLUMNS), PROJECTING = COLUMNS / 64 * 32;

// Half `which` of two words, side by side.
__device__ __forceinline__ u32 beside(u32 one, u32 other, int which) {
    return which ? (one >> 16) | (other & 0xffff0000u) : (one & 0xffffu) | (other << 16);
}

extern "C" __global__ void __launch_bounds__(PROJECTING, 4) project(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 memory[];
    u16 *listed = (u16 *)memory;
    const int place = blockIdx.x / STRIPS, strip = blockIdx.x % STRIPS;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int column = strip * COLUMNS + threadIdx.x / 32 * 64;
    let_next_begin();
    wait_for_last();
    if (place >= a.state->active) return;
    const int expert = a.expert[place], start = a.start[place], pairs = a.start[place + 1] - start;
    const int number = a.number[place];
    for (int i = threadIdx.x; i < number; i += PROJECTING) listed[i] = a.channels[place * INTER + i];
    __syncthreads();
    if (column >= HIDDEN) return;
    const u16 *down = a.down + (long long)expert * INTER * HIDDEN + column + g * 8;
    for (int first = 0; first < pairs; first += 16) {
        float4 sum[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] = make_float4(0, 0, 0, 0);
        const bool one = first + g < pairs, two = first + 8 + g < pairs;
        const u16 *values = a.activated + (long long)(start + first + g) * PADDED + t * 8;
#pragma unroll 2
        for (int base = 0; base < number; base += 32) {
            uint4 row[8], low = make_uint4(0, 0, 0, 0), high = low;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                row[i] = make_uint4(0, 0, 0, 0);
                if (base + t * 8 + i < number) row[i] = read_sixteen(down + listed[base + t * 8 + i] * HIDDEN);
            }
            if (base + t * 8 < number) {  // `extend` wrote eights.
                if (one) low = *(const uint4 *)(values + base);
                if (two) high = *(const uint4 *)(values + 8 * PADDED + base);
            }
            const u32 words[8][4] = {
                {row[0].x, row[0].y, row[0].z, row[0].w}, {row[1].x, row[1].y, row[1].z, row[1].w},
                {row[2].x, row[2].y, row[2].z, row[2].w}, {row[3].x, row[3].y, row[3].z, row[3].w},
                {row[4].x, row[4].y, row[4].z, row[4].w}, {row[5].x, row[5].y, row[5].z, row[5].w},
                {row[6].x, row[6].y, row[6].z, row[6].w}, {row[7].x, row[7].y, row[7].z, row[7].w}};
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int word = i / 2, half = i % 2;
                multiply(sum[i], low.x, high.x, low.y, high.y, beside(words[0][word], words[1][word], half),
                         beside(words[2][word], words[3][word], half));
                multiply(sum[i], low.z, high.z, low.w, high.w, beside(words[4][word], words[5][word], half),
                         beside(words[6][word], words[7][word], half));
            }
        }
        float *to = a.parts + (long long)(start + first + g) * HIDDEN + column + t * 16;
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            if (one) {
                *(float4 *)(to + i) = make_float4(sum[i].x, sum[i + 1].x, sum[i + 2].x, sum[i + 3].x);
                *(float4 *)(to + 8 + i) = make_float4(sum[i].y, sum[i + 1].y, sum[i + 2].y, sum[i + 3].y);
            }
            if (two) {
                *(float4 *)(to + 8 * HIDDEN + i) = make_float4(sum[i].z, sum[i + 1].z, sum[i + 2].z, sum[i + 3].z);
                *(float4 *)(to + 8 * HIDDEN + 8 + i) = make_float4(sum[i].w, sum[i + 1].w, sum[i + 2].w, sum[i + 3].w);
            }
        }
    }
}

// A block has 128 columns of 8 tokens.
extern "C" __global__ void __launch_bounds__(THREADS) finish(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 memory[];
    float *mapped = (float *)memory;  // [8, 32]
    int *place = (int *)(mapped + 256);  // [8, columns]
    const int strip = blockIdx.x % BLOCKS, first = blockIdx.x / BLOCKS * 8;
    let_next_begin();
    wait_for_last();
    for (int i = threadIdx.x; i < 8 * a.columns; i += THREADS)
        place[i] = first + i / a.columns < a.tokens ? a.place[first * a.columns + i] : -1;
    __syncthreads();
    if (RANK > 0) {
        float sum = 0;
        for (int i = 0; i < a.columns; ++i) {
            const int pair = place[threadIdx.x / 32 * a.columns + i];
            if (pair >= 0) sum += a.mapped[pair * 32 + threadIdx.x % 32];
        }
        mapped[threadIdx.x] = sum;
    }
    __syncthreads();
    const int column = strip * 128 + threadIdx.x % 128;
    u32 basis[16];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        *(uint4 *)(basis + i * 4) = RANK > 0 ? ((const uint4 *)a.basis)[column * 4 + i] : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int own = threadIdx.x / 128 + 2 * i;
        if (first + own >= a.tokens) break;
        float sum = 0;
#pragma unroll 8
        for (int j = 0; j < a.columns; ++j) {
            const int pair = place[own * a.columns + j];
            if (pair >= 0) sum += a.parts[(long long)pair * HIDDEN + column];
        }
        if (RANK > 0) {
            float restored = 0;
#pragma unroll
            for (int j = 0; j < 16; ++j)
                restored += low(basis[j]) * mapped[own * 32 + 2 * j] + high(basis[j]) * mapped[own * 32 + 2 * j + 1];
            sum += restored;
        }
        a.output[(long long)(first + own) * HIDDEN + column] = rounded(sum);
    }
}

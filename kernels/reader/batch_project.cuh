// The last two launches of batch.cu: `project` multiplies kept channels with their down rows and skipped channels with the
// map. `finish` sums over the experts of each token.

// A warp of `project` computes 64 columns of the output, 8 neighbouring ones per lane, for 16 tokens of an expert at a
// time. In each step it multiplies 32 kept down rows, which it prefetches into stages of its own.
constexpr int COLUMNS = 256, STRIPS = over(HIDDEN, COLUMNS), PROJECTING = COLUMNS / 64 * 32, DEPTH = 4;

// Packs half `which` (0: lower, 1: upper) of two words into one word.
__device__ __forceinline__ u32 beside(u32 one, u32 other, int which) {
    return which ? (one >> 16) | (other & 0xffff0000u) : (one & 0xffffu) | (other << 16);
}

// Copies the listed rows 32 step to 32 step + 31 into a stage; rows beyond the list are zeros. A row has 128 bytes. In rows
// 8t to 8t + 7 its 16-byte parts are permuted by t, so that the four lanes of a group read from different banks.
__device__ __forceinline__ void fetch_step(const u16 *down, const u16 *listed, int number, u8 *stages, int item, int step) {
    const int lane = threadIdx.x % 32;
    u8 *to = stages + item % DEPTH * 4096;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int row = i * 4 + lane / 8, at = step * 32 + row;
        u8 *own = to + row * 128 + (lane % 8 ^ row / 8 * 2) * 16;
        if (at < number) copy_16(own, down + listed[at] * HIDDEN + lane % 8 * 8);
        else *(uint4 *)own = make_uint4(0, 0, 0, 0);
    }
}

__device__ void project_strip(const Arguments &a, u8 *memory, int active_index, int strip) {
    u8 *stages = memory + threadIdx.x / 32 * (DEPTH * 4096);
    u16 *listed = (u16 *)(memory + PROJECTING / 32 * DEPTH * 4096);
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int column = strip * COLUMNS + threadIdx.x / 32 * 64;
    const int expert = a.expert[active_index], number = a.number[active_index];
    const int start = a.start[active_index], pairs = a.start[active_index + 1] - start;
    for (int i = threadIdx.x; i < number; i += PROJECTING) listed[i] = a.channels[active_index * INTER + i];
    __syncthreads();
    if (column >= HIDDEN) return;
    const int steps = over(number, 32), items = steps * over(pairs, 16);
    const u16 *down = a.down + (long long)expert * INTER * HIDDEN + column;
    auto fetch = [&](int item) {
        if (item < items) fetch_step(down, listed, number, stages, item, item % steps);
        end_group();
    };
    for (int item = 0; item < DEPTH - 1; ++item) fetch(item);
    float4 sum[8];
    for (int first = 0, item = 0; first < pairs; first += 16) {
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] = make_float4(0, 0, 0, 0);
        const bool one = first + g < pairs, two = first + 8 + g < pairs;
        const u16 *values = a.activated + (long long)(start + first + g) * PADDED + t * 8;
#pragma unroll 1
        for (int step = 0; step < steps; ++step, ++item) {
            uint4 low = make_uint4(0, 0, 0, 0), high = low;
            if (step * 32 + t * 8 < number) {  // `extend` writes activations in multiples of eight.
                if (one) low = *(const uint4 *)(values + step * 32);
                if (two) high = *(const uint4 *)(values + 8 * PADDED + step * 32);
            }
            wait_for_copies<DEPTH - 2>();
            __syncwarp();
            fetch(item + DEPTH - 1);
            const u8 *stage = stages + item % DEPTH * 4096 + t * 1024 + (g ^ t * 2) * 16;
            u32 words[8][4];
#pragma unroll
            for (int i = 0; i < 8; ++i) *(uint4 *)words[i] = *(const uint4 *)(stage + i * 128);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int word = i / 2, half = i % 2;
                multiply(sum[i], low.x, high.x, low.y, high.y, beside(words[0][word], words[1][word], half),
                         beside(words[2][word], words[3][word], half));
                multiply(sum[i], low.z, high.z, low.w, high.w, beside(words[4][word], words[5][word], half),
                         beside(words[6][word], words[7][word], half));
            }
            __syncwarp();
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

// Writes `mapped`: w p b summed over an expert's skipped channels, for 8 tokens at a time. Each lane sums one of the 32
// coefficients; the warps take turns over words of 32 channels.
__device__ void restore(const Arguments &a, float *sums, int active_index) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int expert = a.expert[active_index], start = a.start[active_index], pairs = a.start[active_index + 1] - start;
    for (int first = 0; first < pairs; first += 8) {
        float sum[8] = {};
#pragma unroll 1
        for (int word = warp; word < WORDS; word += PROJECTING / 32) {
            const int channel = word * 32 + lane, own = min(32, INTER - word * 32);
            const u32 skipped = ~a.bits[active_index * WORDS + word];
            const u16 *from = a.coefficients + ((long long)expert * INTER + word * 32) * 32 + lane;
            float amount[8];
            u16 coefficient[32];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const bool used = first + i < pairs && channel < INTER && (skipped >> lane & 1);
                amount[i] = used ? a.amounts[(long long)(start + first + i) * INTER + channel] : 0;
            }
#pragma unroll
            for (int j = 0; j < 32; ++j) coefficient[j] = j < own && (skipped >> j & 1) ? from[j * 32] : 0;
#pragma unroll
            for (int j = 0; j < 32; ++j)
#pragma unroll
                for (int i = 0; i < 8; ++i) sum[i] += __shfl_sync(~0u, amount[i], j) * wide(coefficient[j]);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[(warp * 8 + i) * 32 + lane] = sum[i];
        __syncthreads();
        for (int cell = threadIdx.x; cell < min(8, pairs - first) * 32; cell += PROJECTING) {
            float total = 0;
            for (int other = 0; other < PROJECTING / 32; ++other) total += sums[other * 256 + cell];
            a.mapped[(start + first) * 32 + cell] = total;
        }
        __syncthreads();
    }
}

// For each active expert, the first block restores skipped channels (if RANK > 0); the others compute one strip each.
extern "C" __global__ void __launch_bounds__(PROJECTING, 3) project(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 memory[];
    constexpr int ROLES = STRIPS + (RANK > 0);
    const int active_index = blockIdx.x / ROLES, strip = blockIdx.x % ROLES - (RANK > 0);
    allow_next_kernel();
    wait_for_previous_kernel();
    if (a.expert[active_index] < 0) return;
    if (strip < 0) restore(a, (float *)memory, active_index);
    else project_strip(a, memory, active_index, strip);
}

// A block of `finish` computes 128 columns for 2 tokens.
constexpr int FINISHED = 2;

extern "C" __global__ void __launch_bounds__(THREADS) finish(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 memory[];
    float *mapped = (float *)memory;                // [FINISHED, 32]
    int *pair_of = (int *)(mapped + FINISHED * 32);  // [FINISHED, columns]
    const int strip = blockIdx.x % BLOCKS, first = blockIdx.x / BLOCKS * FINISHED;
    const int own = threadIdx.x / 128, column = strip * 128 + threadIdx.x % 128;
    allow_next_kernel();
    u32 basis[16];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        *(uint4 *)(basis + i * 4) = RANK > 0 ? ((const uint4 *)a.basis)[column * 4 + i] : make_uint4(0, 0, 0, 0);
    wait_for_previous_kernel();
    for (int i = threadIdx.x; i < FINISHED * a.columns; i += THREADS)
        pair_of[i] = first + i / a.columns < a.tokens ? a.pair_of[first * a.columns + i] : -1;
    __syncthreads();
    float sum = 0;
    for (int base = 0; base < a.columns; base += 8) {
        float part[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int pair = base + i < a.columns ? pair_of[own * a.columns + base + i] : -1;
            part[i] = pair < 0 ? 0 : a.parts[(long long)pair * HIDDEN + column];
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += part[i];
    }
    if (RANK > 0) {
        if (threadIdx.x < FINISHED * 32) {
            float total = 0;
            for (int i = 0; i < a.columns; ++i) {
                const int pair = pair_of[threadIdx.x / 32 * a.columns + i];
                if (pair >= 0) total += a.mapped[pair * 32 + threadIdx.x % 32];
            }
            mapped[threadIdx.x] = total;
        }
        __syncthreads();
        float restored = 0;
#pragma unroll
        for (int j = 0; j < 16; ++j)
            restored += low(basis[j]) * mapped[own * 32 + 2 * j] + high(basis[j]) * mapped[own * 32 + 2 * j + 1];
        sum += restored;
    }
    if (first + own < a.tokens) a.output[(long long)(first + own) * HIDDEN + column] = rounded(sum);
}

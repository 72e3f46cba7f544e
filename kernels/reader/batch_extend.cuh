// The fifth launch of batch.cu: multiplies a unit of eight kept channels with all tokens of their expert. In a tile of 16
// rows, gate is in rows 0 to 7 and up in rows 8 to 15. The warps divide the inner dimension: each has BLOCKS_PER_WARP
// blocks of 32 values and processes SPAN of them in each of PASSES. It prefetches its part of the rows into stages of its
// own, so that memory is always busy. A lane has 8 neighbouring values of a block.
constexpr int BLOCKS_PER_WARP = over(HIDDEN / 32, WARPS), PASSES = over(BLOCKS_PER_WARP, 8), SPAN = over(BLOCKS_PER_WARP, PASSES);
constexpr int LISTED = 64;  // Units whose rows are listed in shared memory at a time.
constexpr int EXTENDING = 16 * SPAN * 64;  // Bytes of one stage of one warp.

struct Extending {
    int unit[LISTED];
    int row[LISTED][8];  // The row of gate_up of each channel's gate; -1 beyond the kept channels.
};

// The position of a block within a row. Neighbouring blocks are swapped in odd rows, so that two rows use different banks.
__device__ __forceinline__ int swapped(int row, int block) { return SPAN % 2 ? block : block ^ (row & 1); }

__device__ __forceinline__ int blocks_of(int warp, int pass) {
    return min(min(SPAN, BLOCKS_PER_WARP - pass * SPAN), HIDDEN / 32 - warp * BLOCKS_PER_WARP - pass * SPAN);
}

// Copies an item of the listed units into its stage. An item is one pass of one unit.
__device__ __forceinline__ void fetch_rows(const Arguments &a, const Extending &shared, u8 *stages, int item, int items) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pass = item % PASSES;
    if (item < items && lane < blocks_of(warp, pass) * 4) {
        u8 *to = stages + item % a.stages * EXTENDING + lane % 4 * 16;
        const u16 *from = a.gate_up + (warp * BLOCKS_PER_WARP + pass * SPAN) * 32 + lane * 8;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int row = shared.row[item / PASSES][i];
            if (row < 0) continue;
            const u16 *gate = from + (long long)row * HIDDEN;
            copy_16(to + (i * SPAN + swapped(i, lane / 4)) * 64, gate);
            copy_16(to + ((i + 8) * SPAN + swapped(i, lane / 4)) * 64, gate + (long long)INTER * HIDDEN);
        }
    }
    end_group();
}

// Waits until all items of this warp are copied, except the last `stages - 2`.
__device__ __forceinline__ void wait_for_rows(int stages) {
    if (stages == 2) wait_for_copies<0>();
    else if (stages == 3) wait_for_copies<1>();
    else wait_for_copies<2>();
    __syncwarp();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) extend(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 memory[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u8 *stages = memory + warp * a.stages * EXTENDING;
    Extending &shared = *(Extending *)(memory + WARPS * a.stages * EXTENDING);
    float4 *partial = (float4 *)(&shared + 1);
    allow_next_kernel();
    wait_for_previous_kernel();
    const int all = a.state->units;
    const int begin = (int)((long long)all * blockIdx.x / gridDim.x), end = (int)((long long)all * (blockIdx.x + 1) / gridDim.x);
    for (int base = begin; base < end; base += LISTED) {
        const int units = min(LISTED, end - base), items = units * PASSES;
        for (int i = threadIdx.x; i < units * 8; i += THREADS) {
            const u32 unit = a.unit[base + i / 8];
            const int active_index = unit >> 16, at = (unit & 0xffff) * 8 + i % 8;
            const int channel = at < a.number[active_index] ? a.channels[active_index * INTER + at] : -1;
            shared.row[i / 8][i % 8] = channel < 0 ? -1 : a.expert[active_index] * 2 * INTER + channel;
            if (i % 8 == 0) shared.unit[i / 8] = unit;
        }
        __syncthreads();
        for (int item = 0; item < a.stages - 1; ++item) fetch_rows(a, shared, stages, item, items);
        int last = -1, start = 0, pairs = 0;
        uint4 value[SPAN];
#pragma unroll 1
        for (int item = 0; item < items; ++item) {
            const int pass = item % PASSES, blocks = blocks_of(warp, pass);
            const u32 unit = shared.unit[item / PASSES];
            const int active_index = unit >> 16;
            const bool next_expert = active_index != last;
            if (next_expert) last = active_index, start = a.start[active_index], pairs = a.start[active_index + 1] - start;
            const int tiles = over(pairs, 8);
            wait_for_rows(a.stages);
            fetch_rows(a, shared, stages, item + a.stages - 1, items);
            const u8 *stage = stages + item % a.stages * EXTENDING + t * 16;
#pragma unroll 1
            for (int tile = 0; tile < tiles; ++tile) {
                const int pair = tile * 8 + g;
                if (next_expert || tiles > 1 || PASSES > 1) {
                    const int token = pair < pairs ? a.token[start + pair] : 0;
                    const u16 *x = a.x + token * a.stride + (warp * BLOCKS_PER_WARP + pass * SPAN) * 32 + t * 8;
#pragma unroll
                    for (int i = 0; i < SPAN; ++i) {
                        value[i] = make_uint4(0, 0, 0, 0);
                        if (pair < pairs && i < blocks) value[i] = *(const uint4 *)(x + i * 32);
                    }
                }
                float4 sum = make_float4(0, 0, 0, 0), *to = partial + (warp * tiles + tile) * 32 + lane;
                if (pass) sum = *to;
#pragma unroll
                for (int i = 0; i < SPAN; ++i) {
                    if (i >= blocks) break;
                    const uint4 low = *(const uint4 *)(stage + (g * SPAN + swapped(g, i)) * 64);
                    const uint4 high = *(const uint4 *)(stage + ((g + 8) * SPAN + swapped(g, i)) * 64);
                    multiply(sum, low.x, high.x, low.y, high.y, value[i].x, value[i].y);
                    multiply(sum, low.z, high.z, low.w, high.w, value[i].z, value[i].w);
                }
                *to = sum;
            }
            __syncwarp();
            if (pass != PASSES - 1) continue;
            __syncthreads();
            const bool kept = shared.row[item / PASSES][g] >= 0;
            for (int cell = threadIdx.x; cell < tiles * 32; cell += THREADS) {
                float4 total = partial[cell];
#pragma unroll
                for (int other = 1; other < WARPS; ++other) {
                    const float4 more = partial[other * tiles * 32 + cell];
                    total.x += more.x, total.y += more.y, total.z += more.z, total.w += more.w;
                }
                const int pair = cell / 32 * 8 + t * 2;
                u16 *to = a.activated + (long long)(start + pair) * PADDED + (unit & 0xffff) * 8 + g;
                for (int i = 0; i < 2 && pair + i < pairs; ++i) {
                    const float gate = i ? total.y : total.x, up = i ? total.w : total.z;
                    to[i * PADDED] = kept ? rounded(activation(gate) * up * a.weight[start + pair + i]) : 0;
                }
            }
            __syncthreads();
        }
    }
}

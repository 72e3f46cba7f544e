// The second launch of batch.cu. A thread block processes 32 words of an expert's code rows (gate and up of 160 channels)
// for all tokens of the expert, TOKENS at a time. A warp processes 8 of these words. Blocks are small, so that all blocks
// run at the same time.
//
// How five ternary codes are multiplied without unpacking them: a byte holds the sum over j of code_j 3^j. Let S_i be this
// sum divided by 3^i and rounded to an integer; it equals the sum over j >= i of code_j 3^(j - i). So code_i is
// S_i - 3 S_(i + 1). The tensor cores multiply every S_i with x, and the subtraction is done once, on the products.

constexpr int SHARES = (ROW + 63) / 64, SHARE = 160;  // Blocks per expert (shares); channels per share.
constexpr int SCREENING = 128;                        // Threads per block.
constexpr int PITCH = 80;                             // Bytes between rows: rows 0, 2, 4 and 6 use different banks.
constexpr int AHEAD = 4;                              // Stages in shared memory.

template <int TOKENS> struct Stage {
    u8 code[COORDINATES][PITCH];
    u16 scale[2][SHARE];
    u8 record[TOKENS][RECORD];
};

template <int TOKENS> struct Screening {
    Stage<TOKENS> stage[AHEAD];
    int offset[BLOCKS * COORDINATES];  // Byte offset of a chosen coordinate's row in an expert's codes.
};

// The part of each stage that a thread copies: 16 bytes of its rows of codes, of scales, and of a token's record.
template <int TOKENS> struct Copier {
    const u8 *codes, *record, *scales;
    long long step;

    __device__ __forceinline__ Copier(const Arguments &a, int expert, int share, int first, int tokens) {
        const int part = threadIdx.x % 4, at = threadIdx.x / 8, row = threadIdx.x / (SHARE / 8);
        // The last share of an expert may have only half of the words.
        codes = part * 16 < ROW - share * 64 ? a.codes + (long long)expert * HIDDEN * ROW + share * 64 + part * 16 : nullptr;
        record = at < tokens ? a.record + (long long)a.token[first + at] * RECORD + threadIdx.x % 8 * 16 : nullptr;
        step = (long long)a.tokens * RECORD;
        const int channel = share * SHARE + threadIdx.x % (SHARE / 8) * 8;
        scales = row < 2 && channel < INTER
            ? (const u8 *)(a.scales + ((long long)expert * BLOCKS * 2 + row) * INTER + channel) : nullptr;
    }

    // Copies the next block of coordinates into a stage.
    __device__ __forceinline__ void fetch(Screening<TOKENS> &shared, int turn) {
        Stage<TOKENS> &to = shared.stage[turn % AHEAD];
        if (turn < BLOCKS) {
            const int *offset = shared.offset + turn * COORDINATES;
#pragma unroll
            for (int i = 0; i < over(COORDINATES, 32); ++i) {
                const int row = threadIdx.x / 4 + i * 32;
                if (row < COORDINATES && codes) copy_16(to.code[row] + threadIdx.x % 4 * 16, codes + offset[row]);
            }
            if (record) {
                u8 *own = to.record[threadIdx.x / 8] + threadIdx.x % 8 * 16;
#pragma unroll
                for (int i = 0; i < over(RECORD, 128); ++i)
                    if (i * 128 + threadIdx.x % 8 * 16 < RECORD) copy_16(own + i * 128, record + i * 128);
                record += step;
            }
            if (scales) copy_16(to.scale[0] + threadIdx.x * 8, scales), scales += 4 * INTER;
        }
        end_group();
    }
};

// Multiplies the codes of a block of coordinates with x and adds to sum [tile][code]: gate (.x, .y) and up (.z, .w) for
// tokens 2t and 2t + 1 of a tile.
template <int TILES>
__device__ __forceinline__ void screen_block(const Stage<TILES * 8> &from, int group, int lane, float4 (&sum)[TILES][5]) {
    const int g = lane / 4, t = lane % 4;
    float4 above[TILES][5];
    float unit[TILES][2];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        for (int one = 0; one < 2; ++one) unit[tile][one] = *(const float *)(from.record[tile * 8 + t * 2 + one] + COORDINATES * 2);
#pragma unroll
        for (int i = 0; i < 5; ++i) above[tile][i] = make_float4(0, 0, 0, 0);
    }
    const u8 *code = from.code[t * 2] + (group * 8 + g) * 2;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        uint2 b[TILES];
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
            b[tile] = *(const uint2 *)(from.record[tile * 8 + g] + step * 32 + t * 8);
        const u8 *row = code + step * 16 * PITCH;
        const u32 near = *(const u16 *)row | (u32) * (const u16 *)(row + PITCH) << 16;
        const u32 far = *(const u16 *)(row + 8 * PITCH) | (u32) * (const u16 *)(row + 9 * PITCH) << 16;
        u32 gate0 = code_sums(__byte_perm(near, 0, 0x2200)), up0 = code_sums(__byte_perm(near, 0, 0x3311));
        u32 gate1 = code_sums(__byte_perm(far, 0, 0x2200)), up1 = code_sums(__byte_perm(far, 0, 0x3311));
#pragma unroll
        for (int i = 0; i < 5; ++i) {
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
                multiply_halves(above[tile][i], gate0, up0, gate1, up1, b[tile].x, b[tile].y);
            if (i < 4) gate0 = thirds(gate0), up0 = thirds(up0), gate1 = thirds(gate1), up1 = thirds(up1);
        }
    }
    const u16 *scale = from.scale[0] + (group * 8 + g) * 5;
#pragma unroll
    for (int i = 0; i < 5; ++i) {
        const float gate = from_half(scale[i]), up = from_half(scale[SHARE + i]);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            float4 own = above[tile][i];
            if (i < 4) {
                const float4 next = above[tile][i < 4 ? i + 1 : 4];
                own = make_float4(own.x - 3 * next.x, own.y - 3 * next.y, own.z - 3 * next.z, own.w - 3 * next.w);
            }
            sum[tile][i].x += own.x * (gate * unit[tile][0]), sum[tile][i].y += own.y * (gate * unit[tile][1]);
            sum[tile][i].z += own.z * (up * unit[tile][0]), sum[tile][i].w += own.w * (up * unit[tile][1]);
        }
    }
}

// Computes the estimates of up to TILES * 8 tokens, the sorted pairs from `first` on, and adds their scores to total.
template <int TILES>
__device__ __forceinline__ void screen_tokens(
    const Arguments &a, Screening<TILES * 8> &shared, int expert, int share, int first, int tokens, float (&total)[5]) {
    const int lane = threadIdx.x % 32, group = threadIdx.x / 32;
    const bool working = group * 16 < ROW - share * 64;
    float4 sum[TILES][5];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int i = 0; i < 5; ++i) sum[tile][i] = make_float4(0, 0, 0, 0);
    Copier<TILES * 8> copier(a, expert, share, first, tokens);
#pragma unroll 1
    for (int turn = 0; turn < AHEAD - 1; ++turn) copier.fetch(shared, turn);
#pragma unroll 1
    for (int turn = 0; turn < BLOCKS; ++turn) {
        wait_for_copies<AHEAD - 2>();
        __syncthreads();
        copier.fetch(shared, turn + AHEAD - 1);
        if (working) screen_block<TILES>(shared.stage[turn % AHEAD], group, lane, sum);
    }
    wait_for_copies<0>();
    __syncthreads();
    if (!working) return;
#pragma unroll
    for (int i = 0; i < 5; ++i) {
        const int channel = share * SHARE + (group * 8 + lane / 4) * 5 + i;
        if (channel >= INTER) break;
        const float norm = wide(a.norms[expert * INTER + channel]);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const float4 own = sum[tile][i];
            const float gate[2] = {own.x, own.y}, up[2] = {own.z, own.w};
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int pair = tile * 8 + lane % 4 * 2 + j;
                if (pair >= tokens) continue;
                const float weight = a.weight[first + pair], product = activation(gate[j]) * up[j];
                a.amounts[(long long)(first + pair) * INTER + channel] = weight * product;
                total[i] += fabsf(weight * norm * product);
            }
        }
    }
}

template <int TILES> __device__ __forceinline__ void screen_share(const Arguments &a, u8 *memory) {
    Screening<TILES * 8> &shared = *(Screening<TILES * 8> *)memory;
    const int active_index = blockIdx.x / SHARES, share = blockIdx.x % SHARES;
    wait_for_previous_kernel();
    const int expert = a.expert[active_index], start = a.start[active_index], pairs = a.start[active_index + 1] - start;
    if (expert < 0) return;
    for (int i = threadIdx.x; i < BLOCKS * COORDINATES; i += SCREENING)
        shared.offset[i] = (i / COORDINATES * 128 + a.coordinate[i]) * ROW;
    __syncthreads();
    float total[5] = {};
#pragma unroll 1
    for (int first = 0; first < pairs; first += TILES * 8)
        screen_tokens<TILES>(a, shared, expert, share, start + first, min(pairs - first, TILES * 8), total);
    allow_next_kernel();
#pragma unroll
    for (int i = 0; i < 5; ++i) {
        total[i] += __shfl_xor_sync(~0u, total[i], 1);
        total[i] += __shfl_xor_sync(~0u, total[i], 2);
        const int channel = share * SHARE + threadIdx.x / 4 * 5 + i;
        if (threadIdx.x % 4 == 0 && channel < INTER) {
            const u32 score = ordered(total[i]);
            a.scores[active_index * INTER + channel] = score;
            atomicAdd(a.bins + (score >> FINE), 1u);
        }
    }
}

// `screen`, for small batches, processes 8 tokens of an expert at a time, `screen_more` 16.
extern "C" __global__ void __launch_bounds__(SCREENING, 5) screen(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 memory[];
    screen_share<1>(a, memory);
}

extern "C" __global__ void __launch_bounds__(SCREENING, 4) screen_more(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 memory[];
    screen_share<2>(a, memory);
}

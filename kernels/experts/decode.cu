// The experts of a small batch, in one launch that reads the weights of every active expert once.
//
// Compiled for one shape: HIDDEN, INTER, TOKENS (the most tokens: 8, 16, 32 or 64), EXPERTS (the most experts, a multiple
// of 32), PAIRS (the most pairs of a token and one of its experts), STAGES and SHARED (bytes). There is one thread block
// per multiprocessor. All blocks run at the same time and wait for each other between the two halves.
//
// Every block sorts the pairs by expert, then token. The index of a pair in this order is its row of `activated`.
// First half: computes silu(gate) * up. A unit is 8 rows of gate and the same 8 rows of up. 70% of the units are assigned
// to blocks in advance; blocks fetch the others dynamically.
// Second half: computes the down projection. A block computes strips of 16 output columns for all active experts. It sums
// over experts in a fixed order of its own, without atomic additions, so every run gives the same bits.
// In each block, one warp copies weights into a ring of stages and the others compute. The copying warp goes on to the
// second half while the others still compute or wait in the first half, so that memory is always busy.
//
// Products are mma.m16n8k16 of 16 rows of weights and up to 8 tokens. The inner dimension is divided into blocks of 32,
// and the warps take turns over these blocks. A lane has 8 neighbouring values (16 bytes) of rows g and g + 8 of a block.
// The order of the inner values does not matter, because weights and tokens have the same order.

#include "hopper.cuh"

struct Arguments {
    const u16 *hidden;        // [tokens, stride] bf16
    const long long *ids;     // [tokens, columns]: experts, distinct in a row, -1 for none
    const float *weights;     // [tokens, columns]
    const u16 *gate_up;       // [rows, 2 INTER, HIDDEN] bf16
    const u16 *down;          // [rows, HIDDEN, INTER] bf16
    const long long *row_of;  // [experts]: the expert's row in gate_up and down; null if rows are in the order of experts
    u16 *activated;           // [PAIRS, INTER] bf16: the results of the first half
    u16 *output;              // [tokens, HIDDEN] bf16
    long long *counts;        // [experts]: number of pairs of each expert; or null
    u64 *arrived;             // [2], 0 at first: blocks that ended the first half, over all launches; units fetched
    long long stride;
    int tokens, experts, columns;
};

constexpr int WARPS = 8, COMPUTING = 32 * WARPS, THREADS = COMPUTING + 32;
constexpr int LONGEST = 1024;  // The most inner values of a row in one stage. Longer rows are divided into chunks.
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }
__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
__host__ __device__ constexpr int span(int inner) { return smaller(inner, LONGEST); }
__host__ __device__ constexpr int chunks(int inner) { return (inner + LONGEST - 1) / LONGEST; }
// Bytes between rows in shared memory: an odd multiple of 64, so that 64 bytes of two consecutive rows use different banks.
__host__ __device__ constexpr int pitch(int inner) { return span(inner) * 2 + (span(inner) * 2 % 128 == 0 ? 64 : 0); }
__host__ __device__ constexpr int steps(int inner) { return (span(inner) / 32 + WARPS - 1) / WARPS; }  // Blocks of 32 per warp and row.

constexpr int TILES = TOKENS / 8;
constexpr int KEPT = smaller(TILES, 2);  // Tiles of 8 tokens whose values are prefetched into registers.
constexpr int UNITS = INTER / 8, STRIPS = HIDDEN / 16;
constexpr int STAGE = 16 * larger(pitch(HIDDEN), pitch(INTER));
constexpr int TURNS = TILES <= 2 ? 2 : 1;  // Buffers of partial sums in the first half.
constexpr int PARTIAL = TILES * 32;        // Number of float4 of a warp's partial sums.
constexpr int SUM_PITCH = 20;              // Floats between the sums (16 each) of two tokens in the second half.
constexpr int SCRATCH = larger(TURNS * WARPS * PARTIAL * 16, WARPS * TOKENS * SUM_PITCH * 4);
// Whether the values of prefetched tiles stay in registers for consecutive units of one expert.
constexpr bool RESIDENT = chunks(HIDDEN) * steps(HIDDEN) * KEPT * 4 <= 64;
constexpr int HELD = RESIDENT ? chunks(HIDDEN) : 1;
constexpr int AHEAD = TILES == 1 ? 4 : 3;  // For how many stages of the second half token values are prefetched.

struct Routing {
    u64 mask[EXPERTS];     // The tokens of each expert, as bits.
    float weight[PAIRS];   // The weight of each sorted pair.
    u16 expert[EXPERTS];   // The active experts, ascending.
    u16 start[EXPERTS + 1];// The first sorted pair of each active expert.
    u16 active_index[EXPERTS];  // The index of an expert among the active ones.
    u8 token[PAIRS];
    int active;
};

struct Shared {
    u8 stage[STAGES][STAGE];
    u8 scratch[SCRATCH];
    u64 full[STAGES], empty[STAGES];
    int unit[STAGES];  // In the first half: the unit in the stage, -1 after the last one.
    Routing routing;
};

static_assert(sizeof(Shared) <= SHARED, "shared memory");
static_assert(HIDDEN % 32 == 0 && INTER % 32 == 0 && TOKENS % 8 == 0 && TOKENS <= 64 && EXPERTS % 32 == 0, "shape");

// A warp's position in the ring.
struct Cursor {
    int stage = 0;
    u32 parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// Copies 16 rows of `bytes` bytes into the next stage. Lane r < 16 copies row r, which begins at its `from`.
__device__ __forceinline__ void copy(
    Shared &shared, Cursor &at, const u16 *from, u32 bytes, int pitch, int lane, u64 policy, int unit) {
    wait(shared.empty[at.stage], at.parity ^ 1);
    if (lane == 0) {
        shared.unit[at.stage] = unit;
        arrive_expecting(shared.full[at.stage], 16 * bytes);
    }
    __syncwarp();
    if (lane < 16) copy_in(shared.stage[at.stage] + lane * pitch, from, bytes, shared.full[at.stage], policy);
    at.next();
}

__device__ __forceinline__ long long row_of(const Arguments &a, int expert) {
    return a.row_of ? a.row_of[expert] : expert;
}

// The number of units assigned to each block in advance. The others are fetched dynamically, because multiprocessors differ
// in memory bandwidth.
__device__ __forceinline__ int own_units(int units) { return units * 7 / 10 / gridDim.x; }

// The i-th active expert in this block's order. Blocks start at different experts, so that they read different weights at
// the same time.
__device__ __forceinline__ int in_block_order(int i, int active) {
    return (i + (int)(blockIdx.x * active / gridDim.x)) % active;
}

__device__ void produce(const Arguments &a, Shared &shared, int lane) {
    const u64 policy = read_once();
    const Routing &routing = shared.routing;
    Cursor at;
    const int units = routing.active * UNITS, own = own_units(units), num_assigned = own * gridDim.x;
    const int row = lane < 8 ? lane : INTER + lane - 8;
    for (int i = 0;; ++i) {
        int unit = blockIdx.x * own + i;
        if (i >= own) {
            // Waits for a free stage before it fetches a unit, so that slow blocks fetch fewer units.
            wait(shared.empty[at.stage], at.parity ^ 1);
            u64 number = 0;
            if (lane == 0) number = atomicAdd(a.arrived + 1, 1ull);
            unit = num_assigned + (int)__shfl_sync(~0u, number, 0);
            if (unit >= units) break;
        }
        const int expert = routing.expert[unit / UNITS];
        const u16 *from = a.gate_up + (row_of(a, expert) * 2 * INTER + unit % UNITS * 8 + row) * HIDDEN;
        for (int first = 0; first < HIDDEN; first += LONGEST)
            copy(shared, at, from + first, smaller(LONGEST, HIDDEN - first) * 2, pitch(HIDDEN), lane, policy, unit);
    }
    if (lane == 0) shared.unit[at.stage] = -1, arrive(shared.full[at.stage]);
    at.next();
    for (int strip = blockIdx.x; strip < STRIPS; strip += gridDim.x)
        for (int i = 0; i < routing.active; ++i) {
            const int expert = routing.expert[in_block_order(i, routing.active)];
            const u16 *from = a.down + (row_of(a, expert) * HIDDEN + strip * 16 + lane) * INTER;
            for (int first = 0; first < INTER; first += LONGEST)
                copy(shared, at, from + first, smaller(LONGEST, INTER - first) * 2, pitch(INTER), lane, policy, 0);
        }
}

// Releases a warp's stage. Call it only after the values have been used: the arrival at the barrier could overtake a load
// in flight, and the copy engine would overwrite its data.
__device__ __forceinline__ void release(Shared &shared, Cursor &at, int lane) {
    __syncwarp();
    if (lane == 0) arrive(shared.empty[at.stage]);
    at.next();
}

// Adds the products of a block of 32 inner values: rows g (low) and g + 8 (high) of the weights, and token g.
__device__ __forceinline__ void multiply(float4 &sum, const uint4 &low, const uint4 &high, const uint4 &token) {
    multiply(sum, low.x, high.x, low.y, high.y, token.x, token.y);
    multiply(sum, low.z, high.z, low.w, high.w, token.z, token.w);
}

__device__ __forceinline__ float4 add(const float4 &a, const float4 &b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// Reads the warp's blocks of 32 inner values from a stage: blocks warp + WARPS * i of rows g (low) and g + 8 (high).
template <int STEPS>
__device__ __forceinline__ void read(const u8 *stage, int pitch, int blocks, int warp, int lane, uint4 (&low)[STEPS], uint4 (&high)[STEPS]) {
    const u8 *from = stage + (lane / 4) * pitch + lane % 4 * 16;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        const int block = warp + WARPS * i;
        if (block < blocks) {
            low[i] = *(const uint4 *)(from + block * 64);
            high[i] = *(const uint4 *)(from + 8 * pitch + block * 64);
        } else {
            low[i] = high[i] = make_uint4(0, 0, 0, 0);
        }
    }
}

// Reads the same blocks of a token's row; zeros if row is null. It bypasses L1, because other thread blocks may have
// written the row.
template <int STEPS>
__device__ __forceinline__ void fetch(const u16 *row, int blocks, int warp, uint4 (&values)[STEPS]) {
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        const int block = warp + WARPS * i;
        values[i] = row && block < blocks ? __ldcg((const uint4 *)(row + block * 32)) : make_uint4(0, 0, 0, 0);
    }
}

__device__ __forceinline__ int blocks_of(int inner, int chunk) { return smaller(LONGEST, inner - chunk * LONGEST) / 32; }

__device__ void first_half(const Arguments &a, Shared &shared, Cursor &at, int warp, int lane) {
    constexpr int STEPS = steps(HIDDEN), CHUNKS = chunks(HIDDEN);
    const Routing &routing = shared.routing;
    float4 *partial = (float4 *)shared.scratch;
    int active_index = -1, start = 0, pairs = 0, buffer = 0;
    uint4 held[HELD][KEPT][STEPS];
    auto row = [&](int tile) -> const u16 * {
        const int pair = tile * 8 + lane / 4;
        return pair < pairs ? a.hidden + routing.token[start + pair] * a.stride + lane % 4 * 8 : nullptr;
    };
    auto chunk_of = [&](int tile, int chunk, uint4 (&values)[STEPS]) {
        const u16 *from = row(tile);
        fetch(from ? from + chunk * LONGEST : nullptr, blocks_of(HIDDEN, chunk), warp, values);
    };
    while (true) {
        wait(shared.full[at.stage], at.parity);
        const int unit = shared.unit[at.stage];
        if (unit < 0) break;
        if (unit / UNITS != active_index) {
            active_index = unit / UNITS;
            start = routing.start[active_index], pairs = routing.start[active_index + 1] - start;
            if (RESIDENT)
#pragma unroll
                for (int chunk = 0; chunk < HELD; ++chunk)
#pragma unroll
                    for (int tile = 0; tile < KEPT; ++tile) chunk_of(tile, chunk, held[chunk][tile]);
        }
        float4 sum[TILES];
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) sum[tile] = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            if (!RESIDENT)
#pragma unroll
                for (int tile = 0; tile < KEPT; ++tile) chunk_of(tile, chunk, held[0][tile]);
            uint4 low[STEPS], high[STEPS];
            wait(shared.full[at.stage], at.parity);
            read(shared.stage[at.stage], pitch(HIDDEN), blocks_of(HIDDEN, chunk), warp, lane, low, high);
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                if (tile * 8 >= pairs) break;
                if (tile < KEPT) {
#pragma unroll
                    for (int i = 0; i < STEPS; ++i)
                        multiply(sum[tile], low[i], high[i], held[RESIDENT ? chunk : 0][tile < KEPT ? tile : 0][i]);
                } else {
                    uint4 values[STEPS];
                    chunk_of(tile, chunk, values);
#pragma unroll
                    for (int i = 0; i < STEPS; ++i) multiply(sum[tile], low[i], high[i], values[i]);
                }
            }
            release(shared, at, lane);
        }
        // Sums the partial sums of all warps. Row g of a unit is gate and row g + 8 is up of the same channel.
        float4 *mine = partial + (buffer * WARPS + warp) * PARTIAL + lane;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) mine[tile * 32] = sum[tile];
        sync_threads(COMPUTING);
        for (int cell = warp * 32 + lane; cell < (pairs + 7) / 8 * 32; cell += COMPUTING) {
            float4 total = partial[buffer * WARPS * PARTIAL + cell];
#pragma unroll
            for (int other_warp = 1; other_warp < WARPS; ++other_warp)
                total = add(total, partial[(buffer * WARPS + other_warp) * PARTIAL + cell]);
            const int pair = cell / 32 * 8 + lane % 4 * 2;
            u16 *to = a.activated + (long long)(start + pair) * INTER + unit % UNITS * 8 + lane / 4;
            if (pair < pairs)
                to[0] = rounded(total.x / (1 + __expf(-total.x)) * total.z * routing.weight[start + pair]);
            if (pair + 1 < pairs)
                to[INTER] = rounded(total.y / (1 + __expf(-total.y)) * total.w * routing.weight[start + pair + 1]);
        }
        if (TURNS == 1) sync_threads(COMPUTING);
        buffer = (buffer + 1) % TURNS;
    }
    release(shared, at, lane);
}

// The barrier between the halves: writes of all blocks before it are visible after it. Blocks without a strip do not wait.
__device__ void wait_for_all_blocks(const Arguments &a) {
    sync_threads(COMPUTING);
    if (threadIdx.x == 0) {
        __threadfence();
        const u64 before = atomicAdd(a.arrived, 1ull), goal = (before / gridDim.x + 1) * gridDim.x;
        if (before + 1 == goal) a.arrived[1] = 0;  // The last block resets the counter of fetched units for the next launch.
        if (blockIdx.x < STRIPS) {
            while (load_acquire(a.arrived) < goal) {}
        }
        __threadfence();
    }
    sync_threads(COMPUTING);
}

__device__ void second_half(const Arguments &a, Shared &shared, Cursor &at, int warp, int lane) {
    constexpr int STEPS = steps(INTER), CHUNKS = chunks(INTER);
    const Routing &routing = shared.routing;
    float *sums = (float *)shared.scratch, *mine = sums + warp * TOKENS * SUM_PITCH;
    const int items = routing.active * CHUNKS, g = lane / 4, t = lane % 4;
    uint4 ahead[AHEAD][KEPT][STEPS];
    auto chunk_of = [&](int item, int tile, uint4 (&values)[STEPS]) {
        const int active_index = in_block_order(item / CHUNKS, routing.active), chunk = item % CHUNKS;
        const int pair = routing.start[active_index] + tile * 8 + g;
        const u16 *from = a.activated + (long long)pair * INTER + chunk * LONGEST + t * 8;
        fetch(pair < routing.start[active_index + 1] ? from : nullptr, blocks_of(INTER, chunk), warp, values);
    };
    auto prefetch = [&](int item, uint4 (&values)[KEPT][STEPS]) {
        if (item < items)
#pragma unroll
            for (int tile = 0; tile < KEPT; ++tile) chunk_of(item, tile, values[tile]);
    };
    for (int strip = blockIdx.x; strip < STRIPS; strip += gridDim.x) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) prefetch(i, ahead[i]);
        for (int cell = lane; cell < TOKENS * SUM_PITCH; cell += 32) mine[cell] = 0;
        __syncwarp();
        for (int first = 0; first < items; first += AHEAD)
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                const int item = first + i;
                if (item >= items) break;
                const int active_index = in_block_order(item / CHUNKS, routing.active);
                const int start = routing.start[active_index], pairs = routing.start[active_index + 1] - start;
                uint4 low[STEPS], high[STEPS];
                wait(shared.full[at.stage], at.parity);
                read(shared.stage[at.stage], pitch(INTER), blocks_of(INTER, item % CHUNKS), warp, lane, low, high);
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
                    if (tile * 8 >= pairs) break;
                    float4 sum = make_float4(0, 0, 0, 0);
                    if (tile < KEPT) {
#pragma unroll
                        for (int j = 0; j < STEPS; ++j)
                            multiply(sum, low[j], high[j], ahead[i][tile < KEPT ? tile : 0][j]);
                    } else {
                        uint4 values[STEPS];
                        chunk_of(item, tile, values);
#pragma unroll
                        for (int j = 0; j < STEPS; ++j) multiply(sum, low[j], high[j], values[j]);
                    }
                    // No two lanes write the same cell, because they have different tokens or rows.
                    const int pair = tile * 8 + t * 2;
                    if (pair < pairs) {
                        float *to = mine + routing.token[start + pair] * SUM_PITCH + g;
                        to[0] += sum.x, to[8] += sum.z;
                    }
                    if (pair + 1 < pairs) {
                        float *to = mine + routing.token[start + pair + 1] * SUM_PITCH + g;
                        to[0] += sum.y, to[8] += sum.w;
                    }
                    __syncwarp();
                }
                release(shared, at, lane);
                prefetch(item + AHEAD, ahead[i]);
            }
        sync_threads(COMPUTING);
        for (int cell = warp * 32 + lane; cell < a.tokens * 16; cell += COMPUTING) {
            float total = 0;
#pragma unroll
            for (int other_warp = 0; other_warp < WARPS; ++other_warp)
                total += sums[(other_warp * TOKENS + cell / 16) * SUM_PITCH + cell % 16];
            a.output[(long long)(cell / 16) * HIDDEN + strip * 16 + cell % 16] = rounded(total);
        }
        sync_threads(COMPUTING);
    }
}

// Lists the active experts in ascending order, and the first sorted pair of each. Called by one warp.
__device__ void list_active(const Arguments &a, Routing &routing, int lane) {
    int active = 0, pairs = 0;
    for (int base = 0; base < a.experts; base += 32) {
        const int expert = base + lane;
        const u64 mask = routing.mask[expert];
        const int own = __popcll(mask);
        const u32 found = __ballot_sync(~0u, own > 0);
        int inclusive = own;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int lower = __shfl_up_sync(~0u, inclusive, distance);
            if (lane >= distance) inclusive += lower;
        }
        if (own) {
            const int active_index = active + __popc(found & ((1u << lane) - 1));
            routing.expert[active_index] = expert, routing.active_index[expert] = active_index, routing.start[active_index] = pairs + inclusive - own;
        }
        if (a.counts && blockIdx.x == 0 && expert < a.experts) a.counts[expert] = own;
        active += __popc(found), pairs += __shfl_sync(~0u, inclusive, 31);
    }
    if (lane == 0) routing.active = active, routing.start[active] = pairs;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) experts(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 memory[];
    Shared &shared = *(Shared *)memory;
    Routing &routing = shared.routing;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pairs = a.tokens * a.columns;
    for (int i = threadIdx.x; i < EXPERTS; i += THREADS) routing.mask[i] = 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            init_barrier(shared.full[i], 1);
            init_barrier(shared.empty[i], WARPS);
        }
        fence_barrier_init();
    }
    __syncthreads();
    for (int i = threadIdx.x; i < pairs; i += THREADS)
        if (a.ids[i] >= 0) atomicOr(&routing.mask[a.ids[i]], 1ull << (i / a.columns));
    __syncthreads();
    if (warp == 0) list_active(a, routing, lane);
    __syncthreads();
    if (warp == WARPS) return produce(a, shared, lane);
    for (int i = threadIdx.x; i < pairs; i += COMPUTING)
        if (a.ids[i] >= 0) {
            const int expert = a.ids[i], token = i / a.columns;
            const int at = routing.start[routing.active_index[expert]] + __popcll(routing.mask[expert] & ((1ull << token) - 1));
            routing.token[at] = token, routing.weight[at] = a.weights[i];
        }
    sync_threads(COMPUTING);
    Cursor at;
    first_half(a, shared, at, warp, lane);
    wait_for_all_blocks(a);
    if (blockIdx.x < STRIPS) second_half(a, shared, at, warp, lane);
}

// Routes a batch whose tokens are on several ranks, in two launches. `demand` computes integers from this rank's tokens,
// the caller sums them over ranks, and `answer` routes the tokens by the sums. epsim/policies/routing has the rules and
// gives the same expert ids and integers. For each `kind`, the table lists the integers and the experts that tokens may
// take:
//
// BASE     [1]: batch size                                    each token's best k0
// UNION    [steps + 1, experts + 1]: demand if all keep       the union of all tokens' bases
//          their choice, and under each step's k0; each
//          row ends in the batch size
// RANKS    the same and one more row: the experts' weights    the union, and what fits ranks with slack (ranks.cuh)
// POPULAR  [2, experts]: choices of rerouted tokens, and      the `number` most popular, and what others chose
// LEAST    of others                                          those with `number` choices, and what others chose
//
// A token's base is its best k0 experts. Compiled for EXPERTS (the most experts, a multiple of 32) and CLUSTER (blocks of
// `demand` per batch: 1, 2, 4 or 8). A warp processes one token at a time.

#include "cluster.cuh"
#include "token.cuh"
#include "ranks.cuh"

enum Kind { BASE, UNION, RANKS, POPULAR, LEAST };

// A weight of 1 as an integer, as in epsim/policies/routing/ranks.py.
constexpr double UNITS = 1 << 24;

struct Tally {
    u64 want[EXPERTS];
    u32 size, padding[3];
    u32 count[1][EXPERTS];  // The array has rows_of(a) rows.
};

__device__ __forceinline__ int rows_of(const Arguments &a) {
    return a.kind == BASE ? 0 : a.kind == POPULAR || a.kind == LEAST ? 2 : a.steps + 1;
}

__device__ __forceinline__ void count_own(const Token &token, u32 *count, int lane) {
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i)
        if (token.choice >> i & 1) atomicAdd(&count[lane + 32 * i], 1u);
}

// Counts the experts of the token's base, for the k0 of each step.
__device__ __forceinline__ void count_bases(const Arguments &a, Token &token, i64 row, Tally &s, int lane) {
    int most = 0;
    for (int i = 0; i < a.steps; ++i) most = a.k0[i] > most ? a.k0[i] : most;
    double share = 0;
    const float enough = a.p * (float)token.total;
    for (int i = 0; i < most; ++i) {
        u32 word;
        const int expert = best(token, token.left, lane, word);
        if (expert < 0) break;
        take_out(token.left, expert, lane);
        if (lane < a.steps && i < a.k0[lane]) atomicAdd(&s.count[lane + 1][expert], 1u);
        if (a.p < 1) {
            share += weigh(a, token, row, expert, word);
            if (!((float)share < enough)) break;
        }
    }
}

__device__ __forceinline__ void tally(const Arguments &a, i64 row, Tally &s, int lane) {
    Token token;
    const bool bases = a.kind == UNION || a.kind == RANKS;
    if (bases) load(a, row, lane, token);
    else load_choice(a, row, lane, token);
    if (lane == 0 && token.rerouted) atomicAdd(&s.size, 1u);
    if (a.kind == BASE) return;
    if (!bases) return count_own(token, s.count[!token.rerouted], lane);
    count_own(token, s.count[0], lane);
    if (!token.rerouted) {
        for (int i = 1; i <= a.steps; ++i) count_own(token, s.count[i], lane);
        return;
    }
    count_bases(a, token, row, s, lane);
    if (a.kind == RANKS && lane < a.top_k) {
        const int expert = (int)a.choice[row * a.top_k + lane];
        const double weight = a.choice_weights[row * a.top_k + lane];
        if (expert >= 0) atomicAdd(&s.want[expert], (u64)(i64)rint(weight * UNITS));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) CLUSTERED demand(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) u8 memory[];
    Tally &s = *(Tally *)memory;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32, block = blockIdx.x % CLUSTER;
    const i64 batch = blockIdx.x / CLUSTER, first = batch * a.tokens;
    const int rows = rows_of(a);
    wait_for_previous_kernel();
    allow_next_kernel();
    if (threadIdx.x == 0) s.size = 0;
    for (int i = threadIdx.x; i < EXPERTS; i += blockDim.x) s.want[i] = 0;
    for (int i = threadIdx.x; i < rows * EXPERTS; i += blockDim.x) s.count[0][i] = 0;
    __syncthreads();
    cluster_arrive();
    for (int at = block * warps + warp; at < a.tokens; at += CLUSTER * warps) tally(a, first + at, s, lane);
    __syncthreads();
    cluster_wait();
    if (block) {
        if (threadIdx.x == 0) add_into_block(s.size, 0, s.size);
        for (int i = threadIdx.x; i < EXPERTS; i += blockDim.x)
            if (s.want[i]) add_into_block(s.want[i], 0, s.want[i]);
        for (int i = threadIdx.x; i < rows * EXPERTS; i += blockDim.x)
            if (s.count[0][i]) add_into_block(s.count[0][i], 0, s.count[0][i]);
    }
    cluster_arrive();
    cluster_wait();
    if (block) return;
    const bool sized = a.kind <= RANKS;
    const int row_length = a.experts + sized, num_rows = rows + (a.kind == RANKS);
    if (a.kind == BASE) {
        if (threadIdx.x == 0) a.message[batch] = s.size;
        return;
    }
    i64 *message = a.message + batch * row_length * num_rows;
    for (int i = threadIdx.x; i < row_length * num_rows; i += blockDim.x) {
        const int row = i / row_length, expert = i % row_length;
        message[i] = expert == a.experts ? (i64)s.size : row < rows ? (i64)s.count[row][expert] : (i64)s.want[expert];
    }
}

struct Decision {
    u32 loaded[PER_LANE];
    Ranks ranks;
};

// Writes the experts that tokens may take to `loaded`. Returns k0, or 0 for the model's whole choice. All threads must call
// it.
__device__ __forceinline__ int decide(const Arguments &a, i64 batch, Decision &s) {
    const int lane = threadIdx.x % 32, row_length = a.experts + 1;
    const bool bases = a.kind == UNION || a.kind == RANKS;
    const i64 words = a.kind == BASE ? 1 : bases ? (i64)row_length * (a.steps + 1 + (a.kind == RANKS)) : 2 * a.experts;
    const i64 *summed = a.summed + batch * words;
    int k0 = 0, row_of_k0 = 0;
    if (!a.summed) return a.k0[0];
    if (a.kind == BASE || bases) {
        const i64 size = summed[bases ? a.experts : 0];
        for (int i = 0; i < a.steps; ++i)
            if (size >= a.size[i]) k0 = a.k0[i], row_of_k0 = i + 1;
        if (a.kind == BASE) return k0;
        summed += (i64)row_of_k0 * row_length;
    }
    bool enough = false;
    for (int expert = threadIdx.x; expert < EXPERTS; expert += blockDim.x) {
        const i64 number = expert < a.experts ? summed[expert] : 0;
        const u32 asked = __ballot_sync(~0u, number > 0);
        if (lane == 0) s.loaded[expert / 32] = asked;
        if (!bases) s.ranks.worth[expert] = number;
        enough |= number >= a.number;
    }
    enough = __syncthreads_count(enough);
    if (a.kind == RANKS) {
        const u8 *holds = a.holds + (a.held_each ? batch * a.experts * a.ranks : 0);
        fill_ranks(a, s.ranks, holds, summed + (i64)(a.steps + 1 - row_of_k0) * row_length, s.loaded);
    } else if (!bases) {
        for (int expert = threadIdx.x; expert < EXPERTS; expert += blockDim.x) {
            const i64 number = s.ranks.worth[expert];
            bool stays = number > 0;
            if (a.kind == POPULAR) stays = stays && order_of(s.ranks.worth, expert) < a.number;
            else if (enough) stays = number >= a.number;
            stays |= expert < a.experts && summed[a.experts + expert] > 0;
            const u32 left = __ballot_sync(~0u, stays);
            if (lane == 0) s.loaded[expert / 32] = left;
        }
    }
    __syncthreads();
    return k0;
}

extern "C" __global__ void __launch_bounds__(THREADS) answer(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) u8 memory[];
    Decision &s = *(Decision *)memory;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const i64 batch = blockIdx.x / a.blocks, first = batch * a.tokens;
    const int begin = blockIdx.x % a.blocks * warps + warp;
    wait_for_previous_kernel();
    allow_next_kernel();
    Token token;
    if (begin < a.tokens) load(a, first + begin, lane, token);
    const int k0 = decide(a, batch, s);
    for (int at = begin; at < a.tokens; at += a.blocks * warps) {
        if (at != begin) load(a, first + at, lane, token);
        const bool base = a.kind == BASE;
        const u32 allowed = !base ? part_of(s.loaded, lane) : k0 ? ~0u : token.choice;
        choose(a, token, first + at, k0, base && k0 ? k0 : a.most, allowed, lane);
    }
}

// Opportunistic expert activation (oea) of a batch in one launch: finds the best k0 experts of each token and their union,
// then the best experts of each token in the union, with new weights. epsim/policies/routing has the rule and gives the
// same expert ids.
//
// Compiled for EXPERTS (the most experts, a multiple of 32), CLUSTER (blocks per batch: 1, 2, 4 or 8) and ONE (whether a
// warp has at most one token). A warp processes one token at a time. The blocks of a batch form a cluster and write their
// parts of the union to each other's shared memory.

#include "cluster.cuh"
#include "token.cuh"

struct Shared {
    u32 part[PER_LANE], loaded[PER_LANE];
};

// Adds the experts that the token is guaranteed to the union: the best k0 or, if k0 is 0, the model's whole choice.
__device__ __forceinline__ void guarantee(const Arguments &a, Token &token, i64 row, int k0, u32 *loaded, int lane) {
    if (a.choice && (k0 == 0 || !token.rerouted)) {
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i)
            if (token.choice >> i & 1) atomicOr(&loaded[i], 1u << lane);
        return;
    }
    if (!token.rerouted) return;
    double share = 0;
    const int number = k0 ? k0 : a.top_k;
    const float enough = a.p * (float)token.total;
    for (int i = 0; i < number; ++i) {
        u32 word;
        const int expert = best(token, token.left, lane, word);
        if (expert < 0) break;
        take(token, expert, word, lane);
        if (lane == 0) atomicOr(&loaded[expert / 32], 1u << expert % 32);
        if (a.p < 1 && k0) {
            share += weigh(a, token, row, expert, word);
            if (!((float)share < enough)) break;
        }
    }
}

// The number of tokens of the batch that are rerouted; k0 depends on it. mine: whether the warp's token is one of them.
__device__ __forceinline__ int batch_size(const Arguments &a, i64 first, bool mine) {
    if (!a.choice && !a.selected) return a.tokens;
    if (ONE && CLUSTER == 1) return __syncthreads_count(mine && threadIdx.x % 32 == 0);
    const int row = threadIdx.x;
    bool rerouted = row < a.tokens && (!a.selected || a.selected[first + row]);
    if (rerouted && a.choice) {
        rerouted = false;
        for (int i = 0; i < a.top_k; ++i) rerouted |= a.choice[(first + row) * a.top_k + i] >= 0;
    }
    return __syncthreads_count(rerouted);
}

extern "C" __global__ void __launch_bounds__(THREADS) CLUSTERED oea(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) u8 memory[];
    Shared &shared = *(Shared *)memory;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x % CLUSTER;
    const i64 first = (i64)(blockIdx.x / CLUSTER) * a.tokens;
    const int begin = block * WARPS + warp;
    wait_for_previous_kernel();
    allow_next_kernel();
    if (threadIdx.x < PER_LANE) shared.part[threadIdx.x] = shared.loaded[threadIdx.x] = 0;
    Token token;
    if (ONE && begin < a.tokens) load(a, first + begin, lane, token);
    const int size = batch_size(a, first, ONE && begin < a.tokens && token.rerouted);
    int k0 = 0;
    for (int i = 0; i < a.steps; ++i)
        if (size >= a.size[i]) k0 = a.k0[i];
    __syncthreads();
    cluster_arrive();
    for (int at = begin; at < a.tokens; at += CLUSTER * WARPS) {
        if (!ONE) load(a, first + at, lane, token);
        guarantee(a, token, first + at, k0, shared.part, lane);
    }
    __syncthreads();
    if (CLUSTER > 1) {
        cluster_wait();
        if (threadIdx.x < CLUSTER * PER_LANE) or_into_block(shared.loaded[threadIdx.x % PER_LANE], threadIdx.x / PER_LANE, shared.part[threadIdx.x % PER_LANE]);
        cluster_arrive();
        cluster_wait();
    }
    const u32 *loaded = CLUSTER > 1 ? shared.loaded : shared.part;
    for (int at = begin; at < a.tokens; at += CLUSTER * WARPS) {
        if (!ONE) load(a, first + at, lane, token);
        choose(a, token, first + at, k0, a.most, part_of(loaded, lane), lane);
    }
    if (block == 0 && warp == 0) {
        const int number = __reduce_add_sync(~0u, lane < PER_LANE ? __popc(loaded[lane]) : 0);
        if (lane == 0) a.active[blockIdx.x / CLUSTER] = number;
    }
}

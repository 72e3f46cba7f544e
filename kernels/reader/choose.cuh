// The choice of reader.cu: a token's channels of the largest scores, found by each of its blocks alike.

// Channels are ordered by their keys, then the lower first: as one number, of which no two are alike.
__device__ __forceinline__ u64 order_of(u32 key, int channel) { return (u64)key << 16 | (u32)(65535 - channel); }
__device__ __forceinline__ u64 order_at(const Shared &shared, int channel) {
    return channel < CHANNELS ? order_of((u32)shared.score[channel], channel) : 0;
}

// A token's scores, once all of them have come: a thread has every THREADSth two.
__device__ __forceinline__ void await_scores(Shared &shared, const u64 *scores, u32 tag) {
    int late;
#pragma unroll 1
    do {
#pragma unroll 1
        for (int at = threadIdx.x * 2; at < SCORES; at += THREADS * 2) copy_16(shared.score + at, scores + at);
        copied();
        late = -1;
#pragma unroll 2
        for (int at = threadIdx.x * 2; at < SCORES; at += THREADS * 2) {
            const uint4 two = *(const uint4 *)(shared.score + at);
            if (two.y != tag) late = at;
            if (at + 1 < CHANNELS && two.w != tag) late = at + 1;
        }
        // One is waited for, so that those who still write are not disturbed.
        if (late >= 0) await_tag(scores + late, tag);
    } while (__any_sync(~0u, late >= 0));
}

// Counts of bins from the top down: where the `wanted`th is. -> its bin; wanted: how many of it are; equal: how many there are.
__device__ __forceinline__ int find_bin(Shared &shared, int &wanted, int &equal, int warp, int lane) {
    constexpr int EACH = BINS / THREADS;
    int count[EACH], total = 0;
    const int4 *bins = (const int4 *)shared.bin + (THREADS - 1 - threadIdx.x) * (EACH / 4);
#pragma unroll
    for (int i = 0; i < EACH / 4; ++i) {
        const int4 four = bins[EACH / 4 - 1 - i];
        count[4 * i] = four.w, count[4 * i + 1] = four.z, count[4 * i + 2] = four.y, count[4 * i + 3] = four.x;
        total += four.w + four.z + four.y + four.x;
    }
    int upto = total;
#pragma unroll
    for (int far = 1; far < 32; far *= 2) {
        const int other = __shfl_up_sync(~0u, upto, far);
        if (lane >= far) upto += other;
    }
    if (lane == 31) shared.across[warp] = upto;
    __syncthreads();
    int before = upto - total;
    for (int other = 0; other < warp; ++other) before += shared.across[other];
    if (before < wanted && wanted <= before + total) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            if (before < wanted && wanted <= before + count[i]) {
                shared.found[0] = BINS - 1 - (threadIdx.x * EACH + i);
                shared.found[1] = wanted - before, shared.found[2] = count[i];
            }
            before += count[i];
        }
    }
    __syncthreads();
    wanted = shared.found[1], equal = shared.found[2];
    return shared.found[0];
}

// The order of the last of the `wanted` first channels: 12 bits at a time, until few are left, which are compared. Bins are
// 0 at first.
__device__ __forceinline__ u64 least_of(Shared &shared, int wanted, int warp, int lane) {
    u64 prefix = 0;
    int shift = 47, equal = 0;
#pragma unroll 1
    while (true) {
        const int width = shift < BIN_BITS ? shift : BIN_BITS;
#pragma unroll 4
        for (int channel = threadIdx.x; channel < CHANNELS; channel += THREADS) {
            const u64 order = order_at(shared, channel);
            if (order >> shift == prefix) atomicAdd(&shared.bin[(u32)(order >> (shift - width)) & ((1u << width) - 1)], 1);
        }
        __syncthreads();
        prefix = prefix << width | (u32)find_bin(shared, wanted, equal, warp, lane);
        shift -= width;
        if (equal <= RIVALS) break;
        for (int i = threadIdx.x; i < BINS; i += THREADS) shared.bin[i] = 0;
        __syncthreads();
    }
    if (equal == wanted) return prefix << shift;
#pragma unroll 4
    for (int channel = threadIdx.x; channel < CHANNELS; channel += THREADS) {
        const u64 order = order_at(shared, channel);
        if (order >> shift == prefix) shared.rival[atomicAdd(&shared.rivals, 1)] = order;
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < equal; i += THREADS) {
        const u64 own = shared.rival[i];
        int better = 0;
#pragma unroll 8
        for (int other = 0; other < equal; ++other) better += shared.rival[other] > own;
        if (better == wanted - 1) shared.least = own;
    }
    __syncthreads();
    return shared.least;
}

// The channels that a token keeps: bits. Of them this block's `part`th of `parts` are listed, in an order that all of the
// token's blocks share; -> how many.
__device__ __forceinline__ int choose(const Arguments &a, Shared &shared, u32 tag, int token, int part, int parts, int warp, int lane) {
    for (int i = threadIdx.x; i < BINS / 4; i += THREADS) ((uint4 *)shared.bin)[i] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x == 0) shared.rivals = 0;
    const u32 live = __ballot_sync(~0u, lane < COLUMNS && a.ids[(long long)token * COLUMNS + (lane < COLUMNS ? lane : 0)] >= 0);
    const int experts = __popc(live), wanted = a.kept_of[experts];
    await_scores(shared, a.scores + (long long)token * SCORES, tag);
    __syncthreads();
    u64 least = wanted > 0 ? order_of(1, 65535) : ~0ull;
    if (wanted > 0 && wanted < experts * INTER) least = least_of(shared, wanted, warp, lane);
    int total = 0;
#pragma unroll 4
    for (int word = warp; word < WORDS; word += WARPS) {
        const u32 bits = __ballot_sync(~0u, order_at(shared, word * 32 + lane) >= least);
        total += __popc(bits);
        if (lane == 0) shared.bits[word] = bits;
    }
    if (lane == 0) shared.kept[warp] = total;
    before_copies();  // Rows come where scores, bins and rivals are.
    __syncthreads();
    int before = 0, kept = 0;
#pragma unroll
    for (int other = 0; other < WARPS; ++other) {
        if (other == warp) before = kept;
        kept += shared.kept[other];
    }
    const int begin = kept * part / parts, number = kept * (part + 1) / parts - begin;
    before -= begin;
#pragma unroll 4
    for (int word = warp; word < WORDS; word += WARPS) {
        const u32 bits = shared.bits[word];
        const int place = before + __popc(bits & ((1u << lane) - 1));
        if (bits >> lane & 1 && place >= 0 && place < number) shared.list[place] = word * 32 + lane;
        before += __popc(bits);
    }
    __syncthreads();
    return number;
}

// The choice of reader.cu: a token's channels of the largest scores, found by each of its blocks alike.

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

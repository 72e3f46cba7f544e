// `choose` of reader.cu: the channels of a token with the largest scores. All blocks of a token find the same channels.

// One number per channel that orders all channels of a token: by key; of equal keys, the lower channel is larger.
__device__ __forceinline__ u64 order_of(u32 key, int channel) { return (u64)key << 16 | (u32)(65535 - channel); }

// The keys of a thread. Of 64 consecutive channels of a warp, a thread has one in the lower and one in the upper half.
typedef u32 Keys[EACH][2];
__device__ __forceinline__ int channel_of(int i, int half, int warp, int lane) { return (i * WARPS + warp) * 64 + half * 32 + lane; }

// Waits for a thread's keys and reads them.
__device__ __forceinline__ void await_keys(const u64 *scores, u32 tag, Keys &key, int warp, int lane) {
    u32 missing = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        key[i][0] = key[i][1] = 0;
        if (channel_of(i, 0, warp, lane) < CHANNELS) missing |= 1u << i;
    }
    // Polls one key only, to keep the memory free for blocks that still write.
    const u64 *own = scores + score_at(channel_of(0, 0, warp, lane));
    if (missing) await_tag(own, tag);
#pragma unroll 1
    while (missing) {
        u64 two[EACH][2];
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (missing >> i & 1) get_two_tagged(own + i * THREADS * 2, two[i][0], two[i][1]);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const bool second = channel_of(i, 1, warp, lane) < CHANNELS;
            if (!(missing >> i & 1) || two[i][0] >> 32 != tag || (second && two[i][1] >> 32 != tag)) continue;
            key[i][0] = (u32)two[i][0], key[i][1] = second ? (u32)two[i][1] : 0;
            missing &= ~(1u << i);
        }
    }
}

// The sum of the values of the warps before this one.
__device__ __forceinline__ int sum_before(const int (&counts)[WARPS], int warp, int lane) {
    return __reduce_add_sync(~0u, lane < warp ? counts[lane] : 0);
}

// Finds the bin that holds the `wanted`-th largest item. Sets wanted to the number of items to take from this bin, and
// equal to the number of items in it.
__device__ __forceinline__ int find_bin(Shared &shared, int &wanted, int &equal, int warp, int lane) {
    constexpr int OWN = BINS / THREADS;
    int count[OWN], total = 0;
    const int4 *bins = (const int4 *)shared.bin + (THREADS - 1 - threadIdx.x) * (OWN / 4);
#pragma unroll
    for (int i = 0; i < OWN / 4; ++i) {
        const int4 four = bins[OWN / 4 - 1 - i];
        count[4 * i] = four.w, count[4 * i + 1] = four.z, count[4 * i + 2] = four.y, count[4 * i + 3] = four.x;
        total += four.w + four.z + four.y + four.x;
    }
    int upto = total;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(~0u, upto, distance);
        if (lane >= distance) upto += other;
    }
    if (lane == 31) shared.per_warp[warp] = upto;
    __syncthreads();
    int before = upto - total + sum_before(shared.per_warp, warp, lane);
    if (before < wanted && wanted <= before + total) {
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            if (before < wanted && wanted <= before + count[i]) {
                shared.found[0] = BINS - 1 - (threadIdx.x * OWN + i);
                shared.found[1] = wanted - before, shared.found[2] = count[i];
            }
            before += count[i];
        }
    }
    __syncthreads();
    wanted = shared.found[1], equal = shared.found[2];
    return shared.found[0];
}

// Sets bins and candidates to 0.
__device__ __forceinline__ void clear_bins(Shared &shared) {
    for (int i = threadIdx.x; i < BINS / 4; i += THREADS) ((uint4 *)shared.bin)[i] = make_uint4(0, 0, 0, 0);
    for (int i = threadIdx.x; i < MOST_CANDIDATES / 2; i += THREADS) ((uint4 *)shared.candidate)[i] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x == 0) shared.num_candidates = 0;
}

// The bin of a key: 64 bins for each of 64 powers of two. Keys outside this range are in the first or the last bin.
__device__ __forceinline__ int bin_of(u32 key) {
    const int bin = (int)(key >> 17) - LOWEST;
    return bin < 0 ? 0 : bin < BINS ? bin : BINS - 1;
}

// Returns order_of the `wanted`-th largest channel, the last one that is kept. Bins must be 0.
__device__ __forceinline__ u64 find_last_kept(Shared &shared, const Keys &key, int wanted, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < EACH * 2; ++i)
        if (key[i / 2][i % 2]) atomicAdd(&shared.bin[bin_of(key[i / 2][i % 2])], 1);
    __syncthreads();
    int within = wanted, equal;
    const int bin = find_bin(shared, within, equal, warp, lane);
    u64 from = bin ? (u64)(bin + LOWEST) << 33 : order_of(1, 65535), upto = bin < BINS - 1 ? (u64)(bin + 1 + LOWEST) << 33 : ~0ull;
    if (equal > MOST_CANDIDATES) {
        // Too many channels are in one bin: radix selection, 12 bits of order_of at a time, until few are left.
        u64 prefix = 0;
        int shift = 47;
        within = wanted;
#pragma unroll 1
        do {
            const int width = shift < BIN_BITS ? shift : BIN_BITS;
            clear_bins(shared);
            __syncthreads();
#pragma unroll
            for (int i = 0; i < EACH * 2; ++i) {
                const u64 order = order_of(key[i / 2][i % 2], channel_of(i / 2, i % 2, warp, lane));
                if (key[i / 2][i % 2] && order >> shift == prefix) atomicAdd(&shared.bin[(u32)(order >> (shift - width)) & ((1u << width) - 1)], 1);
            }
            __syncthreads();
            prefix = prefix << width | (u32)find_bin(shared, within, equal, warp, lane);
            shift -= width;
        } while (equal > MOST_CANDIDATES);
        from = prefix << shift, upto = (prefix + 1) << shift;
    }
    if (equal == within) return from;
    // Lists the candidates: channels between `from` and `upto`. Few warps have any.
    const u32 lowest = (u32)(from >> 16), highest = (u32)((upto - 1) >> 16);
    u32 near = 0;
#pragma unroll
    for (int i = 0; i < EACH * 2; ++i) near |= key[i / 2][i % 2] >= lowest && key[i / 2][i % 2] <= highest ? 1u << i : 0;
#pragma unroll 1
    while (near) {
        const int i = __ffs(near) - 1;
        near &= near - 1;
        u32 own = 0;
#pragma unroll
        for (int j = 0; j < EACH * 2; ++j)
            if (j == i) own = key[j / 2][j % 2];
        const u64 order = order_of(own, channel_of(i / 2, i % 2, warp, lane));
        if (order >= from && order < upto) shared.candidate[atomicAdd(&shared.num_candidates, 1)] = order;
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < equal; i += THREADS) {
        const u64 own = shared.candidate[i];
        int num_larger = 0;
#pragma unroll 1
        for (int other = 0; other < equal; other += 8)  // Entries after the last are 0.
#pragma unroll
            for (int j = 0; j < 8; ++j) num_larger += shared.candidate[other + j] > own;
        if (num_larger == within - 1) shared.last_kept = own;
    }
    __syncthreads();
    return shared.last_kept;
}

// Sets shared.bits of the channels that a token keeps. The kept channels are divided among the `parts` blocks of the token;
// lists those of this block (`part`), in the same order in all blocks, and returns their number. expert: the lane-th
// expert of the token, negative for none. Bins must be 0.
__device__ __forceinline__ int choose(const Arguments &a, Shared &shared, u32 tag, int token, int expert, int part, int parts, int warp, int lane) {
    const int experts = __popc(__ballot_sync(~0u, expert >= 0)), all = experts * INTER, given = a.kept_of[experts];
    const int wanted = given < all ? given : all, begin = wanted * part / parts, number = wanted * (part + 1) / parts - begin;
    Keys key;
    await_keys(a.scores + (long long)token * SCORES, tag, key, warp, lane);
    __syncwarp();
    u64 last_kept = wanted > 0 ? order_of(1, 65535) : ~0ull;
    if (wanted > 0 && wanted < all) last_kept = find_last_kept(shared, key, wanted, warp, lane);
    const u32 lowest = (u32)(last_kept >> 16);
    u32 word = 0;  // The lane-th word of the warp's kept bits.
#pragma unroll
    for (int i = 0; i < EACH * 2; ++i) {
        const u32 bits = __ballot_sync(~0u, key[i / 2][i % 2] >= lowest);
        if (lane == i) word = bits;
    }
    int before = 0, total = 0;
    // Counts the kept channels of this warp (total) and of the warps before it (before). Returns the number in all warps.
    auto count = [&]() {
        total = __reduce_add_sync(~0u, __popc(word));
        if (lane == 0) shared.kept[warp] = total;
        __syncthreads();
        before = sum_before(shared.kept, warp, lane) - begin;
        return __reduce_add_sync(~0u, lane < WARPS ? shared.kept[lane] : 0);
    };
    const int at = channel_of(lane / 2, lane % 2, warp, 0) / 32;
    const bool has = lane < EACH * 2 && at < WORDS;
    if (has) shared.bits[at] = word;
    fence_before_copies();  // Rows will be copied to the memory of bins and candidates.
    if (count() != wanted) {
        // Of the channels with the same key as the last kept one, only those up to it are kept.
        const int last = 65535 - (int)(last_kept & 65535);
#pragma unroll
        for (int i = 0; i < EACH * 2; ++i) {
            const u32 none = __ballot_sync(~0u, key[i / 2][i % 2] == lowest && channel_of(i / 2, i % 2, warp, lane) > last);
            if (lane == i) word &= ~none;
        }
        __syncthreads();
        if (has) shared.bits[at] = word;
        count();
    }
    if (before < number && before + total > 0) {
        int place = __popc(word);
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int other = __shfl_up_sync(~0u, place, distance);
            if (lane >= distance) place += other;
        }
        place += before - __popc(word);
        u32 listed = __ballot_sync(~0u, word && place < number && place + __popc(word) > 0);
#pragma unroll 1
        for (; listed; listed &= listed - 1) {
            const int i = __ffs(listed) - 1;
            const u32 bits = __shfl_sync(~0u, word, i);
            const int own = __shfl_sync(~0u, place, i) + __popc(bits & ((1u << lane) - 1));
            if (bits >> lane & 1 && own >= 0 && own < number) shared.list[own] = channel_of(i / 2, i % 2, warp, lane);
        }
    }
    __syncthreads();
    return number;
}

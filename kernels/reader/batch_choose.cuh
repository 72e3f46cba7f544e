// The third and fourth launches of batch.cu, with one thread block per active expert. In `choose`, a block lists the
// candidates: its expert's channels in the histogram bin of the last kept channel. The last block that arrives finds that
// channel. `enlist` lists the kept channels.

// Finds the group that holds the `wanted`-th item, counted from the last group. from_top(i): the number of items in the
// i-th group from the end, of 256. Returns group, counted in the same way, and before: the number of items in earlier
// groups. All 256 threads call it and get the result.
template <typename F>
__device__ __forceinline__ void find_group(F &&from_top, int wanted, int (&cell)[WARPS + 2], int &group, int &before) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int own = from_top(threadIdx.x);
    int inclusive = own;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(~0u, inclusive, distance);
        if (lane >= distance) inclusive += other;
    }
    if (lane == 31) cell[warp] = inclusive;
    __syncthreads();
    for (int other = 0; other < warp; ++other) inclusive += cell[other];
    if (inclusive >= wanted && inclusive - own < wanted) cell[WARPS] = threadIdx.x, cell[WARPS + 1] = inclusive - own;
    __syncthreads();
    group = cell[WARPS], before = cell[WARPS + 1];
    __syncthreads();
}

// Finds the room-th largest candidate by radix selection, 8 bits at a time. Called by one block.
__device__ void find_last(const Arguments &a, u32 (&count)[256], int (&cell)[WARPS + 2], u64 prefix) {
    const int candidates = __ldcg(&a.state->candidates);
    int room = __ldcg(&a.state->room), left = 32 + FINE;
#pragma unroll 1
    while (left > 0) {
        const int width = left < 8 ? left : 8, above = left;
        left -= width;
        count[threadIdx.x] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < candidates; i += THREADS) {
            const u64 candidate = __ldcg(a.candidates + i);
            if (candidate >> above == prefix) atomicAdd(count + (candidate >> left & ((1u << width) - 1)), 1u);
        }
        __syncthreads();
        int group, before;
        find_group([&](int i) { return (int)count[255 - i]; }, room, cell, group, before);
        room -= before;
        prefix = prefix << width | (255 - group);
        if ((int)count[255 - group] == room) break;  // All remaining candidates are kept.
        __syncthreads();
    }
    if (threadIdx.x == 0) a.state->last_kept = prefix << left;
}

extern "C" __global__ void __launch_bounds__(THREADS) choose(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 memory[];
    u32(&count)[256] = *(u32(*)[256])memory;
    int(&cell)[WARPS + 2] = *(int(*)[WARPS + 2])(memory + sizeof count);
    wait_for_previous_kernel();
    constexpr int EACH = BINS / THREADS, OWN_SCORES = over(INTER, THREADS);
    u32 own[EACH], score[OWN_SCORES];
    const int active_index = blockIdx.x, active = a.state->active;
#pragma unroll
    for (int i = 0; i < EACH / 4; ++i)
        *(uint4 *)(own + i * 4) = ((const uint4 *)a.bins)[(THREADS - 1 - threadIdx.x) * (EACH / 4) + i];
#pragma unroll
    for (int i = 0; i < OWN_SCORES; ++i) {
        const int channel = i * THREADS + threadIdx.x;
        score[i] = channel < INTER ? a.scores[active_index * INTER + channel] : ~0u;
    }
    allow_next_kernel();
    if (active_index >= active) return;
    const int wanted = a.kept_of[active];
    if (wanted <= 0 || wanted >= active * INTER) {
        if (active_index == 0 && threadIdx.x == 0) a.state->last_kept = wanted <= 0 ? ~0ull : 0;
        return;
    }
    int group, before;
    int sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) sum += own[i];
    find_group([&](int) { return sum; }, wanted, cell, group, before);
    if (threadIdx.x == group)
#pragma unroll
        for (int i = EACH - 1; i >= 0; --i) {
            if (before < wanted && before + (int)own[i] >= wanted)
                cell[0] = (THREADS - 1 - group) * EACH + i, cell[1] = before;
            before += own[i];
        }
    __syncthreads();
    const u32 bin = cell[0];
    const int room = wanted - cell[1];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < OWN_SCORES; ++i)
        if (score[i] >> FINE == bin)
            a.candidates[atomicAdd(&a.state->candidates, 1u)] = rank_of(score[i], active_index, i * THREADS + threadIdx.x);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        a.state->room = room;
        __threadfence();
        cell[0] = atomicAdd(&a.state->arrived, 1u) == active - 1;
    }
    __syncthreads();
    const bool last = cell[0];
    __syncthreads();
    if (!last) return;
    __threadfence();
    find_last(a, count, cell, bin);
}

extern "C" __global__ void __launch_bounds__(THREADS) enlist(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 memory[];
    u32 *bits = (u32 *)memory;           // [WORDS]
    int *before = (int *)(bits + WORDS);  // [WORDS + 1]: number of kept channels in earlier words
    u32 &base = *(u32 *)(before + WORDS + 1);
    const int active_index = blockIdx.x, lane = threadIdx.x % 32;
    wait_for_previous_kernel();
    const int expert = a.expert[active_index];
    const u64 last_kept = a.state->last_kept;
    bool kept[over(PADDED, THREADS)];
#pragma unroll
    for (int i = 0; i < over(PADDED, THREADS); ++i) {
        const int channel = i * THREADS + threadIdx.x;
        kept[i] = channel < INTER && rank_of(a.scores[active_index * INTER + channel], active_index, channel) >= last_kept;
        const u32 all = __ballot_sync(~0u, kept[i]);
        if (lane == 0 && channel < PADDED) bits[channel / 32] = all;
    }
    allow_next_kernel();
    if (expert < 0) return;
    __syncthreads();
    for (int word = threadIdx.x; word <= WORDS; word += THREADS) {
        int sum = 0;
        for (int other = 0; other < word; ++other) sum += __popc(bits[other]);
        before[word] = sum;
    }
    __syncthreads();
    const int number = before[WORDS], units = over(number, 8);
    if (threadIdx.x == 0) a.number[active_index] = number, base = atomicAdd(&a.state->units, (u32)units);
#pragma unroll
    for (int i = 0; i < over(PADDED, THREADS); ++i) {
        const int channel = i * THREADS + threadIdx.x;
        if (!kept[i]) continue;
        const int at = before[channel / 32] + __popc(bits[channel / 32] & ((1u << lane) - 1));
        a.channels[active_index * INTER + at] = channel;
    }
    for (int word = threadIdx.x; word < WORDS; word += THREADS) {
        a.bits[active_index * WORDS + word] = bits[word];
        if (a.kept) a.kept[expert * WORDS + word] = bits[word];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < units; i += THREADS) a.unit[base + i] = (u32)active_index << 16 | i;
}

// The gathering of reader.cu: kept channels in full, and what is restored of the others.

__device__ __forceinline__ float dot(const uint4 &one, const uint4 &other, float sum) {
    sum += low(one.x) * low(other.x), sum += high(one.x) * high(other.x);
    sum += low(one.y) * low(other.y), sum += high(one.y) * high(other.y);
    sum += low(one.z) * low(other.z), sum += high(one.z) * high(other.z);
    sum += low(one.w) * low(other.w), sum += high(one.w) * high(other.w);
    return sum;
}

// Sums of w b p over a part of the channels that are skipped. Eight lanes a channel, four numbers each; eight channels
// a turn.
__device__ __forceinline__ void restore(const Arguments &a, Shared &shared, u32 tag, int token, int part, int parts, int warp, int lane) {
    const long long *ids = a.ids + (long long)token * COLUMNS;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int turn = (WARPS - 1 - warp) * parts + part; turn * 8 < CHANNELS; turn += parts * WARPS) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int channel = turn * 8 + half * 4 + lane / 8;
            if (channel >= CHANNELS || shared.bits[channel / 32] >> channel % 32 & 1) continue;
            const int slot = channel / INTER;
            const long long expert = ids[slot];
            if (expert < 0) continue;
            const uint2 b = *(const uint2 *)(a.coefficients + (expert * INTER + channel % INTER) * 32 + lane % 8 * 4);
            u64 estimate;
            do estimate = get_tagged(a.estimates + (long long)token * CHANNELS + channel);
            while ((u32)(estimate >> 32) != tag);
            const float amount = a.weights[token * COLUMNS + slot] * __int_as_float((u32)estimate);
            sum.x += amount * low(b.x), sum.y += amount * high(b.x);
            sum.z += amount * low(b.y), sum.w += amount * high(b.y);
        }
    }
#pragma unroll
    for (int far = 8; far < 32; far *= 2) {
        sum.x += __shfl_xor_sync(~0u, sum.x, far), sum.y += __shfl_xor_sync(~0u, sum.y, far);
        sum.z += __shfl_xor_sync(~0u, sum.z, far), sum.w += __shfl_xor_sync(~0u, sum.w, far);
    }
    if (lane < 8) *(float4 *)(shared.mapped[warp] + lane * 4) = sum;
}

// A part of a token's channels, the `part`th of `parts`: kept ones in full, of the others b. A warp has a place for a
// channel's rows and its gate and up; down rows are added up by all, two columns a thread at a time.
// parity: bit i is of place i's barriers.
__device__ __forceinline__ void gather(const Arguments &a, Shared &shared, u32 tag, int token, int part, int parts, int row, u32 &parity, int warp, int lane) {
    constexpr int PAIRS = (HIDDEN / 2 + THREADS - 1) / THREADS;
    const long long *ids = a.ids + (long long)token * COLUMNS;
    const u64 policy = read_once();
    if (threadIdx.x < HIDDEN / 8) shared.x[threadIdx.x] = *(const uint4 *)(a.x + token * a.stride + threadIdx.x * 8);
    const int number = choose(a, shared, tag, token, part, parts, warp, lane);
    // The two halves of a channel's rows: gate and up, then down.
    auto fetch = [&](int i, int place, int half) {
        if (i >= number || lane) return;
        const int slot = shared.list[i] / INTER, channel = shared.list[i] % INTER;
        const long long expert = ids[slot];
        arrive_expecting(shared.full[place][half], (half ? 1 : 2) * HIDDEN * 2);
        if (half) {
            copy_in(shared.row[place][2], a.down + (expert * INTER + channel) * HIDDEN, HIDDEN * 2, shared.full[place][1], policy);
        } else {
            const u16 *from = a.gate_up + (expert * 2 * INTER + channel) * HIDDEN;
            copy_in(shared.row[place][0], from, HIDDEN * 2, shared.full[place][0], policy);
            copy_in(shared.row[place][1], from + INTER * HIDDEN, HIDDEN * 2, shared.full[place][0], policy);
        }
    };
    // Few channels have two warps each, or one and a place's rows are fetched again.
    const int team = number <= (GATHERING < WARPS / 2 ? GATHERING : WARPS / 2) ? 2 : 1;
    const int own = warp / team, member = warp % team;
    if (member == 0 && own < GATHERING) fetch(own, own, 0), fetch(own, own, 1);
    if (a.kept && part == 0)
        for (int word = threadIdx.x; word < WORDS; word += THREADS) a.kept[(long long)token * WORDS + word] = shared.bits[word];
#if RANK
    restore(a, shared, tag, token, part, parts, warp, lane);
#endif
    float sum[PAIRS][2];
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) sum[i][0] = sum[i][1] = 0;
    int begin = 0;
#pragma unroll 1
    do {
        const int there = number - begin < GATHERING ? number - begin : GATHERING;
        if (own < there) {
            const uint4 *gate = (const uint4 *)shared.row[own][0], *up = (const uint4 *)shared.row[own][1];
            float one = 0, other = 0;
            wait(shared.full[own][0], parity >> own & 1);
#pragma unroll 4
            for (int at = member * 32 + lane; at < HIDDEN / 8; at += 32 * team) {
                const uint4 x = shared.x[at];
                one = dot(gate[at], x, one), other = dot(up[at], x, other);
            }
#pragma unroll
            for (int far = 16; far; far /= 2) {
                one += __shfl_xor_sync(~0u, one, far);
                other += __shfl_xor_sync(~0u, other, far);
            }
            if (lane == 0) shared.dots[warp] = make_float2(one, other);
            if (team == 1) fetch(begin + GATHERING + own, own, 0);  // Only now have all lanes' values come: a barrier alone can overtake them.
        }
        __syncthreads();
#if RANK
        if (begin == 0 && warp == WARPS - 1) {
            float whole = 0;
#pragma unroll
            for (int other = 0; other < WARPS; ++other) whole += shared.mapped[other][lane];
            put_tagged(a.mapped + row * 32 + lane, __float_as_int(whole), tag);
        }
#endif
        float amount = 0;  // What the lane's channel's down row is multiplied by.
        if (lane < there) {
            float2 dots = shared.dots[lane * team];
            if (team == 2) dots.x += shared.dots[lane * 2 + 1].x, dots.y += shared.dots[lane * 2 + 1].y;
            amount = activation(dots.x) * dots.y * a.weights[token * COLUMNS + shared.list[begin + lane] / INTER];
        }
#pragma unroll 2
        for (int place = 0; place < there; ++place) {
            const u32 *down = (const u32 *)shared.row[place][2];
            const float by = __shfl_sync(~0u, amount, place);
            wait(shared.full[place][1], parity >> place & 1);
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                const int at = i * THREADS + threadIdx.x;
                if (HIDDEN / 2 % THREADS && at >= HIDDEN / 2) continue;
                sum[i][0] += by * low(down[at]), sum[i][1] += by * high(down[at]);
            }
        }
        parity ^= (u32)((1ull << (there > 0 ? there : 0)) - 1);
        begin += GATHERING;
        if (begin >= number) break;
        __syncthreads();
        if (own < GATHERING) fetch(begin + own, own, 1);
    } while (true);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const int at = i * THREADS + threadIdx.x;
        if (at < HIDDEN / 2) put_two_tagged(a.parts + (long long)row * HIDDEN + at * 2, sum[i][0], sum[i][1], tag);
    }
}

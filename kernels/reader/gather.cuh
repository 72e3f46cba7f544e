// The gathering of reader.cu: kept channels in full, and what is restored of the others.

__device__ __forceinline__ float dot(const uint4 &one, const uint4 &other, float sum) {
    sum += low(one.x) * low(other.x), sum += high(one.x) * high(other.x);
    sum += low(one.y) * low(other.y), sum += high(one.y) * high(other.y);
    sum += low(one.z) * low(other.z), sum += high(one.z) * high(other.z);
    sum += low(one.w) * low(other.w), sum += high(one.w) * high(other.w);
    return sum;
}

// Sums of w b p over a part of the channels that are skipped. Eight lanes a channel, four numbers each.
__device__ __forceinline__ void restore(const Arguments &a, Shared &shared, int token, int part, int parts, int warp, int lane) {
    const long long *ids = a.ids + (long long)token * COLUMNS;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int word = part * WARPS + warp; word < WORDS; word += parts * WARPS) {
        const u32 bits = shared.bits[word];
#pragma unroll 4
        for (int which = lane / 8; which < 32; which += 4) {
            const int channel = word * 32 + which;
            if (channel >= CHANNELS || bits >> which & 1) continue;
            const int slot = channel / INTER;
            const long long expert = ids[slot];
            if (expert < 0) continue;
            const float amount = a.weights[token * COLUMNS + slot] * __ldcg(a.estimates + (long long)token * CHANNELS + channel);
            const uint2 b = *(const uint2 *)(a.coefficients + (expert * INTER + channel % INTER) * 32 + lane % 8 * 4);
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

// A part of a token's channels, the `part`th of `parts`: kept ones in full, of the others b. parity: of the barriers.
__device__ __forceinline__ void gather(const Arguments &a, Shared &shared, int token, int part, int parts, int row, u32 &parity, int warp, int lane) {
    const long long *ids = a.ids + (long long)token * COLUMNS;
    const u64 policy = read_once();
    choose(a, shared, token, warp, lane);
    const int kept = shared.before[OWN * WARPS - 1] + __popc(shared.bits[OWN * WARPS - 1]);
    const int begin = kept * part / parts, number = kept * (part + 1) / parts - begin;
#pragma unroll 4
    for (int word = warp; word < OWN * WARPS; word += WARPS) {
        const u32 bits = shared.bits[word];
        const int place = shared.before[word] + __popc(bits & ((1u << lane) - 1)) - begin;
        if (bits >> lane & 1 && place >= 0 && place < number) shared.list[place] = word * 32 + lane;
    }
    __syncthreads();
    // The two halves of a channel's rows: gate and up, then down.
    auto fetch = [&](int i, int half) {
        if (i >= number || lane) return;
        const int slot = shared.list[i] / INTER, channel = shared.list[i] % INTER;
        const long long expert = ids[slot];
        arrive_expecting(shared.full[warp][half], (half ? 1 : 2) * HIDDEN * 2);
        if (half) {
            copy_in(shared.row[warp][2], a.down + (expert * INTER + channel) * HIDDEN, HIDDEN * 2, shared.full[warp][1], policy);
        } else {
            const u16 *from = a.gate_up + (expert * 2 * INTER + channel) * HIDDEN;
            copy_in(shared.row[warp][0], from, HIDDEN * 2, shared.full[warp][0], policy);
            copy_in(shared.row[warp][1], from + INTER * HIDDEN, HIDDEN * 2, shared.full[warp][0], policy);
        }
    };
    const bool gathering = warp < GATHERING;
    if (gathering) fetch(warp, 0), fetch(warp, 1);
    if (a.kept && part == 0)
        for (int word = threadIdx.x; word < WORDS; word += THREADS) a.kept[(long long)token * WORDS + word] = shared.bits[word];
#if RANK
    restore(a, shared, token, part, parts, warp, lane);
#endif
    if (gathering) {
        for (int at = lane * 4; at < HIDDEN; at += 128) *(float4 *)(shared.sums[warp] + at) = make_float4(0, 0, 0, 0);
        const uint4 *gate = (const uint4 *)shared.row[warp][0], *up = (const uint4 *)shared.row[warp][1];
        const uint2 *down = (const uint2 *)shared.row[warp][2];
#pragma unroll 1
        for (int i = warp; i < number; i += GATHERING) {
            float one = 0, other = 0;
            wait(shared.full[warp][0], parity);
#pragma unroll 2
            for (int at = lane; at < HIDDEN / 8; at += 32) {
                const uint4 x = shared.x[at];
                one = dot(gate[at], x, one), other = dot(up[at], x, other);
            }
#pragma unroll
            for (int far = 16; far; far /= 2) {
                one += __shfl_xor_sync(~0u, one, far);
                other += __shfl_xor_sync(~0u, other, far);
            }
            fetch(i + GATHERING, 0);  // Only now have all lanes' values come: a barrier alone can overtake them.
            const float amount = activation(one) * other * a.weights[token * COLUMNS + shared.list[i] / INTER];
            wait(shared.full[warp][1], parity);
#pragma unroll 2
            for (int at = lane; at < HIDDEN / 4; at += 32) {
                float4 &sum = *(float4 *)(shared.sums[warp] + at * 4);
                const uint2 d = down[at];
                sum.x += amount * low(d.x), sum.y += amount * high(d.x);
                sum.z += amount * low(d.y), sum.w += amount * high(d.y);
            }
            __syncwarp();
            fetch(i + GATHERING, 1);
            parity ^= 1;
        }
    }
    __syncthreads();
    for (int column = threadIdx.x; column < HIDDEN; column += THREADS) {
        float whole = 0;
#pragma unroll
        for (int other = 0; other < GATHERING; ++other) whole += shared.sums[other][column];
        a.parts[(long long)row * HIDDEN + column] = whole;
    }
#if RANK
    if (threadIdx.x < 32) {
        float whole = 0;
#pragma unroll
        for (int other = 0; other < WARPS; ++other) whole += shared.mapped[other][lane];
        a.mapped[row * 32 + lane] = whole;
    }
#endif
}

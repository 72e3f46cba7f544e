// `gather` of reader.cu: computes kept channels exactly, and restores skipped channels with the low-rank map.

__device__ __forceinline__ float dot(const uint4 &one, const uint4 &other, float sum) {
    sum += low(one.x) * low(other.x), sum += high(one.x) * high(other.x);
    sum += low(one.y) * low(other.y), sum += high(one.y) * high(other.y);
    sum += low(one.z) * low(other.z), sum += high(one.z) * high(other.z);
    sum += low(one.w) * low(other.w), sum += high(one.w) * high(other.w);
    return sum;
}

// The dot products of a channel's gate and up rows with x, as (gate, up). The warps of a team each compute a part.
__device__ __forceinline__ float2 dot_rows(const u16 (*row)[HIDDEN], const uint4 *x, int team, int member, int lane) {
    const uint4 *gate = (const uint4 *)row[0], *up = (const uint4 *)row[1];
    float one = 0, other = 0;
#pragma unroll 4
    for (int at = member * 32 + lane; at < HIDDEN / 8; at += 32 * team) one = dot(gate[at], x[at], one), other = dot(up[at], x[at], other);
#pragma unroll
    for (int distance = 16; distance; distance /= 2) {
        one += __shfl_xor_sync(~0u, one, distance);
        other += __shfl_xor_sync(~0u, other, distance);
    }
    return make_float2(one, other);
}

// Adds the dot product of a row of U [32] and 32 numbers to sum.
__device__ __forceinline__ float through_map(const uint4 (&u)[4], const float *numbers, float sum) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float4 one = *(const float4 *)(numbers + i * 8), other = *(const float4 *)(numbers + i * 8 + 4);
        sum += low(u[i].x) * one.x + high(u[i].x) * one.y + low(u[i].y) * one.z + high(u[i].y) * one.w;
        sum += low(u[i].z) * other.x + high(u[i].z) * other.y + low(u[i].w) * other.z + high(u[i].w) * other.w;
    }
    return sum;
}

// Sums w b p over skipped channels. A turn processes eight channels: eight lanes share a channel, and each lane has four of
// its 32 coefficients. The data of two turns are loaded together before they are added.
struct Restoring {
    float4 sum;
    int turn, step;
    uint2 b[4];
    u64 estimate[4];
    u32 valid;

    __device__ __forceinline__ Restoring(int first, int step) : sum(make_float4(0, 0, 0, 0)), turn(first), step(step) {}
    __device__ __forceinline__ bool more() const { return turn * 8 < CHANNELS; }
    __device__ __forceinline__ int channel_of(int i, int lane) const { return (turn + i / 2 * step) * 8 + i % 2 * 4 + lane / 8; }

    // expert: the lane-th expert of the token. estimates: those of the token.
    __device__ __forceinline__ void load(const Arguments &a, const Shared &shared, const u64 *estimates, int expert, int lane) {
        valid = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int channel = channel_of(i, lane), slot = channel / INTER;
            const long long owner = __shfl_sync(~0u, expert, slot < COLUMNS ? slot : 0);
            if (channel >= CHANNELS || owner < 0 || shared.bits[channel / 32] >> channel % 32 & 1) continue;
            b[i] = *(const uint2 *)(a.coefficients + (owner * INTER + channel % INTER) * 32 + lane % 8 * 4);
            estimate[i] = get_tagged(estimates + channel);
            valid |= 1u << i;
        }
    }

    __device__ __forceinline__ void add(const u64 *estimates, u32 tag, float weight, int lane) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int channel = channel_of(i, lane), slot = channel / INTER;
            const float factor = __shfl_sync(~0u, weight, slot < COLUMNS ? slot : 0);
            if (!(valid >> i & 1)) continue;
            while ((u32)(estimate[i] >> 32) != tag) estimate[i] = get_tagged(estimates + channel);
            const float amount = factor * __int_as_float((u32)estimate[i]);
            sum.x += amount * low(b[i].x), sum.y += amount * high(b[i].x);
            sum.z += amount * low(b[i].y), sum.w += amount * high(b[i].y);
        }
        turn += 2 * step;
    }

    // Adds the remaining channels. The first eight lanes of each warp write its sums to shared memory.
    __device__ __forceinline__ void end(const Arguments &a, Shared &shared, const u64 *estimates, u32 tag, int expert, float weight, int warp, int lane) {
#pragma unroll 1
        while (more()) {
            load(a, shared, estimates, expert, lane);
            add(estimates, tag, weight, lane);
        }
#pragma unroll
        for (int distance = 8; distance < 32; distance *= 2) {
            sum.x += __shfl_xor_sync(~0u, sum.x, distance), sum.y += __shfl_xor_sync(~0u, sum.y, distance);
            sum.z += __shfl_xor_sync(~0u, sum.z, distance), sum.w += __shfl_xor_sync(~0u, sum.w, distance);
        }
        if (lane < 8) *(float4 *)(shared.mapped[warp] + lane * 4) = sum;
    }

    // Sums over the warps and writes the result to global memory, where other blocks read it.
    __device__ __forceinline__ void publish(u64 *to, const Shared &shared, u32 tag, int lane) const {
        float total = 0;
#pragma unroll
        for (int other = 0; other < WARPS; ++other) total += shared.mapped[other][lane];
        put_tagged(to + lane, __float_as_int(total), tag);
    }
};

// Computes a part (`part` of `parts`) of a token's channels: kept channels exactly, skipped channels with b. A kept channel
// occupies one of GATHERING buffers in shared memory. One or two warps multiply its gate and up rows; all warps add its
// down row, two columns per thread at a time. parity: bit i is the parity of the barriers of buffer i.
__device__ __forceinline__ void gather(const Arguments &a, Shared &shared, u32 tag, int token, int part, int parts, int row, u32 &parity, int warp, int lane) {
    constexpr int PAIRS = (HIDDEN / 2 + THREADS - 1) / THREADS, FEW = GATHERING < WARPS / 2 ? GATHERING : WARPS / 2;
    const u64 policy = read_once();
    if (threadIdx.x < HIDDEN / 8) shared.x[threadIdx.x] = *(const uint4 *)(a.x + token * a.stride + threadIdx.x * 8);
    // The token's lane-th expert.
    const int expert = lane < COLUMNS ? (int)a.ids[token * COLUMNS + lane] : -1;
    const float weight = lane < COLUMNS ? a.weights[token * COLUMNS + lane] : 0;
    const int number = choose(a, shared, tag, token, expert, part, parts, warp, lane);
    // Copies rows of the i-th listed channel into buffer `to`: gate and up (half 0), or down (half 1).
    auto fetch = [&](int i, int to, int half) {
        if (i >= number) return;
        const int slot = shared.list[i] / INTER, channel = shared.list[i] - slot * INTER;
        const long long owner = __shfl_sync(~0u, expert, slot);
        if (lane) return;
        arrive_expecting(shared.full[to][half], (half ? 1 : 2) * HIDDEN * 2);
        if (half) {
            copy_in(shared.row[to][2], a.down + (owner * INTER + channel) * HIDDEN, HIDDEN * 2, shared.full[to][1], policy);
        } else {
            const u16 *from = a.gate_up + (owner * 2 * INTER + channel) * HIDDEN;
            copy_in(shared.row[to][0], from, HIDDEN * 2, shared.full[to][0], policy);
            copy_in(shared.row[to][1], from + INTER * HIDDEN, HIDDEN * 2, shared.full[to][0], policy);
        }
    };
    // If there are few channels, two warps compute each of them. If there are many, buffers are refilled.
    const int team = number <= FEW ? 2 : 1, buffer = warp / team, member = warp % team;
    if (buffer < GATHERING && member == 0) fetch(buffer, buffer, 0);
    if (buffer < GATHERING && member == team - 1) fetch(buffer, buffer, 1);
    if (a.kept && part == 0)
        for (int word = threadIdx.x; word < WORDS; word += THREADS) a.kept[(long long)token * WORDS + word] = shared.bits[word];
    const u64 *estimates = a.estimates + (long long)token * CHANNELS;
    Restoring restoring((WARPS - 1 - warp) * parts + part, parts * WARPS);
    float sum[PAIRS][2];
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) sum[i][0] = sum[i][1] = 0;
#pragma unroll 1
    for (int begin = 0;; begin += GATHERING) {
        const int held = number - begin < GATHERING ? number - begin : GATHERING;
        const bool last = number <= begin + GATHERING;
        if (RANK && restoring.more()) restoring.load(a, shared, estimates, expert, lane);
        if (buffer < held) {
            wait(shared.full[buffer][0], parity >> buffer & 1);
            const float2 dots = dot_rows(shared.row[buffer], shared.x, team, member, lane);
            if (lane == 0) shared.dots[warp] = dots;
            // Refills the buffer only here, because the dot products prove that all lanes have read it. After a barrier
            // alone, loads could still be in flight.
            if (team == 1) fetch(begin + GATHERING + buffer, buffer, 0);
        }
#if RANK
        if (restoring.more()) restoring.add(estimates, tag, weight, lane);
        if (last) restoring.end(a, shared, estimates, tag, expert, weight, warp, lane);
#endif
        __syncthreads();
        if (RANK && last && warp == WARPS - 1) restoring.publish(a.mapped + row * 32, shared, tag, lane);
        // amount: the factor of the down row of the lane-th channel.
        float2 dots = lane < held ? shared.dots[lane * team] : make_float2(0, 0);
        if (team == 2 && lane < held) dots.x += shared.dots[lane * 2 + 1].x, dots.y += shared.dots[lane * 2 + 1].y;
        const float amount = activation(dots.x) * dots.y * __shfl_sync(~0u, weight, lane < held ? shared.list[begin + lane] / INTER : 0);
        if (lane < held) wait(shared.full[lane][1], parity >> lane & 1);
        __syncwarp();
#pragma unroll 4
        for (int i_row = 0; i_row < held; ++i_row) {
            const u32 *down = (const u32 *)shared.row[i_row][2];
            const float factor = __shfl_sync(~0u, amount, i_row);
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                const int at = i * THREADS + threadIdx.x;
                if (HIDDEN / 2 % THREADS && at >= HIDDEN / 2) continue;
                sum[i][0] += factor * low(down[at]), sum[i][1] += factor * high(down[at]);
            }
        }
        if (held > 0) parity ^= (u32)((1ull << held) - 1);
        if (last) break;
        __syncthreads();
        if (buffer < GATHERING) fetch(begin + GATHERING + buffer, buffer, 1);
    }
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const int at = i * THREADS + threadIdx.x;
        if (at < HIDDEN / 2) put_two_tagged(a.parts + (long long)row * HIDDEN + at * 2, sum[i][0], sum[i][1], tag);
    }
}

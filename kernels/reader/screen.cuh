// The screen of reader.cu: what channels would be, from the codes of the largest coordinates.

// Where the codes of the `at`th coordinate are held: of 16, lane t multiplies the 2t, 2t + 1, 2t + 8 and 2t + 9th, whose
// rows are t, t + 4, t + 8 and t + 12, so that lanes read from different banks.
__device__ __forceinline__ int row_of(int at) { return (at & ~7) | (at & 1) << 2 | (at >> 1 & 3); }

// A block of 128 coordinates, 4 a lane: rotated, and the largest listed. One warp.
__device__ void list_largest(const Arguments &a, int token, int block, int lane, Screened &to) {
    float v[4];
    const u16 *x = a.x + token * a.stride + block * 128 + lane * 4;
    const signed char *signs = a.signs + block * 128 + lane * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = wide(x[i]) * signs[i];
    turn(v, lane);
    u32 key[4], most = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        v[i] *= 0.08838834764831845f;
        key[i] = __float_as_int(v[i]) & 0x7fffffff;
        most = key[i] > most ? key[i] : most;
    }
    most = __reduce_max_sync(~0u, most);
    // `there` keys, COORDINATES or more, are at least `least`; `past`, fewer, are at least `beyond`. First guesses by a
    // straight line between the two, then by halves of what is left of their bits.
    u32 least = 0, beyond = most + 1;
    int there = 128, past = 0;
#pragma unroll 1
    for (int turn = 0; there != COORDINATES && beyond - least > 1; ++turn) {
        u32 middle = least + (beyond - least) / 2;
        if (turn < 8) {
            const float from = __int_as_float(least), upto = __int_as_float(beyond);
            const u32 guess = __float_as_int(from + (upto - from) * (there - COORDINATES + 0.5f) / (there - past));
            if (guess > least && guess < beyond) middle = guess;
        }
        int count = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) count += key[i] >= middle;
        count = __reduce_add_sync(~0u, count);
        if (count >= COORDINATES) least = middle, there = count;
        else beyond = middle, past = count;
    }
    // Too many equals: the first of them are taken.
    const u32 before = (1u << lane) - 1;
    const bool tied = there != COORDINATES;
    int ties = 0, room = COORDINATES - there, own = 0;
    if (tied) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 equal = __ballot_sync(~0u, key[i] == least);
            ties += __popc(equal & before), room += __popc(equal);
        }
    }
    // Halves hold up to 65,504 units.
    const int found = most >> 23, exponent = found < 1 ? 1 : found > 253 ? 253 : found;
    const float one_over = __int_as_float((254 - exponent) << 23);
    int place = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const bool equal = key[i] == least;
        const bool taken = key[i] >= least && !(tied && equal && ties + own >= room);
        own += equal;
        const u32 all = __ballot_sync(~0u, taken);
        if (taken) {
            const int at = place + __popc(all & before);
            const float whole = v[i] * one_over;
            const u16 first = to_half(whole);
            const float rest = (whole - from_half(first)) * 2048;
            const u16 second = to_half(rest);
            to.coordinate[row_of(at)] = lane * 4 + i;
            to.part[0][at] = first, to.part[1][at] = second, to.part[2][at] = to_half((rest - from_half(second)) * 2048);
        }
        place += __popc(all);
    }
    if (lane == 0) to.unit = __int_as_float(exponent << 23);
    __syncwarp();
}

// Bytes `which` and `which + 1` of two words, side by side.
__device__ __forceinline__ u32 beside(u32 one, u32 other, int which) {
    return which ? (one >> 16) | (other & 0xffff0000u) : (one & 0xffffu) | (other << 16);
}

// Two bytes, sums of (code + 1) 3^i, as halves: sums of code 3^i in units of 2^-24, the smallest number of fp16.
__device__ __forceinline__ u32 code_sums(u32 bytes) { return add_halves(bytes & 0x00ff00ffu, 0x80798079u); }

// The lowest codes of two such sums, which are taken off: a third is rounded to the whole number next to it.
__device__ __forceinline__ u32 lowest_codes(u32 &sums) {
    constexpr u32 THIRD = 0x35553555, MINUS_3 = 0xc200c200;
    const u32 above = times_halves(sums, THIRD), codes = fma_halves(above, MINUS_3, sums);
    sums = above;
    return codes;
}

// Codes of a strip in a block of coordinates, a sector of each: two lanes a row.
__device__ __forceinline__ void load_codes(const u8 *codes, const Screened &from, int lane, u32 (&code)[COORDINATES][8]) {
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        const int row = i * 16 + lane / 2;
        copy_16(&code[row][lane % 2 * 4], codes + from.coordinate[row] * ROW + lane % 2 * 16);
    }
}

// -> products [PAIRED]: of a word's 10 values, gate's five come first. sum of code times x.
__device__ __forceinline__ void screen_block(const Screened &from, const u32 (&code)[COORDINATES][8], int lane, float *products) {
    const int g = lane / 4, t = lane % 4;
    float4 sum[2][5];
#pragma unroll
    for (int i = 0; i < 10; ++i) sum[i / 5][i % 5] = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int step = 0; step < STEPS; ++step) {
        const u32 (*row)[8] = code + step * 16 + t;
        u32 b0 = 0, b1 = 0;
        if (g < 3) {
            b0 = *(const u32 *)&from.part[g][step * 16 + t * 2];
            b1 = *(const u32 *)&from.part[g][step * 16 + t * 2 + 8];
        }
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const u32 one = beside(row[0][g], row[4][g], which), other = beside(row[8][g], row[12][g], which);
            u32 gate0 = code_sums(one), up0 = code_sums(one >> 8), gate1 = code_sums(other), up1 = code_sums(other >> 8);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 a0 = lowest_codes(gate0), a1 = lowest_codes(up0), a2 = lowest_codes(gate1), a3 = lowest_codes(up1);
                multiply_halves(sum[which][i], a0, a1, a2, a3, b0, b1);
            }
            multiply_halves(sum[which][4], gate0, up0, gate1, up1, b0, b1);
        }
    }
    const float unit = from.unit * 16777216.0f, part = 1.0f / 2048;
#pragma unroll
    for (int which = 0; which < 2; ++which)
#pragma unroll
        for (int i = 0; i < 5; ++i) {
            const float4 own = sum[which][i];
            const float third[2] = {__shfl_sync(~0u, own.x, g * 4 + 1), __shfl_sync(~0u, own.z, g * 4 + 1)};
            if (t == 0) {
                float *to = products + (2 * g + which) * 10 + i;
                to[0] = (own.x + (own.y + third[0] * part) * part) * unit;
                to[5] = (own.z + (own.w + third[1] * part) * part) * unit;
            }
        }
}

// The codes of a task's strip, of the coordinates that are largest in its token: listed where they are not yet.
__device__ __forceinline__ void fetch_codes(const Arguments &a, Shared &shared, int task, int listed, int warp, int lane) {
    const int pair = task / STRIPS, strip = task % STRIPS, token = pair / COLUMNS;
    const long long expert = a.ids[pair];
    const u8 *codes = a.codes + expert * HIDDEN * ROW + strip * 32;
#pragma unroll 1
    for (int block = warp; block < BLOCKS; block += WARPS) {
        Screened &found = shared.screened[token % BUFFERS][block];
        if (token != listed) list_largest(a, token, block, lane, found);
        if (expert >= 0) load_codes(codes + block * (128 * ROW), found, lane, shared.code[task % BUFFERS][block]);
    }
}

// Estimates and scores of a task's channels, whose codes are on their way.
__device__ __forceinline__ void screen_task(const Arguments &a, Shared &shared, int task, int warp, int lane) {
    const int pair = task / STRIPS, strip = task % STRIPS, token = pair / COLUMNS;
    const long long expert = a.ids[pair];
    const int value = threadIdx.x, word = value / 10, kind = value % 10 / 5;
    const int channel = (strip * 16 + word) * 5 + value % 5;
    const bool there = value < PAIRED && channel < INTER;
    const long long at = (long long)pair * INTER + channel;
    u64 *score = a.scores + (long long)token * SCORES + score_at(pair % COLUMNS * INTER + channel);
    if (expert < 0) {
        __syncthreads();
        if (there && kind == 0) put_tagged(score, 0, shared.tag);
        return;
    }
    // As they come: nothing waits for them before the codes are multiplied.
    u16 scale[BLOCKS], norm = 0;
    float weight = 0;
    if (there) {
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block)
            scale[block] = a.scales[(expert * BLOCKS * 2 + kind) * INTER + channel + block * 2 * INTER];
        norm = a.norms[expert * INTER + channel], weight = a.weights[pair];
    }
    copies_there<1>();
    __syncwarp();
#pragma unroll 1
    for (int block = warp; block < BLOCKS; block += WARPS)
        screen_block(shared.screened[token % BUFFERS][block], shared.code[task % BUFFERS][block], lane, shared.products[block]);
    __syncthreads();
    if (there) {
        float sum = 0;
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) sum += from_half(scale[block]) * shared.products[block][value];
        shared.pair[value] = sum;
    }
    __syncthreads();
    if (there && kind == 0) {
        const float active = activation(shared.pair[value]) * shared.pair[value + 5];
        const u32 bits = (u32)__float_as_int(weight * wide(norm) * active) & 0x7fffffffu;  // No -0, whose key would be the largest.
        put_tagged(a.estimates + at, __float_as_int(active), shared.tag);
        put_tagged(score, (bits > INFINITE ? INFINITE : bits) + 1, shared.tag);
    }
}

// A block's tasks. With two buffers the next one's codes come while one is multiplied. ended: blocks of all launches.
__device__ __forceinline__ void screen(const Arguments &a, Shared &shared, u64 ended, int warp, int lane) {
    constexpr int AHEAD = BUFFERS - 1, A_TOKEN = STRIPS * COLUMNS;
    const long long tasks = (long long)a.tokens * A_TOKEN;
    const int begin = (int)(tasks * blockIdx.x / gridDim.x), end = (int)(tasks * (blockIdx.x + 1) / gridDim.x);
#pragma unroll 1
    for (int task = begin - AHEAD; task <= end; ++task) {
        const int next = task + AHEAD;
        if (next < end) fetch_codes(a, shared, next, next > begin ? (next - 1) / A_TOKEN : -1, warp, lane);
        end_group();
        // Launches before this one, and not 0: none of its blocks ends before this one has told the others its sums.
        if (next == begin && threadIdx.x == THREADS - 1) shared.tag = (u32)(ended / gridDim.x) | 0x80000000u;
        if (task < begin || task == end) continue;
        if (!AHEAD) end_group();  // There is none that need not have come.
        screen_task(a, shared, task, warp, lane);
    }
    __syncthreads();
}

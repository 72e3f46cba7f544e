// The screen of reader.cu: estimates channels from the codes of the largest coordinates.

// The row in shared memory with the codes of the `at`-th listed coordinate. In each group of 16, lane t multiplies
// coordinates 2t, 2t + 1, 2t + 8 and 2t + 9. Their rows are t, t + 4, t + 8 and t + 12, so that lanes read from different
// banks.
__device__ __forceinline__ int row_of(int at) { return (at & ~7) | (at & 1) << 2 | (at >> 1 & 3); }

// Initial guesses for the search below, as if coordinates were normally distributed: the absolute value of the last listed
// coordinate, relative to the largest of 128, and the change of this value per listed coordinate.
constexpr float EXPECTED = COORDINATES >= 112 ? 0.06f : COORDINATES >= 96 ? 0.12f : COORDINATES >= 80 ? 0.17f
    : COORDINATES >= 64 ? 0.255f : COORDINATES >= 48 ? 0.335f : COORDINATES >= 32 ? 0.435f : 0.58f;
constexpr float A_COORDINATE = 1.0f / (COORDINATES >= 64 ? 240 : COORDINATES >= 32 ? 160 : 80);

// Rotates a block of 128 coordinates of a token, 4 per lane, and lists the COORDINATES with the largest absolute values.
// Called by one warp.
__device__ void list_largest(const Arguments &a, int token, int block, int lane, Screened &to) {
    float v[4];
    const u16 *x = a.x + token * a.stride + block * 128 + lane * 4;
    const uint2 four = *(const uint2 *)x;
    const u32 signs = *(const u32 *)(a.signs + block * 128 + lane * 4);
    v[0] = low(four.x), v[1] = high(four.x), v[2] = low(four.y), v[3] = high(four.y);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] *= (signed char)(signs >> 8 * i);
    hadamard(v, lane);
    u32 key[4], most = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        v[i] *= 0.08838834764831845f;
        key[i] = __float_as_int(v[i]) & 0x7fffffff;
        most = key[i] > most ? key[i] : most;
    }
    most = __reduce_max_sync(~0u, most);
    // Searches for the smallest listed key. num_lower keys (at least COORDINATES) are >= lower, and num_upper keys (fewer
    // than COORDINATES) are >= upper. The next level between them is guessed from the slope A_COORDINATE in the first
    // three iterations, then by linear interpolation, then by bisection of the bits.
    u32 lower = 0, upper = most + 1;
    int num_lower = 128, num_upper = 0;
    float guess = __int_as_float(most) * EXPECTED;
#pragma unroll 1
    for (int iteration = 0; num_lower != COORDINATES && upper - lower > 1; ++iteration) {
        u32 level = __float_as_int(guess);
        if (iteration > 8 || level <= lower || level >= upper) level = lower + (upper - lower) / 2;
        int count = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) count += key[i] >= level;
        count = __reduce_add_sync(~0u, count);
        if (count >= COORDINATES) lower = level, num_lower = count;
        else upper = level, num_upper = count;
        const float from = __int_as_float(lower), to_value = __int_as_float(upper);
        guess = iteration < 3 ? __int_as_float(level) + __int_as_float(most) * (A_COORDINATE * (count - COORDINATES))
                         : from + __fdividef(to_value - from, num_lower - num_upper) * (num_lower - COORDINATES + 0.5f);
    }
    // If too many keys equal the smallest, only the first ones are listed.
    const u32 before = (1u << lane) - 1;
    u32 dropped = 0;  // Bit i: this lane's key i is not listed.
    if (num_lower != COORDINATES) {
        int ties = 0, room = COORDINATES - num_lower;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 equal = __ballot_sync(~0u, key[i] == lower);
            ties += __popc(equal & before), room += __popc(equal);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (key[i] == lower && ties++ >= room) dropped |= 1u << i;
    }
    // x becomes a fixed-point number with 21 bits below the largest coordinate's power of two. It is stored as two
    // integers of at most 12 bits: x = first + second / 2^11. Their products with codes have exact sums.
    constexpr float ROUNDING = 12582912;  // Adding this to a number rounds it to an integer.
    const int exponent_bits = most >> 23, exponent = exponent_bits < 1 ? 1 : exponent_bits > 253 ? 253 : exponent_bits;
    const float inverse_unit = __int_as_float((254 - exponent) << 23);
    int num_listed = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const bool taken = key[i] >= lower && !(dropped >> i & 1);
        const u32 all = __ballot_sync(~0u, taken);
        if (taken) {
            const int at = num_listed + __popc(all & before);
            const float scaled = v[i] * inverse_unit * 1024, first = scaled + ROUNDING - ROUNDING;
            const float second = (scaled - first) * 2048 + ROUNDING - ROUNDING;
            to.coordinate[row_of(at)] = lane * 4 + i;
            to.part[0][at] = to_half(first * 16), to.part[1][at] = to_half(second * 16);
        }
        num_listed += __popc(all);
    }
    if (lane == 0) to.unit = __int_as_float(exponent << 23);
    __syncwarp();
}

// Takes byte `which` of each of two words and converts both to sums of codes (code_sums in halves.cuh).
__device__ __forceinline__ u32 codes_of(u32 one, u32 other, int which) {
    return code_sums(__byte_perm(one, other, which == 0 ? 0x4400 : which == 1 ? 0x5511 : which == 2 ? 0x6622 : 0x7733));
}

// Copies the codes of one strip (80 channels) for a block's listed coordinates: a 32-byte sector per row, by two lanes.
__device__ __forceinline__ void load_codes(const u8 *codes, const Screened &from, int lane, u32 (&code)[COORDINATES][8]) {
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        const int row = i * 16 + lane / 2;
        copy_16(&code[row][lane % 2 * 4], codes + from.coordinate[row] * ROW + lane % 2 * 16);
    }
}

// Writes products [PAIRED]: for each gate and up row, the sum over coordinates of code * x, divided by 1024. A 16-bit word
// gives 10 products; the five of gate come first. batch_screen.cuh explains how codes are multiplied without unpacking.
__device__ __forceinline__ void screen_block(const Screened &from, const u32 (&code)[COORDINATES][8], int lane, float *products) {
    const int g = lane / 4, t = lane % 4;
    float4 sum[2][5];
#pragma unroll
    for (int i = 0; i < 10; ++i) sum[i / 5][i % 5] = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const u32 (*row)[8] = code + step * 16 + t;
        const u32 word[4] = {row[0][g], row[4][g], row[8][g], row[12][g]};
        u32 b0 = 0, b1 = 0;
        if (g < 2) {
            b0 = *(const u32 *)&from.part[g][step * 16 + t * 2];
            b1 = *(const u32 *)&from.part[g][step * 16 + t * 2 + 8];
        }
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            u32 gate0 = codes_of(word[0], word[1], 2 * which), up0 = codes_of(word[0], word[1], 2 * which + 1);
            u32 gate1 = codes_of(word[2], word[3], 2 * which), up1 = codes_of(word[2], word[3], 2 * which + 1);
#pragma unroll
            for (int i = 0; i < 5; ++i) {
                multiply_halves(sum[which][i], gate0, up0, gate1, up1, b0, b1);
                if (i == 4) continue;
                gate0 = thirds(gate0), up0 = thirds(up0), gate1 = thirds(gate1), up1 = thirds(up1);
            }
        }
    }
    if (t) return;  // Lane 0 of each group of four holds the products of both parts of x.
    const float unit = from.unit, part = 1.0f / 2048;
#pragma unroll
    for (int which = 0; which < 2; ++which)
#pragma unroll
        for (int i = 0; i < 5; ++i) {
            float4 own = sum[which][i];
            if (i < 4) {
                const float4 next = sum[which][i < 4 ? i + 1 : 4];
                own = make_float4(own.x - 3 * next.x, own.y - 3 * next.y, own.z - 3 * next.z, own.w - 3 * next.w);
            }
            float *to = products + (2 * g + which) * 10 + i;
            to[0] = (own.x + own.y * part) * unit, to[5] = (own.z + own.w * part) * unit;
        }
}

// Starts the copies of a task's codes into shared memory. If the task's token is not `listed`, its largest coordinates are
// listed first. Returns the task's expert.
__device__ __forceinline__ int fetch_codes(const Arguments &a, Shared &shared, int task, int listed, int warp, int lane) {
    const int pair = task / STRIPS, strip = task % STRIPS, token = pair / COLUMNS;
    const long long expert = *(volatile const long long *)(a.ids + pair);  // This load overlaps with listing coordinates.
    const u8 *codes = a.codes + expert * HIDDEN * ROW + strip * 32;
#pragma unroll 1
    for (int block = warp; block < BLOCKS; block += WARPS) {
        Screened &screened = shared.screened[token % BUFFERS][block];
        if (token != listed) list_largest(a, token, block, lane, screened);
        if (expert >= 0) load_codes(codes + block * (128 * ROW), screened, lane, shared.code[task % BUFFERS][block]);
    }
    return expert;
}

// The gate (even index) or up (odd index) value of one channel, which a thread computes from the products of a task. The
// neighbouring lane has the other value. Scales stay in the format of memory, so that no instruction waits for their loads
// before the codes are multiplied.
struct Scored {
    int index, channel;  // The value's index in the task; the channel's index in the expert.
    u16 scale[BLOCKS], norm;
    float weight;

    // Only some of the warps have a value; which ones changes with every task.
    __device__ __forceinline__ bool is_valid() const { return index < PAIRED && channel < INTER; }

    __device__ __forceinline__ void load(const Arguments &a, int task, long long expert) {
        index = (threadIdx.x - task * PAIRED) & (THREADS - 1), channel = task % STRIPS * STRIP + index / 2;
        if (!is_valid() || expert < 0) return;
        const u16 *scales = a.scales + (expert * (BLOCKS * 2) + index % 2) * INTER + channel;
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i) scale[i] = scales[i * 2 * INTER];
        norm = a.norms[expert * INTER + channel], weight = a.weights[task / STRIPS];
    }

    // Sums the products of all blocks of coordinates, and writes the channel's estimate and score.
    __device__ __forceinline__ void write_score(const Arguments &a, const Shared &shared, int task, long long expert) const {
        if (index >= PAIRED) return;
        const int pair = task / STRIPS, token = pair / COLUMNS;
        float sum = 0;
        if (expert >= 0 && channel < INTER) {
            const float *products = shared.products[task % 2][0] + index / 10 * 10 + index % 2 * 5 + index % 10 / 2;
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) sum += from_half(scale[block]) * products[block * PAIRED];
        }
        sum *= 1024;  // Undoes the division in screen_block. Multiplying earlier could overflow for large x.
        const float up = __shfl_xor_sync(~0u, sum, 1);
        if (index % 2 || channel >= INTER) return;
        u64 *score = a.scores + (long long)token * SCORES + score_at(pair % COLUMNS * INTER + channel);
        if (expert < 0) {
            put_tagged(score, 0, shared.tag);
            return;
        }
        const float active = activation(sum) * up;
        const u32 bits = (u32)__float_as_int(weight * wide(norm) * active) & 0x7fffffffu;  // Clears the sign: the key of -0 would be the largest.
        put_tagged(a.estimates + (long long)pair * INTER + channel, __float_as_int(active), shared.tag);
        put_tagged(score, (bits > INFINITE ? INFINITE : bits) + 1, shared.tag);
    }
};

// Runs the tasks begin .. end - 1 of a thread block. With two buffers, the codes of the next task are copied while those of
// the current one are multiplied: half of the warps start these copies before they multiply, the others after. ended: the
// number of blocks that have ended, over all launches.
__device__ __forceinline__ void screen(const Arguments &a, Shared &shared, int begin, int end, u64 ended, int warp, int lane) {
    constexpr int AHEAD = BUFFERS - 1;
    int expert = -1, expert_next = -1;
#pragma unroll 1
    for (int task = begin - AHEAD; task < end; ++task) {
        const int next = task + AHEAD;
        const bool late = AHEAD && task >= begin && warp / 4 % 2;
        Scored scored;
        if (AHEAD) expert = expert_next;
        if (AHEAD && task >= begin) scored.load(a, task, expert);
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
            if (half == late) {
                if (next < end) expert_next = fetch_codes(a, shared, next, next > begin ? (next - 1) / A_TOKEN : -1, warp, lane);
                end_group();
                // The tag is the number of earlier launches. Its top bit is set, so that it is never 0. `ended` holds only
                // blocks of earlier launches, because no block of this launch ends before this one has sent its sums.
                if (next == begin && threadIdx.x == THREADS - 1) shared.tag = (u32)(ended / gridDim.x) | 0x80000000u;
                if (!AHEAD) expert = expert_next, scored.load(a, task, expert);
            } else if (task >= begin && expert >= 0) {
                const int token = task / A_TOKEN;
                if (AHEAD && !late) wait_for_copies<1>();
                else wait_for_copies<0>();
                __syncwarp();
#pragma unroll 1
                for (int block = warp; block < BLOCKS; block += WARPS)
                    screen_block(shared.screened[token % BUFFERS][block], shared.code[task % BUFFERS][block], lane, shared.products[task % 2][block]);
            }
        }
        if (task < begin) continue;
        __syncthreads();
        scored.write_score(a, shared, task, expert);
    }
    __syncthreads();
}

// Replaces kernels/experts/hopper.cuh on the host. A barrier in shared memory is a 64-bit word: bit 0 is the parity of the
// phase, byte 1 the arrivals that are missing, byte 2 all arrivals, and the upper half the bytes that are missing.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

static void settle(u64 &barrier) {
    const u64 all = barrier >> 16 & 0xff;
    if ((barrier >> 8 & 0xff) == 0 && barrier >> 32 == 0) barrier = ((barrier & 1) ^ 1) | all << 8 | all << 16;
}
static void init_barrier(u64 &barrier, int arrivals) { barrier = (u64)arrivals << 8 | (u64)arrivals << 16; }
static void fence_barrier_init() {}
static void wait(u64 &barrier, u32 parity) { while ((barrier & 1) == parity) give_way(); }
static void arrive(u64 &barrier) { barrier -= 1 << 8, settle(barrier); }
static void arrive_expecting(u64 &barrier, u32 bytes) { barrier += (u64)bytes << 32, arrive(barrier); }
static u64 read_once() { return 0; }
static void copy_in(void *to, const void *from, u32 bytes, u64 &barrier, u64) {
    if ((u64)to % 16 || (u64)from % 16 || bytes % 16) abort();
    pending.push_back([=, &barrier] {
        memcpy(to, from, bytes);
        barrier -= (u64)bytes << 32, settle(barrier);
    });
}
static void sync_threads(int threads) { meet_of(block().part, threads); }
static u64 load_acquire(const u64 *at) { give_way(); return *at; }
static float wide(u32 bits, int which) { return __int_as_float(which ? bits & 0xffff0000u : bits << 16); }
static u16 rounded(float value) {
    const u32 bits = __float_as_int(value);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
// number(bits, which): the lower or the upper half of a register.
template <typename F>
static void multiply_as(F &&number, float4 &sum, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const u32 own[6] = {a0, a1, a2, a3, b0, b1};
    for (int i = 0; i < 6; ++i) put(own[i], i);
    meet_warp();
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float *sums[4] = {&sum.x, &sum.y, &sum.z, &sum.w};
    for (int at = 0; at < 4; ++at) {
        const int high = at / 2, column = 2 * t + at % 2;  // Of a row g, or g + 8.
        for (int k = 0; k < 16; ++k) {
            const u32 a = got<u32>(g * 4 + k % 8 / 2, high + 2 * (k / 8)), b = got<u32>(column * 4 + k % 8 / 2, 4 + k / 8);
            *sums[at] += number(a, k % 2) * number(b, k % 2);
        }
    }
    meet_warp();
}
static void multiply(float4 &sum, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    multiply_as(wide, sum, a0, a1, a2, a3, b0, b1);
}

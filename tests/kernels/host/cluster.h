// Replaces kernels/router/cluster.cuh on the host. All blocks of a launch are one cluster.

#define CLUSTERED
static void wait_for_previous_kernel() {}
static void allow_next_kernel() {}
static void cluster_arrive() {
    if (CLUSTER > 1) ++fibers[current].begun, ++everyone.there;
}
static void cluster_wait() {
    const int goal = fibers[current].begun * fibers.size();
    while (CLUSTER > 1 && everyone.there < goal) give_way();
}
static void or_into_block(unsigned &word, int other, unsigned bits) {
    const long offset = (unsigned char *)&word - block_memory();
    *(unsigned *)((unsigned char *)blocks[other].memory.data() + offset) |= bits;
}
template <typename T> static void add_into_block(T &word, int other, T more) {
    const long offset = (unsigned char *)&word - block_memory();
    *(T *)((unsigned char *)blocks[other].memory.data() + offset) += more;
}
static unsigned __reduce_or_sync(unsigned, unsigned v) { return fold(v, [](unsigned a, unsigned b) { return a | b; }); }
static unsigned atomicAdd(unsigned *at, unsigned more) { const unsigned old = *at; *at += more; return old; }
static int __ffsll(unsigned long long bits) { return __builtin_ffsll(bits); }

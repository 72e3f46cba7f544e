// What stands for kernels/router/cluster.cuh on the host: a cluster is the launch's blocks.

#define CLUSTERED
static void wait_for_last() {}
static void let_next_begin() {}
static void meet_begin() {
    if (CLUSTER > 1) ++fibers[current].begun, ++everyone.there;
}
static void meet_end() {
    const int goal = fibers[current].begun * fibers.size();
    while (CLUSTER > 1 && everyone.there < goal) give_way();
}
static void add_to(unsigned &word, int other, unsigned bits) {
    const long offset = (unsigned char *)&word - block_memory();
    *(unsigned *)((unsigned char *)blocks[other].memory.data() + offset) |= bits;
}
template <typename T> static void sum_to(T &word, int other, T more) {
    const long offset = (unsigned char *)&word - block_memory();
    *(T *)((unsigned char *)blocks[other].memory.data() + offset) += more;
}
static unsigned __reduce_or_sync(unsigned, unsigned v) { return fold(v, [](unsigned a, unsigned b) { return a | b; }); }
static unsigned atomicAdd(unsigned *at, unsigned more) { const unsigned old = *at; *at += more; return old; }
static int __ffsll(unsigned long long bits) { return __builtin_ffsll(bits); }

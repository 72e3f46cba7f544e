// Sums or gathers a few numbers of every rank. One thread block writes the numbers of its rank to the memory of every peer,
// then reads the peers' numbers from its own memory. The buffer of a rank: numbers [2][ranks][capacity], then one flag per
// rank.
//
// All calls are on one stream and are numbered. The numbers of call c are in half c % 2 of the buffer. A rank overwrites a
// half in call c + 2. This is safe: in call c + 1 it has waited for the flags of all peers, and a peer sets its flag of
// call c + 1 only after it has read the numbers of call c.

struct Arguments {
  const long long* mine;
  long long* out;
  const unsigned long long* buffers;  // the addresses of all ranks' buffers, as seen from this device
  unsigned int* calls;
  int rank, ranks, words, capacity, sum;
};

__device__ void write(long long* to, long long value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

__device__ long long read(const long long* from) {
  long long value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

extern "C" __global__ void __launch_bounds__(512) share(const Arguments a) {
  const unsigned int call = *a.calls + 1;
  const long long half = (call & 1) * (long long)a.ranks * a.capacity;
  const long long flags = 2ll * a.ranks * a.capacity;
  for (int i = threadIdx.x; i < a.ranks * a.words; i += blockDim.x) {
    const int peer = i / a.words, word = i % a.words;
    write((long long*)a.buffers[peer] + half + (long long)a.rank * a.capacity + word, a.mine[word]);
  }
  __syncthreads();
  if (threadIdx.x < a.ranks) {
    const int peer = threadIdx.x;
    unsigned int* theirs = (unsigned int*)((long long*)a.buffers[peer] + flags) + a.rank;
    const unsigned int* ours = (const unsigned int*)((long long*)a.buffers[a.rank] + flags) + peer;
    __threadfence_system();
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(theirs), "r"(call) : "memory");
    unsigned int seen;
    do {
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(ours) : "memory");
    } while ((int)(seen - call) < 0);
  }
  __syncthreads();
  const long long* got = (const long long*)a.buffers[a.rank] + half;
  if (a.sum) {
    for (int word = threadIdx.x; word < a.words; word += blockDim.x) {
      long long total = 0;
      for (int rank = 0; rank < a.ranks; ++rank) total += read(got + (long long)rank * a.capacity + word);
      a.out[word] = total;
    }
  } else {
    for (int i = threadIdx.x; i < a.ranks * a.words; i += blockDim.x)
      a.out[i] = read(got + (long long)(i / a.words) * a.capacity + i % a.words);
  }
  if (threadIdx.x == 0) *a.calls = call;
}

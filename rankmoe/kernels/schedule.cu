// The schedule of up to 64 tokens from ids that are already decided: one block, everything in shared memory.
//
// A thread has a slot at a time. Its bit goes into the expert's mask; a row is the expert's offset plus the population
// count of the mask's lower bits. Bits are set by atomic or, which gives the same masks in any order. The including side
// defines MAX_LOCAL_EXPERTS and, for the ids, ID_IS_64_BIT and IS_PACKED.

#define THREADS 1024
#define FULL_MASK 0xffffffffu

struct ScheduleArguments {
  const void* ids;
  const int* expert_map;  // or null
  unsigned long long* expert_token_mask;
  int* expert_offsets;
  int* row_tokens;
  int* slot_rows;
  long long token_stride;
  long long slot_stride;
  int num_tokens;
  int top_k;
  int num_experts;
  int local_expert_offset;
  int num_local_experts;
};

__device__ __forceinline__ int local_expert(const ScheduleArguments& a, int token, int slot) {
  const long long place = token * a.token_stride + slot * a.slot_stride;
#if ID_IS_64_BIT
  const long long id = ((const long long*)a.ids)[place];
#elif IS_PACKED
  const int id = ((const int*)a.ids)[place] >> 16;
#else
  const int id = ((const int*)a.ids)[place];
#endif
  if (id < 0 || id >= a.num_experts) return -1;
  const int local = a.expert_map ? a.expert_map[id] : (int)id - a.local_expert_offset;
  return local >= 0 && local < a.num_local_experts ? local : -1;
}

extern "C" __global__ void __launch_bounds__(THREADS) schedule(const __grid_constant__ ScheduleArguments a) {
  __shared__ unsigned long long mask[MAX_LOCAL_EXPERTS];
  __shared__ int offset[MAX_LOCAL_EXPERTS];
  __shared__ int warp_total[THREADS / 32];
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const int num_slots = a.num_tokens * a.top_k;
  for (int e = thread; e < a.num_local_experts; e += THREADS) mask[e] = 0;
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  // The first slot of each thread stays in a register between the two passes; more than 1024 slots are read again.
  const int own = thread < num_slots ? local_expert(a, thread / a.top_k, thread % a.top_k) : -1;
  __syncthreads();
  for (int s = thread; s < num_slots; s += THREADS) {
    const int e = s == thread ? own : local_expert(a, s / a.top_k, s % a.top_k);
    if (e >= 0) atomicOr(&mask[e], 1ull << (s / a.top_k));
  }
  __syncthreads();
  // Exclusive prefix sum of the counts, THREADS experts at a time.
  int num_rows = 0;
  for (int first = 0; first < a.num_local_experts; first += THREADS) {
    const int e = first + thread;
    const int count = e < a.num_local_experts ? __popcll(mask[e]) : 0;
    int sum = count;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
      const int below = __shfl_up_sync(FULL_MASK, sum, step);
      if (lane >= step) sum += below;
    }
    if (lane == 31) warp_total[warp] = sum;
    __syncthreads();
    const int totals = warp_total[lane];
    const int before = __reduce_add_sync(FULL_MASK, lane < warp ? totals : 0);
    if (e < a.num_local_experts) {
      offset[e] = num_rows + before + sum - count;
      a.expert_offsets[e] = offset[e];
      a.expert_token_mask[e] = mask[e];
    }
    num_rows += __reduce_add_sync(FULL_MASK, totals);
    __syncthreads();
  }
  if (thread == 0) a.expert_offsets[a.num_local_experts] = num_rows;
  for (int s = thread; s < num_slots; s += THREADS) {
    const int token = s / a.top_k;
    const int e = s == thread ? own : local_expert(a, token, s % a.top_k);
    int row = -1;
    if (e >= 0) {
      row = offset[e] + __popcll(mask[e] & ((1ull << token) - 1));
      a.row_tokens[row] = token;  // slots of one token that name one expert write the same
    }
    a.slot_rows[s] = row;
    if (s >= num_rows) a.row_tokens[s] = -1;
  }
}

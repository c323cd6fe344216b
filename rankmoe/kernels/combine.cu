// Expert rows to token rows: a token's slots are added in slot order in float32 and rounded once. No atomics.
//
// A block has one token and COLUMNS columns. It finds the row of each slot first, from the schedule's slot_rows or, where
// only the token masks were made, from them: an expert's first row is the population count of the masks before it. The
// including side defines:
//   FROM_MASKS, MAX_LOCAL_EXPERTS, MAX_TOP_K  sizes of the tables
//   OUT_BF16           1 bfloat16, 0 float32
//   VECTOR             columns that a thread reads at once: 4 where rows are aligned, else 1

#define FULL_MASK 0xffffffffu
#define THREADS 128
#define COLUMNS (THREADS * 4)
#define WARPS (THREADS / 32)

struct CombineArguments {
  const float* rows;          // [R, hidden_size], row_stride floats apart
  const float* topk_weights;  // [T, K]
  const int* slot_rows;       // [T, K]
  const unsigned long long* expert_token_mask;
  const int* topk_ids;    // [T, K], global
  const int* expert_map;  // [E], or null for a range
  void* out;              // [T, hidden_size]
  long long row_stride;
  int hidden_size;
  int top_k;
  int num_experts;
  int local_expert_offset;
  int num_local_experts;
  int is_chained;  // the schedule and the weights of the slots were there when the previous launch began
};

struct Shared {
  int row[MAX_TOP_K];
  float weight[MAX_TOP_K];
  int first_row[MAX_LOCAL_EXPERTS];
  int warp_total[WARPS];
};

__device__ __forceinline__ void wait_for_previous_launch() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

#if FROM_MASKS
// Exclusive prefix sum of the experts' rows.
__device__ __forceinline__ void list_rows(const CombineArguments& a, Shared& shared) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int before = 0;
  for (int first = 0; first < a.num_local_experts; first += THREADS) {
    const int expert = first + threadIdx.x;
    const int count = expert < a.num_local_experts ? __popcll(a.expert_token_mask[expert]) : 0;
    int sum = count;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
      const int lower = __shfl_up_sync(FULL_MASK, sum, step);
      if (lane >= step) sum += lower;
    }
    if (lane == 31) shared.warp_total[warp] = sum;
    __syncthreads();
    const int total = lane < WARPS ? shared.warp_total[lane] : 0;
    const int lower_warps = __reduce_add_sync(FULL_MASK, lane < warp ? total : 0);
    if (expert < a.num_local_experts) shared.first_row[expert] = before + lower_warps + sum - count;
    before += __reduce_add_sync(FULL_MASK, total);
    __syncthreads();
  }
}

__device__ __forceinline__ int find_row(const CombineArguments& a, const Shared& shared, int token, int slot) {
  const int id = a.topk_ids[token * a.top_k + slot];
  if (id < 0 || id >= a.num_experts) return -1;
  const int expert = a.expert_map ? a.expert_map[id] : id - a.local_expert_offset;
  if (expert < 0 || expert >= a.num_local_experts) return -1;
  const unsigned long long mask = a.expert_token_mask[expert], bit = 1ull << token;
  return mask & bit ? shared.first_row[expert] + __popcll(mask & (bit - 1)) : -1;
}
#endif

template <int N>
__device__ __forceinline__ void load(float (&value)[N], const float* source) {
  if constexpr (N == 4) {
    const float4 v = *(const float4*)source;
    value[0] = v.x, value[1] = v.y, value[2] = v.z, value[3] = v.w;
  } else {
    value[0] = *source;
  }
}

__device__ __forceinline__ unsigned short bf16_bits(float value) {
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return value != value ? (unsigned short)0x7fc0 : bits;
}

extern "C" __global__ void __launch_bounds__(THREADS) combine(const __grid_constant__ CombineArguments a) {
  __shared__ Shared shared;
  const int blocks_per_token = (a.hidden_size + COLUMNS - 1) / COLUMNS;
  const int token = blockIdx.x / blocks_per_token, first_column = blockIdx.x % blocks_per_token * COLUMNS;
  asm volatile("griddepcontrol.launch_dependents;");
  if (!a.is_chained) wait_for_previous_launch();
#if FROM_MASKS
  list_rows(a, shared);
#endif
  for (int slot = threadIdx.x; slot < a.top_k; slot += THREADS) {
#if FROM_MASKS
    shared.row[slot] = find_row(a, shared, token, slot);
#else
    shared.row[slot] = a.slot_rows[(long long)token * a.top_k + slot];
#endif
    shared.weight[slot] = a.topk_weights[(long long)token * a.top_k + slot];
  }
  __syncthreads();
  if (a.is_chained) wait_for_previous_launch();
  for (int column = first_column + threadIdx.x * VECTOR; column < min(first_column + COLUMNS, a.hidden_size);
       column += THREADS * VECTOR) {
    float total[VECTOR] = {};
    for (int slot = 0; slot < a.top_k; ++slot) {
      const int row = shared.row[slot];
      if (row < 0) continue;  // the weight of a slot that is not here may be NaN
      float value[VECTOR];
      load(value, a.rows + row * a.row_stride + column);
      // Rounded twice, as the rule has it: the product and the sum.
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) total[i] = __fadd_rn(total[i], __fmul_rn(shared.weight[slot], value[i]));
    }
    const long long place = (long long)token * a.hidden_size + column;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
#if OUT_BF16
      ((unsigned short*)a.out)[place + i] = bf16_bits(total[i]);
#else
      ((float*)a.out)[place + i] = total[i];
#endif
    }
  }
}

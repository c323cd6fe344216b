// Expert rows to token rows: a token's slots are added in slot order in float32 and rounded once. No atomics.
//
// A block has one token and COLUMNS columns. It finds the row of each slot first, from the schedule's slot_rows or, where
// only the token masks were made, from them: an expert's first row is the population count of the masks before it. Slots
// of other ranks drop out of the list, so that the loads of several rows are under way together. The including side
// defines:
//   FROM_MASKS, MAX_LOCAL_EXPERTS, MAX_TOP_K  sizes of the tables; a thread finds a slot's row, so MAX_TOP_K <= THREADS
//   OUT_BF16           1 bfloat16, 0 float32
//   VECTOR             columns that a thread reads at once: 4 where rows are aligned, else 1

#define FULL_MASK 0xffffffffu
#define THREADS 128
#define COLUMNS (THREADS * 4)
#define WARPS (THREADS / 32)
#define ROWS_AT_ONCE 4

static_assert(MAX_TOP_K <= THREADS, "a thread finds the row of a slot");

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

// Rows and weights of the token's slots that this rank computed, in slot order; returns how many. The weight of another
// slot may be NaN.
__device__ __forceinline__ int list_slots(const CombineArguments& a, Shared& shared, int token) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, slot = threadIdx.x;
  int row = -1;
  if (slot < a.top_k) {
#if FROM_MASKS
    row = find_row(a, shared, token, slot);
#else
    row = a.slot_rows[(long long)token * a.top_k + slot];
#endif
  }
  const unsigned has_row = __ballot_sync(FULL_MASK, row >= 0);
  if (lane == 0) shared.warp_total[warp] = __popc(has_row);
  __syncthreads();
  int place = __popc(has_row & ((1u << lane) - 1)), num_slots = 0;
  for (int other = 0; other < WARPS; ++other) {
    place += other < warp ? shared.warp_total[other] : 0;
    num_slots += shared.warp_total[other];
  }
  if (row >= 0) {
    shared.row[place] = row;
    shared.weight[place] = a.topk_weights[(long long)token * a.top_k + slot];
  }
  __syncthreads();
  return num_slots;
}

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
  const int num_slots = list_slots(a, shared, token);
  if (a.is_chained) wait_for_previous_launch();
  for (int column = first_column + threadIdx.x * VECTOR; column < min(first_column + COLUMNS, a.hidden_size);
       column += THREADS * VECTOR) {
    float total[VECTOR] = {};
    for (int first = 0; first < num_slots; first += ROWS_AT_ONCE) {
      float value[ROWS_AT_ONCE][VECTOR];
#pragma unroll
      for (int i = 0; i < ROWS_AT_ONCE; ++i) {
        if (first + i < num_slots) load(value[i], a.rows + shared.row[first + i] * a.row_stride + column);
      }
#pragma unroll
      for (int i = 0; i < ROWS_AT_ONCE; ++i) {
        if (first + i >= num_slots) break;
        // Rounded twice, as the rule has it: the product and the sum.
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
          total[j] = __fadd_rn(total[j], __fmul_rn(shared.weight[first + i], value[i][j]));
        }
      }
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

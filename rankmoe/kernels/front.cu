// One launch from router logits and hidden states to routing, packed ids, MXFP8 rows and the expert schedule.
//
// Blocks have roles. Block t < num_routing_blocks routes token t; one more block collects where SCHEDULE is 2; the rest
// quantise. Nothing is included, so the source compiles with NVRTC anywhere. The including side defines:
//   NUM_EXPERTS, TOP_K, HIDDEN_SIZE (0: no rows to quantise), LOGITS_BF16, HIDDEN_BF16, HAS_BIAS, HAS_MAP, HAS_NUM_VALID
//   SCORING            0 sigmoid, 1 softmax, 2 softmax over the selected
//   RENORMALIZE, NUM_GROUPS, TOPK_GROUPS, ORDER_BY_VALUE
//   PACK               0 no packed ids, 1 global, 2 rank-local
//   SCHEDULE           0 none, 1 token masks through a cluster, 2 masks and rows through a collecting block
//   CLUSTER            blocks of a cluster (1, 2, 4, 8) where SCHEDULE is 1; a cluster routes CLUSTER tokens
//   ROUTE_WARPS        warps of every block: 2, 4 or 8
//   VALUES             neighbouring experts that a routing thread holds: 4 or 8
//   VECTOR_LOADS       1 where logits, bias and map may be read four at a time
//   QUANT_CHUNKS       8-element chunks that a quantising thread has in flight
//   THRESHOLD          0 column ranks shared by the warps, 1 every warp ranks all columns
//   STOP_AFTER         measurement: 0 nothing but the launch, 1 loads, 2 scores and keys, 3 selection; 9 the kernel
//   PROFILE            measurement: 1 records the clock at the marks below
// docs/kernels.md, section "front", says why each step is what it is.

#define FULL_MASK 0xffffffffu
#define THREADS (ROUTE_WARPS * 32)
#define EXPERTS_PER_WARP (VALUES * 32)
#define PADDED_EXPERTS (EXPERTS_PER_WARP * ROUTE_WARPS)
#define CHUNKS_PER_ROW (HIDDEN_SIZE / 8)
#define INELIGIBLE ((int)0x80000000)  // below the key of every float
#define NAN_RANK_VALUE (-1e30f)

struct FrontArguments {
  const void* router_logits;
  const float* correction_bias;
  const void* hidden_states;
  const int* expert_map;
  const int* num_valid_tokens;  // the low word, if the integer is 64 bits wide
  float* topk_weights;
  int* topk_ids;
  int* packed;
  unsigned char* data;
  unsigned char* scale;
  unsigned long long* expert_token_mask;
  int* expert_offsets;
  int* row_tokens;
  int* slot_rows;
  unsigned* mailbox;  // [MAX_TOKENS * TOP_K], all zero between launches
  unsigned* profile;
  long long logits_stride;
  long long hidden_stride;
  int num_tokens;
  int local_expert_offset;
  int num_local_experts;
  int packed_offset;
  int packed_count;
  float routed_scaling_factor;
};

struct SharedRouting {
  alignas(16) int column_max[32];
  alignas(16) int column_rank[32];
  alignas(16) int warp_count[ROUTE_WARPS];
  alignas(16) float winner_score[32];
  int winner_id[32];
  int winner_key[32];
  float warp_value[ROUTE_WARPS];
  alignas(16) float score[PADDED_EXPERTS];
  int2 candidate[PADDED_EXPERTS];  // (key, id), one region a warp, ascending id
#if NUM_GROUPS > 1
  int key[PADDED_EXPERTS];
  int group_key[NUM_GROUPS];
  int is_group_kept[NUM_GROUPS];
#endif
#if HAS_MAP
  int local_expert[PADDED_EXPERTS];
#endif
#if SCHEDULE == 1
  unsigned token_bits[NUM_EXPERTS];  // in the first block of a cluster: bit i for token i of the cluster
  alignas(8) unsigned long long bits_barrier;  // completes when every slot of the cluster has sent its bit
#endif
#if PROFILE
  unsigned mark[16];
#endif
};

#if PROFILE
#define MARK_BY(thread, n) \
  if (threadIdx.x == thread) shared.mark[n] = clock_cycles()
#define MARK(n) MARK_BY(0, n)
__device__ __forceinline__ unsigned clock_cycles() {
  unsigned cycles;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(cycles)::"memory");
  return cycles;
}
#else
#define MARK_BY(thread, n)
#define MARK(n)
#endif

__device__ __forceinline__ void wait_for_previous_launch() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void allow_next_launch() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void prefetch_l2(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// ---------------------------------------------------------------------------------------------- scores and rank keys

__device__ __forceinline__ int key_of(float value) {
  value = value != value ? NAN_RANK_VALUE : value + 0.0f;  // the addition makes -0 equal to +0
  const int bits = __float_as_int(value);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

__device__ __forceinline__ float value_of(int key) { return __int_as_float(key ^ ((key >> 31) & 0x7fffffff)); }

// exp(x) = 2^t * (1 + rest): t is x * log2(e) rounded, rest makes up for the rounding.
__device__ __forceinline__ void exponent_parts(float x, float& t, float& rest) {
  t = x * 1.44269502f;
  rest = fmaf(x, 1.44269502f, -t);
  rest = fmaf(x, 1.92596303e-8f, rest) * 0.693147182f;
}

__device__ __forceinline__ float exp2_flushed(float t) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(t));
  return power;
}

__device__ __forceinline__ float reciprocal(float x) {  // 2^-115 < x < 2^115
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return fmaf(r, fmaf(-x, r, 1.0f), r);
}

// Within 4 ulp for |x| <= SIGMOID_RANGE; sigmoid_edge has the rest.
#define SIGMOID_RANGE 80.0f
__device__ __forceinline__ float sigmoid(float x) {
  float t, rest;
  exponent_parts(x, t, rest);
  const float power = exp2_flushed(-t);
  return reciprocal(1.0f + fmaf(power, -rest, power));
}

__device__ __forceinline__ float sigmoid_edge(float x) {
  if (x != x) return x;
  if (x > 0.0f) return 1.0f;
  if (x < -104.0f) return 0.0f;  // below half of the smallest subnormal
  float t, rest;
  exponent_parts(x, t, rest);
  const float power = exp2_flushed(-t - 64.0f);
  return reciprocal(fmaf(power, -rest, power)) * 5.42101086e-20f;  // 2^-64: the result may be subnormal
}

__device__ __forceinline__ float exp_of_difference(float x) {  // x <= 0 or NaN
  if (x < -104.0f) return 0.0f;
  float t, rest, power;
  exponent_parts(x, t, rest);
  asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(t));
  return fmaf(power, rest, power);
}

// True where the v-th expert of a thread exists; one test serves all where the experts fill whole threads.
__device__ __forceinline__ bool expert_exists(int first_expert, int v) {
  return PADDED_EXPERTS == NUM_EXPERTS || first_expert + (NUM_EXPERTS % VALUES ? v : 0) < NUM_EXPERTS;
}

// VALUES neighbouring entries of a row of 4-byte words; entries past the last expert become `missing`.
__device__ __forceinline__ void load_words(const int* row, int first_expert, int missing, int (&word)[VALUES]) {
#pragma unroll
  for (int v = 0; v < VALUES; v += 4) {
#if VECTOR_LOADS
    const bool exists = expert_exists(first_expert, v);
    const int4 four = exists ? *(const int4*)(row + first_expert + v) : make_int4(missing, missing, missing, missing);
    word[v] = four.x, word[v + 1] = four.y, word[v + 2] = four.z, word[v + 3] = four.w;
#else
#pragma unroll
    for (int i = v; i < v + 4; ++i) word[i] = expert_exists(first_expert, i) ? row[first_expert + i] : missing;
#endif
  }
}

__device__ __forceinline__ void load_logits(const void* row, int first_expert, float (&logit)[VALUES]) {
#if LOGITS_BF16
  const unsigned short* halves = (const unsigned short*)row;
#pragma unroll
  for (int v = 0; v < VALUES; v += 4) {
#if VECTOR_LOADS
    const bool exists = expert_exists(first_expert, v);
    const uint2 four = exists ? *(const uint2*)(halves + first_expert + v) : make_uint2(0, 0);
    logit[v] = __uint_as_float(four.x << 16), logit[v + 1] = __uint_as_float(four.x & 0xffff0000u);
    logit[v + 2] = __uint_as_float(four.y << 16), logit[v + 3] = __uint_as_float(four.y & 0xffff0000u);
#else
#pragma unroll
    for (int i = v; i < v + 4; ++i)
      logit[i] = expert_exists(first_expert, i) ? __uint_as_float((unsigned)halves[first_expert + i] << 16) : 0.0f;
#endif
  }
#else
  int word[VALUES];
  load_words((const int*)row, first_expert, 0, word);
#pragma unroll
  for (int v = 0; v < VALUES; ++v) logit[v] = __int_as_float(word[v]);
#endif
}

#if SCORING == 1
// Scores over all experts. A NaN anywhere makes every score NaN.
__device__ __forceinline__ void softmax_scores(SharedRouting& shared, float (&score)[VALUES], int first_expert) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int largest = INELIGIBLE;
#pragma unroll
  for (int v = 0; v < VALUES; ++v)
    if (expert_exists(first_expert, v)) largest = max(largest, key_of(score[v]));
  largest = __reduce_max_sync(FULL_MASK, largest);
  if (lane == 0) shared.warp_count[warp] = largest;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < ROUTE_WARPS; ++w) largest = max(largest, shared.warp_count[w]);
  const float top = value_of(largest);
  float sum = 0.0f;
#pragma unroll
  for (int v = 0; v < VALUES; ++v) {
    score[v] = expert_exists(first_expert, v) ? exp_of_difference(score[v] - top) : 0.0f;
    sum += score[v];
  }
#pragma unroll
  for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(FULL_MASK, sum, step);
  if (lane == 0) shared.warp_value[warp] = sum;
  __syncthreads();
  sum = 0.0f;
#pragma unroll
  for (int w = 0; w < ROUTE_WARPS; ++w) sum += shared.warp_value[w];
#pragma unroll
  for (int v = 0; v < VALUES; ++v) score[v] = __fdiv_rn(score[v], sum);
}
#endif

#if NUM_GROUPS > 1
// Make every expert outside the best groups ineligible. A group's value is the sum of its two best rank values.
__device__ __forceinline__ void keep_best_groups(SharedRouting& shared, int (&key)[VALUES], int first_expert) {
  constexpr int group_size = NUM_EXPERTS / NUM_GROUPS;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int v = 0; v < VALUES; ++v) shared.key[first_expert + v] = key[v];
  __syncthreads();
  for (int group = warp; group < NUM_GROUPS; group += ROUTE_WARPS) {
    int best = INELIGIBLE, second = INELIGIBLE;
    for (int i = lane; i < group_size; i += 32) {
      const int k = shared.key[group * group_size + i];
      second = max(second, min(best, k));
      best = max(best, k);
    }
    const int group_best = __reduce_max_sync(FULL_MASK, best);
    const int owner = __ffs(__ballot_sync(FULL_MASK, best == group_best)) - 1;
    const int group_second = __reduce_max_sync(FULL_MASK, lane == owner ? second : best);
    const float sum = group_size > 1 ? value_of(group_best) + value_of(group_second) : value_of(group_best);
    if (lane == 0) shared.group_key[group] = key_of(sum);
  }
  __syncthreads();
  for (int group = threadIdx.x; group < NUM_GROUPS; group += THREADS) {
    const int own = shared.group_key[group];
    int rank = 0;
    for (int other = 0; other < NUM_GROUPS; ++other) {
      const int k = shared.group_key[other];
      rank += k > own || (k == own && other < group);
    }
    shared.is_group_kept[group] = rank < TOPK_GROUPS;
  }
  __syncthreads();
#pragma unroll
  for (int v = 0; v < VALUES; ++v) {
    const int expert = first_expert + v;
    if (expert < NUM_EXPERTS && !shared.is_group_kept[expert / group_size]) key[v] = INELIGIBLE;
  }
}
#endif

// --------------------------------------------------------------------------------------------------------- selection

// count += a > b, as one comparison and one predicated addition.
__device__ __forceinline__ void count_greater(int& count, int a, int b) {
  asm("{.reg .pred greater;\n setp.gt.s32 greater, %1, %2;\n @greater add.s32 %0, %0, 1;}" : "+r"(count) : "r"(a), "r"(b));
}

// The same in the float pipe's adder, which is otherwise idle.
__device__ __forceinline__ void count_greater(float& count, int a, int b) {
  asm("{.reg .pred greater;\n setp.gt.s32 greater, %1, %2;\n @greater add.f32 %0, %0, 0f3F800000;}"
      : "+f"(count)
      : "r"(a), "r"(b));
}

// A column is a lane: the experts that lane holds in any warp. The K-th largest of the 32 column maxima. At least K keys reach it, and few more do.
__device__ __forceinline__ int find_threshold(SharedRouting& shared) {
  const int lane = threadIdx.x & 31;
  const int own = shared.column_max[lane];
#if THRESHOLD == 0
  constexpr int share = 32 / ROUTE_WARPS;  // columns that this warp compares with all
  const int* column = shared.column_max + (threadIdx.x >> 5) * share;
  int part[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < share; ++i) count_greater(part[i & 1], column[i], own);
  atomicAdd(&shared.column_rank[lane], part[0] + part[1]);
  __syncthreads();
  const int rank = shared.column_rank[lane];
#else
  float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < 32; ++i) count_greater(part[i & 3], shared.column_max[i], own);
  const float rank = (part[0] + part[1]) + (part[2] + part[3]);
#endif
  const int threshold = __reduce_min_sync(FULL_MASK, rank < TOP_K ? own : 0x7fffffff);
  return threshold == INELIGIBLE ? INELIGIBLE + 1 : threshold;
}

// Write the flagged (key, id) pairs of this warp into its region, ascending id; the count goes to warp_count.
__device__ __forceinline__ void gather_candidates(SharedRouting& shared, const int (&key)[VALUES], int threshold,
                                                  int first_expert) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const unsigned below = (1u << lane) - 1;
  int2* region = shared.candidate + warp * EXPERTS_PER_WARP;
  int position = 0;  // of the lane's first candidate: lanes hold ascending ids
#pragma unroll
  for (int v = 0; v < VALUES; ++v) position += __popc(__ballot_sync(FULL_MASK, key[v] >= threshold) & below);
  int2* place = region + position;
#pragma unroll
  for (int v = 0; v < VALUES; ++v)
    if (key[v] >= threshold) *place++ = make_int2(key[v], first_expert + v);
  if (lane == 31) shared.warp_count[warp] = (int)(place - region);
}

// Position i of the candidates, in ascending id, inside the regions.
__device__ __forceinline__ int candidate_index(const SharedRouting& shared, int i) {
  int start = 0, sum = 0;
#pragma unroll
  for (int w = 0; w < ROUTE_WARPS - 1; ++w) {
    sum += shared.warp_count[w];
    if (i >= sum) start = (w + 1) * EXPERTS_PER_WARP - sum;
  }
  return start + i;
}

// At most 32 candidates: one warp ranks them, one a lane.
__device__ __forceinline__ void select_in_warp(SharedRouting& shared, int total) {
  const int lane = threadIdx.x & 31;
  const unsigned below = (1u << lane) - 1;
  int2 own = make_int2(INELIGIBLE, 0);
  if (lane < total) own = shared.candidate[candidate_index(shared, lane)];
  const float score = shared.score[own.y];
  float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < 32; ++i) count_greater(part[i & 3], __shfl_sync(FULL_MASK, own.x, i), own.x);
  const float better = (part[0] + part[1]) + (part[2] + part[3]);
  bool is_winner = better < TOP_K && lane < total;
  unsigned winners = __ballot_sync(FULL_MASK, is_winner);
  if (__popc(winners) > TOP_K) {  // equal keys straddle the limit: the smaller ids stay
    const int rank = (int)better;
    const int last_rank = __reduce_max_sync(FULL_MASK, is_winner ? rank : -1);
    const bool is_last = is_winner && rank == last_rank;
    const unsigned last = __ballot_sync(FULL_MASK, is_last);
    is_winner = is_winner && (!is_last || __popc(last & below) < TOP_K - last_rank);
    winners = __ballot_sync(FULL_MASK, is_winner);
  }
  if (is_winner) {
    const int slot = __popc(winners & below);
    shared.winner_id[slot] = own.y;
    shared.winner_score[slot] = score;
#if ORDER_BY_VALUE
    shared.winner_key[slot] = own.x;
#endif
  }
}

// The sum of warp_count below this warp and over all warps; callers put barriers around it.
__device__ __forceinline__ int count_below(const SharedRouting& shared, int& total) {
  int below = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < ROUTE_WARPS; ++w) {
    if (w < (threadIdx.x >> 5)) below += shared.warp_count[w];
    total += shared.warp_count[w];
  }
  return below;
}

// Any number of candidates, by the whole block: many equal keys, a top_k near 32, or experts in few columns.
__device__ __noinline__ void select_in_block(SharedRouting& shared, int total) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const unsigned below = (1u << lane) - 1;
  // The threshold is the smallest candidate key. Where fewer than K keys exceed it, no ranking is needed.
  __shared__ int smallest, num_greater;
  __shared__ int2 list[PADDED_EXPERTS];
  if (threadIdx.x == 0) smallest = 0x7fffffff, num_greater = 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < total; i += THREADS) list[i] = shared.candidate[candidate_index(shared, i)];
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < total; i += THREADS) atomicMin(&smallest, list[i].x);
  __syncthreads();
  const int threshold = smallest;
#pragma unroll 1
  for (int i = threadIdx.x; i < total; i += THREADS)
    if (list[i].x > threshold) atomicAdd(&num_greater, 1);
  __syncthreads();
  const int greater = num_greater;
  int num_equal_before = 0, num_winners_before = 0;
#pragma unroll 1
  for (int start = 0; start < total; start += THREADS) {
    const int i = start + threadIdx.x;
    const int2 own = i < total ? list[i] : make_int2(INELIGIBLE, 0);
    bool is_winner;
    int sum;
    if (greater < TOP_K) {  // all that exceed the threshold, and the first of the rest
      const bool is_equal = own.x == threshold;
      const unsigned ballot = __ballot_sync(FULL_MASK, is_equal);
      if (lane == 0) shared.warp_count[warp] = __popc(ballot);
      __syncthreads();
      const int order = num_equal_before + count_below(shared, sum) + __popc(ballot & below);
      num_equal_before += sum;
      is_winner = own.x > threshold || (is_equal && order < TOP_K - greater);
      __syncthreads();
    } else {
      is_winner = own.x > threshold;
      if (__any_sync(FULL_MASK, is_winner)) {
        int rank = 0;
#pragma unroll 4
        for (int j = 0; j < total; ++j) {
          const int key = list[j].x;
          rank += key > own.x || (key == own.x && j < i);
        }
        is_winner = is_winner && rank < TOP_K;
      }
    }
    const unsigned ballot = __ballot_sync(FULL_MASK, is_winner);
    if (lane == 0) shared.warp_count[warp] = __popc(ballot);
    __syncthreads();
    const int slot = num_winners_before + count_below(shared, sum) + __popc(ballot & below);
    num_winners_before += sum;
    if (is_winner) {
      shared.winner_id[slot] = own.y;
      shared.winner_score[slot] = shared.score[own.y];
      shared.winner_key[slot] = own.x;
    }
    __syncthreads();
  }
}

// ----------------------------------------------------------------------------------------------------------- routing

#if SCHEDULE == 1
// Every slot sends one message to the first block of its cluster: this token's bit for the slot's expert, or no bits.
// The messages count themselves on that block's barrier, so no fence and no second cluster barrier is needed.
__device__ __forceinline__ void send_token_bit(SharedRouting& shared, int local_expert, unsigned bit) {
  const unsigned own = (unsigned)__cvta_generic_to_shared(&shared.token_bits[local_expert]);
#if CLUSTER > 1
  const unsigned own_barrier = (unsigned)__cvta_generic_to_shared(&shared.bits_barrier);
  unsigned bits, barrier;
  asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(bits) : "r"(own));
  asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(barrier) : "r"(own_barrier));
  asm volatile("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.or.b32 [%0], %1, [%2];" ::"r"(bits),
               "r"(bit), "r"(barrier)
               : "memory");
#else
  asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(own), "r"(bit) : "memory");
#endif
}

__device__ __forceinline__ void prepare_token_bits(const FrontArguments& a, SharedRouting& shared) {
#pragma unroll 1
  for (int i = threadIdx.x; i < a.num_local_experts || i == 0; i += THREADS) shared.token_bits[i] = 0;
#if CLUSTER > 1
  if (threadIdx.x == 0) {
    const unsigned barrier = (unsigned)__cvta_generic_to_shared(&shared.bits_barrier);
    const int num_senders = min(CLUSTER, a.num_tokens - (int)blockIdx.x / CLUSTER * CLUSTER);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(num_senders * TOP_K * 4)
                 : "memory");
  }
#endif
}

__device__ __forceinline__ void wait_for_token_bits(SharedRouting& shared) {
#if CLUSTER > 1
  const unsigned barrier = (unsigned)__cvta_generic_to_shared(&shared.bits_barrier);
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra again;}" ::"r"(barrier)
      : "memory");
#else
  __syncthreads();
#endif
}

// A cluster of 8 fills one byte of every mask, and the bytes that no token has are shared out; a cluster that is alone
// writes whole words.
__device__ __forceinline__ void write_masks(const FrontArguments& a, const SharedRouting& shared, int thread, int step) {
  const int num_clusters = (a.num_tokens + CLUSTER - 1) / CLUSTER, cluster = blockIdx.x / CLUSTER;
#pragma unroll 1
  for (int expert = thread; expert < a.num_local_experts; expert += step) {
    const unsigned bits = shared.token_bits[expert];
    if (num_clusters == 1) {
      a.expert_token_mask[expert] = bits;
    } else {
#pragma unroll 1
      for (int byte = cluster; byte < 8; byte += num_clusters)
        ((unsigned char*)(a.expert_token_mask + expert))[byte] = byte == cluster ? (unsigned char)bits : 0;
    }
  }
}
#endif

// Warp 0: from the winners in shared memory to everything that is written for the token.
__device__ __forceinline__ void finish_token(const FrontArguments& a, SharedRouting& shared, int token, bool is_valid) {
  const int lane = threadIdx.x & 31;
  const bool is_slot = lane < TOP_K;
#if ORDER_BY_VALUE
  {
    const int key = is_slot ? shared.winner_key[lane] : INELIGIBLE, id = shared.winner_id[lane];
    const float score = shared.winner_score[lane];
    int rank = 0;
#pragma unroll
    for (int i = 0; i < TOP_K; ++i) {
      const int other = __shfl_sync(FULL_MASK, key, i);
      rank += other > key || (other == key && i < lane);
    }
    __syncwarp();
    if (is_slot) shared.winner_id[rank] = id, shared.winner_score[rank] = score;
    __syncwarp();
  }
#endif
  const int id = is_slot ? shared.winner_id[lane] : 0;
#if SCHEDULE
#if HAS_MAP
  const int local_expert = shared.local_expert[id];
#else
  const int local_expert = id - a.local_expert_offset;
#endif
  const bool is_local = is_valid && is_slot && (unsigned)local_expert < (unsigned)a.num_local_experts;
#if SCHEDULE == 1
  if (is_slot) send_token_bit(shared, is_local ? local_expert : 0, is_local ? 1u << (token % CLUSTER) : 0);
#else
  if (is_slot)  // 1: nobody here computes this slot; else the local expert plus 2
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(a.mailbox + token * TOP_K + lane),
                 "r"(is_local ? local_expert + 2 : 1)
                 : "memory");
#endif
#endif
  MARK(7);
  float weight = is_slot ? shared.winner_score[lane] : 0.0f;
#if SCORING == 2
  {
    const float top = value_of(__reduce_max_sync(FULL_MASK, is_slot ? key_of(weight) : INELIGIBLE));
    weight = exp_of_difference(weight - top);
    __syncwarp();
    if (is_slot) shared.winner_score[lane] = weight;
    __syncwarp();
    float sum = shared.winner_score[0];
#pragma unroll
    for (int i = 1; i < TOP_K; ++i) sum += shared.winner_score[i];
    weight = __fdiv_rn(weight, sum);
    __syncwarp();
    if (is_slot) shared.winner_score[lane] = weight;
    __syncwarp();
  }
#endif
#if RENORMALIZE
  float total = shared.winner_score[0];  // in slot order: it is part of the rule
#pragma unroll
  for (int i = 1; i < TOP_K; ++i) total += shared.winner_score[i];
  weight = __fdiv_rn(weight, total > 0.0f ? total : 1.0f);
#endif
  weight *= a.routed_scaling_factor;
  MARK(8);
  if (!is_slot) return;  // callers synchronise the warp again
  const int slot = token * TOP_K + lane;
  weight = is_valid ? weight : 0.0f;
  const int global_id = is_valid ? id : -1;
  a.topk_weights[slot] = weight;
  a.topk_ids[slot] = global_id;
#if PACK
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(weight));
  int packed_id = global_id;
#if PACK == 2
  packed_id -= a.packed_offset;
  if ((unsigned)packed_id >= (unsigned)a.packed_count) packed_id = a.packed_count + lane;
#endif
  a.packed[slot] = (int)((unsigned)packed_id << 16 | bits);
#endif
}

__device__ __forceinline__ void route_token(const FrontArguments& a, SharedRouting& shared, int token) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int first_expert = threadIdx.x * VALUES;
  const char* row = (const char*)a.router_logits + token * a.logits_stride * (LOGITS_BF16 ? 2 : 4);
  float score[VALUES];
  load_logits(row, first_expert, score);
#if HAS_BIAS
  int bias[VALUES];
  load_words((const int*)a.correction_bias, first_expert, 0, bias);
#endif
#if HAS_MAP
  int local_expert[VALUES];
  load_words(a.expert_map, first_expert, -1, local_expert);
#pragma unroll
  for (int v = 0; v < VALUES; ++v) shared.local_expert[first_expert + v] = local_expert[v];
#endif
  bool is_valid = true;
#if HAS_NUM_VALID
  is_valid = token < *a.num_valid_tokens;
#endif
#if STOP_AFTER == 1
  float sum = 0.0f;
#pragma unroll
  for (int v = 0; v < VALUES; ++v) sum += score[v];
#if HAS_BIAS
#pragma unroll
  for (int v = 0; v < VALUES; ++v) sum += __int_as_float(bias[v]);
#endif
  if (warp == 0) a.topk_weights[token * TOP_K + lane % TOP_K] = sum;
  return;
#endif
#if SCORING == 0
  bool is_edge = false;
#pragma unroll
  for (int v = 0; v < VALUES; ++v) is_edge |= !(fabsf(score[v]) <= SIGMOID_RANGE);
  if (is_edge) {  // rare: a loop through shared memory keeps the code small
#pragma unroll
    for (int v = 0; v < VALUES; ++v) shared.score[first_expert + v] = score[v];
#pragma unroll 1
    for (int v = 0; v < VALUES; ++v) {
      const float logit = shared.score[first_expert + v];
      shared.score[first_expert + v] = fabsf(logit) <= SIGMOID_RANGE ? sigmoid(logit) : sigmoid_edge(logit);
    }
#pragma unroll
    for (int v = 0; v < VALUES; ++v) score[v] = shared.score[first_expert + v];
  } else {
#pragma unroll
    for (int v = 0; v < VALUES; ++v) score[v] = sigmoid(score[v]);
  }
#elif SCORING == 1
  softmax_scores(shared, score, first_expert);
#endif
  MARK(2);
  int key[VALUES];
#pragma unroll
  for (int v = 0; v < VALUES; ++v) {
    const int expert = first_expert + v;
    shared.score[expert] = score[v];
#if HAS_BIAS
    key[v] = key_of(score[v] + __int_as_float(bias[v]));
#else
    key[v] = key_of(score[v]);
#endif
    if (!expert_exists(first_expert, v)) key[v] = INELIGIBLE;
  }
#if NUM_GROUPS > 1
  keep_best_groups(shared, key, first_expert);
#endif
  int largest = key[0];
#pragma unroll
  for (int v = 1; v < VALUES; ++v) largest = max(largest, key[v]);
#if STOP_AFTER == 2
  if (warp == 0) a.topk_ids[token * TOP_K + lane % TOP_K] = largest;
  return;
#endif
  atomicMax(&shared.column_max[lane], largest);
  __syncthreads();
  MARK(3);
  const int threshold = find_threshold(shared);
  MARK(4);
  gather_candidates(shared, key, threshold, first_expert);
  __syncthreads();
  MARK(5);
  int total = 0;
#pragma unroll
  for (int w = 0; w < ROUTE_WARPS; ++w) total += shared.warp_count[w];
  if (total > 32) {
    select_in_block(shared, total);
  } else if (warp == 0) {
    select_in_warp(shared, total);
    __syncwarp();
  }
  MARK(6);
#if STOP_AFTER == 3
  if (threadIdx.x < TOP_K) a.topk_ids[token * TOP_K + lane] = shared.winner_id[lane];
  return;
#endif
  if (warp == 0) finish_token(a, shared, token, is_valid);
  __syncwarp();
}

// ------------------------------------------------------------------------------------------------------ quantisation

__device__ __forceinline__ unsigned max_pairs(unsigned a, unsigned b) {
  unsigned r;
  asm("max.u16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

__device__ __forceinline__ unsigned short e4m3_pair(float low, float high) {
  unsigned short codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}

#if HIDDEN_SIZE
// Four lanes share a group of 32; a thread has QUANT_CHUNKS chunks of 8 elements in flight.
__device__ __forceinline__ void quantize_rows(const FrontArguments& a, int block) {
  constexpr int words = HIDDEN_BF16 ? 4 : 8;
  const int num_chunks = a.num_tokens * CHUNKS_PER_ROW;
  const int first = block * THREADS * QUANT_CHUNKS + threadIdx.x;
  uint4 loaded[QUANT_CHUNKS][words / 4];
#pragma unroll
  for (int c = 0; c < QUANT_CHUNKS; ++c) {
    const int chunk = first + c * THREADS;
#pragma unroll
    for (int w = 0; w < words / 4; ++w) loaded[c][w] = make_uint4(0, 0, 0, 0);
    if (chunk < num_chunks) {
      const int row = chunk / CHUNKS_PER_ROW, column = chunk % CHUNKS_PER_ROW;
      const char* address = (const char*)a.hidden_states + row * a.hidden_stride * (HIDDEN_BF16 ? 2 : 4);
#pragma unroll
      for (int w = 0; w < words / 4; ++w) loaded[c][w] = ((const uint4*)address)[column * (words / 4) + w];
    }
  }
#if HAS_NUM_VALID
  const int num_valid = *a.num_valid_tokens;
#endif
#if STOP_AFTER == 1
#pragma unroll
  for (int c = 0; c < QUANT_CHUNKS; ++c)
    if (first + c * THREADS < num_chunks)
      ((uint2*)a.data)[first + c * THREADS] = make_uint2(loaded[c][0].x ^ loaded[c][0].y, loaded[c][0].z ^ loaded[c][0].w);
  return;
#endif
#pragma unroll
  for (int c = 0; c < QUANT_CHUNKS; ++c) {
    const int chunk = first + c * THREADS;
    unsigned bits[words];
#pragma unroll
    for (int w = 0; w < words / 4; ++w) {
      bits[4 * w] = loaded[c][w].x, bits[4 * w + 1] = loaded[c][w].y;
      bits[4 * w + 2] = loaded[c][w].z, bits[4 * w + 3] = loaded[c][w].w;
    }
#if HAS_NUM_VALID
    const bool is_valid = chunk / CHUNKS_PER_ROW < num_valid;
#pragma unroll
    for (int w = 0; w < words; ++w) bits[w] = is_valid ? bits[w] : 0;
#endif
    // Largest magnitude as bits, in which NaN is above infinity is above every finite value.
    float element[8];
#if HIDDEN_BF16
    unsigned pair = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      pair = max_pairs(pair, bits[w] & 0x7fff7fffu);
      element[2 * w] = __uint_as_float(bits[w] << 16);
      element[2 * w + 1] = __uint_as_float(bits[w] & 0xffff0000u);
    }
    pair = max_pairs(pair, __shfl_xor_sync(FULL_MASK, pair, 1));
    pair = max_pairs(pair, __shfl_xor_sync(FULL_MASK, pair, 2));
    unsigned amax = max(pair << 16, pair & 0xffff0000u);
#else
    unsigned amax = 0;
#pragma unroll
    for (int w = 0; w < 8; ++w) {
      amax = max(amax, bits[w] & 0x7fffffffu);
      element[w] = __uint_as_float(bits[w]);
    }
    amax = max(amax, __shfl_xor_sync(FULL_MASK, amax, 1));
    amax = max(amax, __shfl_xor_sync(FULL_MASK, amax, 2));
#endif
    const bool is_finite = amax < 0x7f800000u;
    amax = max(amax, 0x2edbe6ffu);  // 1e-10
    // amax = m * 2^k with m in [1, 2): the scale is 2^(k - 8), one more where m > 1.75 (mantissa above 0x600000).
    const unsigned scale = ((amax + 0x1fffffu) >> 23) - 8;
    const float reciprocal_scale = __uint_as_float((254 - scale) << 23);
    unsigned codes[2];
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      const unsigned low = e4m3_pair(element[4 * w] * reciprocal_scale, element[4 * w + 1] * reciprocal_scale);
      const unsigned high = e4m3_pair(element[4 * w + 2] * reciprocal_scale, element[4 * w + 3] * reciprocal_scale);
      codes[w] = is_finite ? low | high << 16 : 0x7f7f7f7fu;
    }
    if (chunk < num_chunks) {
      ((uint2*)a.data)[chunk] = make_uint2(codes[0], codes[1]);
      if ((chunk & 3) == 0) a.scale[chunk >> 2] = is_finite ? (unsigned char)scale : 255;
    }
  }
}
#endif

// -------------------------------------------------------------------------------------------------------- collecting

#if SCHEDULE == 2
// One block takes every slot's message out of the mailbox, leaves it empty, and writes the schedule.
__device__ __forceinline__ void collect_schedule(const FrontArguments& a) {
  constexpr int messages = (64 * TOP_K + THREADS - 1) / THREADS;
  constexpr int experts_per_thread = (NUM_EXPERTS + THREADS - 1) / THREADS;
  __shared__ unsigned token_bits[NUM_EXPERTS][2];
  __shared__ int offset[NUM_EXPERTS];
  __shared__ int warp_rows[ROUTE_WARPS];
  __shared__ unsigned short received[64 * TOP_K];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int num_slots = a.num_tokens * TOP_K;
  for (int i = threadIdx.x; i < NUM_EXPERTS; i += THREADS) token_bits[i][0] = token_bits[i][1] = 0;
  __syncthreads();
  allow_next_launch();
  wait_for_previous_launch();
  unsigned message[messages];
  bool is_missing;
  do {
    is_missing = false;
#pragma unroll
    for (int m = 0; m < messages; ++m) {
      const int slot = threadIdx.x + m * THREADS;
      message[m] = 1;
      if (slot < num_slots)
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(message[m]) : "l"(a.mailbox + slot) : "memory");
    }
#pragma unroll
    for (int m = 0; m < messages; ++m) is_missing |= message[m] == 0;
  } while (is_missing);
#pragma unroll
  for (int m = 0; m < messages; ++m) {
    const int slot = threadIdx.x + m * THREADS, token = slot / TOP_K;
    if (slot < num_slots) {
      a.mailbox[slot] = 0;
      received[slot] = message[m];
    }
    if (message[m] > 1) atomicOr(&token_bits[message[m] - 2][token >> 5], 1u << (token & 31));
  }
  __syncthreads();
  int count[experts_per_thread], rows = 0;
#pragma unroll
  for (int e = 0; e < experts_per_thread; ++e) {
    const int expert = threadIdx.x * experts_per_thread + e;
    count[e] = 0;
    if (expert < a.num_local_experts) {
      const unsigned low = token_bits[expert][0], high = token_bits[expert][1];
      a.expert_token_mask[expert] = (unsigned long long)high << 32 | low;
      count[e] = __popc(low) + __popc(high);
    }
    rows += count[e];
  }
  if (!a.expert_offsets) return;
  int row = rows;  // inclusive prefix sum
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const int lower = __shfl_up_sync(FULL_MASK, row, step);
    if (lane >= step) row += lower;
  }
  if (lane == 31) warp_rows[warp] = row;
  __syncthreads();
  row -= rows;
  int num_rows = 0;
#pragma unroll
  for (int w = 0; w < ROUTE_WARPS; ++w) {
    if (w < warp) row += warp_rows[w];
    num_rows += warp_rows[w];
  }
#pragma unroll
  for (int e = 0; e < experts_per_thread; ++e) {
    const int expert = threadIdx.x * experts_per_thread + e;
    if (expert < a.num_local_experts) {
      offset[expert] = row;
      a.expert_offsets[expert] = row;
    }
    row += count[e];
  }
  if (threadIdx.x == 0) a.expert_offsets[a.num_local_experts] = num_rows;
  __syncthreads();
#pragma unroll 2
  for (int slot = threadIdx.x; slot < num_slots; slot += THREADS) {
    const int expert = received[slot] - 2, token = slot / TOP_K;
    int slot_row = -1;
    if (expert >= 0) {
      const unsigned low = token_bits[expert][0], high = token_bits[expert][1];
      const unsigned below = (1u << (token & 31)) - 1;
      slot_row = offset[expert] + (token < 32 ? __popc(low & below) : __popc(low) + __popc(high & below));
      a.row_tokens[slot_row] = token;
    }
    a.slot_rows[slot] = slot_row;
    if (slot >= num_rows) a.row_tokens[slot] = -1;
  }
}
#endif

// ------------------------------------------------------------------------------------------------------------ kernel

extern "C" __global__ void __launch_bounds__(THREADS)
#if SCHEDULE == 1 && CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
        front(const __grid_constant__ FrontArguments a) {
#if STOP_AFTER == 0
  allow_next_launch();
  wait_for_previous_launch();
#else
#if SCHEDULE == 1
  const int num_routing_blocks = (a.num_tokens + CLUSTER - 1) / CLUSTER * CLUSTER;
#else
  const int num_routing_blocks = a.num_tokens;
#endif
  const int block = blockIdx.x;
  if (block >= num_routing_blocks) {
#if SCHEDULE == 2
    if (block == num_routing_blocks) {
      collect_schedule(a);
      return;
    }
#endif
    allow_next_launch();
    wait_for_previous_launch();
#if HIDDEN_SIZE
    quantize_rows(a, block - num_routing_blocks - (SCHEDULE == 2));
#endif
    return;
  }
  __shared__ SharedRouting shared;
  MARK(0);
#if HAS_BIAS
  if (threadIdx.x * 32 < NUM_EXPERTS) prefetch_l2(a.correction_bias + threadIdx.x * 32);
#endif
  if (threadIdx.x < 32) {
    shared.column_max[threadIdx.x] = INELIGIBLE;
    shared.column_rank[threadIdx.x] = 0;
  }
#if SCHEDULE == 1
  prepare_token_bits(a, shared);
#endif
  __syncthreads();
  allow_next_launch();
#if SCHEDULE == 1 && CLUSTER > 1
  cluster_arrive();
  cluster_wait();  // the first block's bits and barrier are ready for every block
#endif
  wait_for_previous_launch();
  MARK(1);
  if (block < a.num_tokens) route_token(a, shared, block);
#if SCHEDULE == 1 && STOP_AFTER == 9
  if (block % CLUSTER == 0) {
    if (threadIdx.x >= 32 || CLUSTER == 1) wait_for_token_bits(shared);
    MARK_BY(32, 9);
    if (threadIdx.x >= 32) write_masks(a, shared, threadIdx.x - 32, THREADS - 32);
  }
#endif
#if PROFILE
  MARK(10);
  __syncthreads();
  if (threadIdx.x == 0)
    for (int i = 0; i < 16; ++i) a.profile[blockIdx.x * 16 + i] = shared.mark[i];
#endif
#endif
}

// One expert GEMM of a decode step: MXFP8 rows by MXFP4 weights, read once, in float32 accumulation of exact products.
//
// The same source is gate_up (activation and requantisation in its epilogue) and down. Work is a list of items, one for
// each (active expert, group of up to ROWS rows, tile of 64 outputs); a block takes a contiguous part of it. The multiplying
// warps of a block share an item's input dimension in steps of 128; each streams its own part of the weights through its
// own ring of bulk copies, decodes it to bfloat16 in registers and multiplies it by the rows, which lie in shared memory.
// The finishing warps add the parts up and write the item's outputs, while the others are at the next item.
// Nothing is included, so the source compiles with NVRTC anywhere. Prepended: experts_common.cuh. The including side defines,
// beside what that wants:
//   MAX_LOCAL_EXPERTS  size of the tables in shared memory
//   WARPS, DEPTH, ROWS multiplying warps of a block, ring slots (steps) of a warp, most rows of an item (4, 8 or 16)
//   FINISHERS, BUFFERS finishing warps of a block, items whose parts wait for them
//   BLOCKS             blocks that share a multiprocessor
//   FROM_MASKS         1 rows come from token masks, 0 from offsets and row tokens
// docs/kernels.md, section "Expert GEMMs", says why each step is what it is.

#define THREADS ((WARPS + FINISHERS) * 32)
#define PADDED_INPUTS (STEPS * STEP)
#define PARTIALS (STEPS < WARPS ? STEPS : WARPS)  // warps that have a part of an item
#define ROW_BYTES (PADDED_INPUTS * 2)

struct ExpertsArguments {
  const unsigned char* weights;  // [L, TILES, STEPS, 2, HALF_BYTES]
  const float* factor;           // [L]
  const float* bias;             // [L, NUM_OUTPUTS], gate_up in checkpoint order
  const unsigned char* data;     // [rows, NUM_INPUTS] e4m3
  const unsigned char* scale;    // [rows, NUM_INPUTS / 32]
  const unsigned long long* expert_token_mask;
  const int* expert_offsets;
  const int* row_tokens;
  float* rows;                    // down: [R, NUM_OUTPUTS]
  unsigned char* middle;          // gate_up: [R, NUM_OUTPUTS / 2]
  unsigned char* middle_scale;    // gate_up: [R, NUM_OUTPUTS / 64]
  int num_local_experts;
  int is_chained;                 // the previous launch of the stream read the same schedule
  float activation[4];            // beta, linear_beta and their reciprocals; or alpha, limit, up_offset
};

struct Shared {
  alignas(128) unsigned char ring[WARPS][DEPTH][SLOT_BYTES];
  alignas(128) unsigned char inputs[ROWS][ROW_BYTES];  // bfloat16, 16-byte pieces of a group swizzled
  alignas(16) float partial[BUFFERS][PARTIALS][ROWS][TILE];
  alignas(8) unsigned long long is_full[WARPS][DEPTH];
  unsigned long long is_summed[BUFFERS];    // every part of an item lies in partial
  unsigned long long is_finished[BUFFERS];  // and was read
  int first_item[MAX_LOCAL_EXPERTS + 1];
  int first_row[MAX_LOCAL_EXPERTS + 1];
  int warp_total[WARPS + FINISHERS][2];
};

__device__ __forceinline__ void copy_in(unsigned destination, const unsigned char* source, unsigned barrier,
                                        unsigned long long policy) {
  expect_bytes(barrier, SLOT_BYTES);
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          destination),
      "l"(source), "r"(SLOT_BYTES), "r"(barrier), "l"(policy)
      : "memory");
}

// The four words stay as they are where the condition does not hold.
__device__ __forceinline__ void load_shared_if(bool condition, unsigned address, unsigned& x, unsigned& y, unsigned& z, unsigned& w) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n @p ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(x), "+r"(y), "+r"(z), "+r"(w)
      : "r"(address), "r"((unsigned)condition));
}

__device__ __forceinline__ void multiply_add(float (&sum)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                             unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ unsigned long long evict_first() {
  unsigned long long policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void synchronize_multiplying() { asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory"); }

// ------------------------------------------------------------------------------------------------------------- inputs

// The piece-th 16 bytes of a group, moved so that the eight threads of a load phase meet eight different banks.
__device__ __forceinline__ unsigned piece_offset(int row, int group, int piece) {
  return row * ROW_BYTES + group * 64 + ((piece ^ ((group >> 1 & 1) | (row & 1) << 1)) << 4);
}

// The place of the n-th set bit.
__device__ __forceinline__ int nth_bit(unsigned long long bits, int n) {
  for (; n > 0; --n) bits &= bits - 1;
  return __ffsll(bits) - 1;
}

__device__ __forceinline__ void load_inputs(const ExpertsArguments& a, Shared& shared, int expert, int first_row,
                                            int group, int num_rows) {
  constexpr int chunks = PADDED_INPUTS / 16;  // of 16 elements, half a scale group
#if GATE_UP && FROM_MASKS
  const unsigned long long mask = a.expert_token_mask[expert];
#endif
  for (int i = threadIdx.x; i < num_rows * chunks; i += WARPS * 32) {
    const int row = i / chunks, chunk = i % chunks;
    uint4 codes = make_uint4(0, 0, 0, 0);
    float scale = 0;
    if (chunk * 16 < NUM_INPUTS) {
#if !GATE_UP
      const long long source = first_row + row;
#elif FROM_MASKS
      const long long source = nth_bit(mask, group * ROWS + row);
#else
      const long long source = a.row_tokens[first_row + row];
#endif
      codes = *(const uint4*)(a.data + source * NUM_INPUTS + chunk * 16);
      scale = scale_of(a.scale[source * (NUM_INPUTS / 32) + (chunk >> 1)]);
    }
    const unsigned word[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 out;
      out.x = widen_pair(word[2 * half], scale);
      out.y = widen_pair(word[2 * half] >> 16, scale);
      out.z = widen_pair(word[2 * half + 1], scale);
      out.w = widen_pair(word[2 * half + 1] >> 16, scale);
      *(uint4*)(&shared.inputs[0][0] + piece_offset(row, chunk >> 1, (chunk & 1) * 2 + half)) = out;
    }
  }
}

// ----------------------------------------------------------------------------------------------------------- epilogue

// Where a part keeps a column's output: moved so that neither the stores of the accumulators nor loads meet in a bank.
__device__ __forceinline__ int partial_place(int column, int output) { return column * TILE + (output ^ (column >> 1) * 8); }

// A column's sum over the parts of the input dimension, in their order.
__device__ __forceinline__ float total(const float* partial, int column, int output) {
  float sum = 0;
#pragma unroll
  for (int p = 0; p < PARTIALS; ++p) sum += partial[p * ROWS * TILE + partial_place(column, output)];
  return sum;
}

#if GATE_UP
// A warp finishes one row's 32 columns, one MXFP8 group.
__device__ __forceinline__ void finish_row(const ExpertsArguments& a, const float* partial, int expert, int tile,
                                           int column, long long row) {
  constexpr int width = NUM_OUTPUTS / 2;
  const int lane = threadIdx.x & 31;
  float gate = total(partial, column, lane), up = total(partial, column, 32 + lane);
#if HAS_FACTOR
  gate *= a.factor[expert];
  up *= a.factor[expert];
#endif
#if HAS_BIAS
  gate += a.bias[(long long)expert * NUM_OUTPUTS + tile * 32 + lane];
  up += a.bias[(long long)expert * NUM_OUTPUTS + width + tile * 32 + lane];
#endif
  const float value = activate(a.activation, gate, up);
  const unsigned amax = __reduce_max_sync(FULL_MASK, __float_as_uint(value) & 0x7fffffffu);
  const bool is_finite = amax < 0x7f800000u;
  const unsigned scale = mxfp8_scale(amax);
  const unsigned codes = e4m3_pair(value * __uint_as_float((254 - scale) << 23), 0);
  a.middle[row * width + tile * 32 + lane] = is_finite ? (unsigned char)codes : 0x7f;
  if (lane == 0) a.middle_scale[row * (width / 32) + tile] = is_finite ? (unsigned char)scale : 255;
}
#else
__device__ __forceinline__ void finish_row(const ExpertsArguments& a, const float* partial, int expert, int tile,
                                           int column, long long row) {
#pragma unroll
  for (int output = threadIdx.x & 31; output < TILE; output += 32) {
    const int place = tile * TILE + output;
    if (NUM_OUTPUTS % TILE == 0 || place < NUM_OUTPUTS) {
      float value = total(partial, column, output);
#if HAS_FACTOR
      value *= a.factor[expert];
#endif
#if HAS_BIAS
      value += a.bias[(long long)expert * NUM_OUTPUTS + place];
#endif
      a.rows[row * NUM_OUTPUTS + place] = value;
    }
  }
}
#endif

// --------------------------------------------------------------------------------------------------------- work items

// Prefix sums of rows and of items over the experts.
__device__ __forceinline__ void list_items(const ExpertsArguments& a, Shared& shared) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int rows_before = 0, items_before = 0;
  for (int first = 0; first < a.num_local_experts; first += THREADS) {
    const int expert = first + threadIdx.x;
    int count = 0;
    if (expert < a.num_local_experts) {
#if FROM_MASKS
      count = __popcll(a.expert_token_mask[expert]);
#else
      count = a.expert_offsets[expert + 1] - a.expert_offsets[expert];
#endif
    }
    const int items = (count + ROWS - 1) / ROWS * TILES;
    int row = count, item = items;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
      const int lower_row = __shfl_up_sync(FULL_MASK, row, step), lower_item = __shfl_up_sync(FULL_MASK, item, step);
      if (lane >= step) {
        row += lower_row;
        item += lower_item;
      }
    }
    if (lane == 31) {
      shared.warp_total[warp][0] = row;
      shared.warp_total[warp][1] = item;
    }
    __syncthreads();
    const int warp_rows = lane < WARPS + FINISHERS ? shared.warp_total[lane][0] : 0;
    const int warp_items = lane < WARPS + FINISHERS ? shared.warp_total[lane][1] : 0;
    row += rows_before + __reduce_add_sync(FULL_MASK, lane < warp ? warp_rows : 0);
    item += items_before + __reduce_add_sync(FULL_MASK, lane < warp ? warp_items : 0);
    if (expert < a.num_local_experts) {
      shared.first_row[expert] = row - count;
      shared.first_item[expert] = item - items;
    }
    rows_before += __reduce_add_sync(FULL_MASK, warp_rows);
    items_before += __reduce_add_sync(FULL_MASK, warp_items);
    if (threadIdx.x == 0 && first + THREADS >= a.num_local_experts) {
      shared.first_row[a.num_local_experts] = rows_before;
      shared.first_item[a.num_local_experts] = items_before;
    }
    __syncthreads();
  }
}

// The expert of an item.
__device__ __forceinline__ int search_expert(const Shared& shared, int num_experts, int item) {
  int low = 0, high = num_experts - 1;
  while (low < high) {
    const int middle = (low + high) >> 1;
    if (item >= shared.first_item[middle + 1]) low = middle + 1;
    else high = middle;
  }
  return low;
}

// Items of one expert and row group that follow each other: their weights do, too.
struct Run {
  int first, tiles;  // items
  int expert, group, tile;

  // The run that starts with an item below end; its expert is the given one or a later one.
  __device__ __forceinline__ Run(const Shared& shared, int item, int end, int from_expert)
      : first(item), tiles(0), expert(from_expert), group(0), tile(0) {
    if (item >= end) return;
    while (item >= shared.first_item[expert + 1]) ++expert;
    const int place = item - shared.first_item[expert];
    group = place / TILES;
    tile = place % TILES;
    tiles = min(TILES - tile, end - item);
  }
  __device__ __forceinline__ Run next(const Shared& shared, int end) const { return Run(shared, first + tiles, end, expert); }
};

// A warp's walk over its steps, ahead of the arithmetic by the depth of the ring.
struct Stream {
  Run run;
  int step;  // of the run
  const unsigned char* source;

  __device__ __forceinline__ bool is_done() const { return run.tiles == 0; }
  __device__ __forceinline__ void find(const ExpertsArguments& a, const Shared& shared, int end) {
    while (run.tiles && step >= run.tiles * STEPS) {
      step -= run.tiles * STEPS;
      run = run.next(shared, end);
    }
    source = a.weights + (((long long)run.expert * TILES + run.tile) * STEPS + step) * SLOT_BYTES;
  }
  __device__ __forceinline__ void advance(const ExpertsArguments& a, const Shared& shared, int end) {
    step += WARPS;
    source += WARPS * SLOT_BYTES;
    if (step >= run.tiles * STEPS) find(a, shared, end);
  }
};

// Where a multiplying warp is in its ring, in the steps of an item and in the buffers of parts.
struct Place {
  int slot, parity, step, buffer, buffer_parity;
};

// The tiles of a run, by eight rows of the item (OCTETS 1) or by sixteen.
template <int OCTETS>
__device__ __forceinline__ void multiply_run(const ExpertsArguments& a, Shared& shared, Stream& stream, const Run& run, int end,
                                             int num_rows, Place& place, unsigned long long policy) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad_row = lane >> 2, quad_thread = lane & 3;
  const unsigned ring = shared_address(shared.ring[warp]), barriers = shared_address(shared.is_full[warp]);
  unsigned inputs[4];
#pragma unroll
  for (int piece = 0; piece < 4; ++piece) inputs[piece] = shared_address(shared.inputs) + piece_offset(quad_row, quad_thread, piece);
  // Columns without a row multiply zeros: their sums are never used, and zeros take less power.
  unsigned input[OCTETS][16] = {};
  for (int tile = 0; tile < run.tiles; ++tile) {
    float sum[OCTETS][4][4] = {};
    const int part = place.step;
    for (; place.step < STEPS; place.step += WARPS) {
      const unsigned base = ring + place.slot * SLOT_BYTES;
#pragma unroll
      for (int octet = 0; octet < OCTETS; ++octet)
#pragma unroll
        for (int piece = 0; piece < 4; ++piece) {
          unsigned(&v)[16] = input[octet];
          load_shared_if(8 * octet + quad_row < num_rows, inputs[piece] + 8 * octet * ROW_BYTES + place.step * (STEP * 2),
                         v[4 * piece], v[4 * piece + 1], v[4 * piece + 2], v[4 * piece + 3]);
        }
      wait_for(barriers + 8 * place.slot, place.parity);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned scales;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(scales) : "r"(base + half * HALF_BYTES + 2048 + lane * 4));
        unsigned word[2][2][4];
#pragma unroll
        for (int block = 0; block < 2; ++block)
#pragma unroll
          for (int side = 0; side < 2; ++side) {
            const uint4 v = load_shared(base + half * HALF_BYTES + block * 1024 + side * 512 + lane * 16);
            unsigned(&w)[4] = word[block][side];
            w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
          }
        if (half == 1) {
          __syncwarp();  // every lane has its last words: the slot may be filled again
          if (!stream.is_done()) {
            if (lane == 0) copy_in(base, stream.source, barriers + 8 * place.slot, policy);
            stream.advance(a, shared, end);
          }
        }
        unsigned scale[2][2];  // a scale byte in the exponents of two bfloat16
#pragma unroll
        for (int i = 0; i < 4; ++i) scale[i >> 1][i & 1] = __byte_perm(scales, 0, 0x4440 + i) * 0x00800080u;
        // Block by block inside, so that two chains of additions are under way.
#pragma unroll
        for (int w = 0; w < 4; w += 2)
#pragma unroll
          for (int block = 0; block < 2; ++block) {
            unsigned low[8], high[8];
            decode(word[block][0][w], word[block][0][w + 1], scale[block][0], low);
            decode(word[block][1][w], word[block][1][w + 1], scale[block][1], high);
#pragma unroll
            for (int pair = 0; pair < 8; pair += 2)
#pragma unroll
              for (int octet = 0; octet < OCTETS; ++octet)
                multiply_add(sum[octet][2 * half + block], low[pair], high[pair], low[pair + 1], high[pair + 1],
                             input[octet][4 * w + pair], input[octet][4 * w + pair + 1]);
          }
      }
      if (++place.slot == DEPTH) {
        place.slot = 0;
        place.parity ^= 1;
      }
    }
    place.step -= STEPS;
    // Warps without a part wait and arrive, too: one that ran ahead by two items could not tell their phases apart.
    wait_for(shared_address(&shared.is_finished[place.buffer]), place.buffer_parity);
    if (part < PARTIALS) {
      float* own = &shared.partial[place.buffer][part][0][0];
#pragma unroll
      for (int octet = 0; octet < OCTETS; ++octet)
#pragma unroll
        for (int block = 0; block < 4; ++block)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int column = 8 * octet + 2 * quad_thread + (i & 1);
            if (column < num_rows) own[partial_place(column, 32 * (i >> 1) + 8 * block + quad_row)] = sum[octet][block][i];
          }
    }
    __syncwarp();
    if (lane == 0) arrive(shared_address(&shared.is_summed[place.buffer]));
    if (++place.buffer == BUFFERS) {
      place.buffer = 0;
      place.buffer_parity ^= 1;
    }
  }
}

__device__ __forceinline__ void multiply_items(const ExpertsArguments& a, Shared& shared, Stream stream, Run run, int end) {
  const unsigned long long policy = evict_first();
  Place place = {0, 0, (int)threadIdx.x >> 5, 0, 1};
  for (; run.tiles; run = run.next(shared, end)) {
    const int first_row = shared.first_row[run.expert] + run.group * ROWS;
    const int num_rows = min(ROWS, shared.first_row[run.expert + 1] - first_row);
    synchronize_multiplying();  // nobody reads the previous run's inputs any more
    load_inputs(a, shared, run.expert, first_row, run.group, num_rows);
    synchronize_multiplying();
#if ROWS > 8
    if (num_rows > 8) {
      multiply_run<2>(a, shared, stream, run, end, num_rows, place, policy);
      continue;
    }
#endif
    multiply_run<1>(a, shared, stream, run, end, num_rows, place, policy);
  }
}

__device__ __forceinline__ void finish_items(const ExpertsArguments& a, Shared& shared, Run run, int end) {
  const int lane = threadIdx.x & 31, finisher = (threadIdx.x >> 5) - WARPS;
  int buffer = 0, buffer_parity = 0;
  for (; run.tiles; run = run.next(shared, end)) {
    const int first_row = shared.first_row[run.expert] + run.group * ROWS;
    const int num_rows = min(ROWS, shared.first_row[run.expert + 1] - first_row);
    for (int tile = 0; tile < run.tiles; ++tile) {
      wait_for(shared_address(&shared.is_summed[buffer]), buffer_parity);
      for (int column = finisher; column < num_rows; column += FINISHERS)
        finish_row(a, &shared.partial[buffer][0][0][0], run.expert, run.tile + tile, column, first_row + column);
      __syncwarp();
      if (lane == 0) arrive(shared_address(&shared.is_finished[buffer]));
      if (++buffer == BUFFERS) {
        buffer = 0;
        buffer_parity ^= 1;
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) experts(const __grid_constant__ ExpertsArguments a) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  Shared& shared = *(Shared*)shared_bytes;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (warp < WARPS && lane < DEPTH) initialize_barrier(shared_address(&shared.is_full[warp][lane]), 1);
  if (warp == WARPS && lane < BUFFERS) {
    initialize_barrier(shared_address(&shared.is_summed[lane]), WARPS);
    initialize_barrier(shared_address(&shared.is_finished[lane]), FINISHERS);
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  if (!a.is_chained) wait_for_previous_launch();
  list_items(a, shared);  // its barrier also makes the ones above known
  const int num_items = shared.first_item[a.num_local_experts];
  const int begin = (int)((long long)num_items * blockIdx.x / gridDim.x);
  const int end = (int)((long long)num_items * (blockIdx.x + 1) / gridDim.x);
  const Run run(shared, begin, end, begin < end ? search_expert(shared, a.num_local_experts, begin) : 0);
  Stream stream = {run, warp, a.weights};
  if (warp < WARPS) {
    stream.find(a, shared, end);
    for (int slot = 0; slot < DEPTH && !stream.is_done(); ++slot) {
      if (lane == 0)
        copy_in(shared_address(shared.ring[warp][slot]), stream.source, shared_address(&shared.is_full[warp][slot]), evict_first());
      stream.advance(a, shared, end);
    }
  }
  if (a.is_chained) wait_for_previous_launch();
  if (warp < WARPS) multiply_items(a, shared, stream, run, end);
  else finish_items(a, shared, run, end);
}

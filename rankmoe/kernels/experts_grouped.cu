// One grouped expert GEMM beyond decode sizes: rows as bfloat16 in tile order (widen_rows.cu) by the MXFP4 weights that
// experts.cu reads too, in float32 accumulation of exact products.
//
// The same source is gate_up and down. An item is one expert's group of packed tiles by up to COLUMNS of
// its rows. An expert's rows are shared out evenly among its items, so few columns stay empty. One warp streams weights and
// rows through a ring in shared memory; the other warpgroups decode their outputs into the registers of wgmma's first operand.
// Prepended: experts_common.cuh, and multiply_add_columns for each multiple of 16 columns. The including side defines, beside
// what experts_common.cuh wants:
//   MAX_LOCAL_EXPERTS  size of the tables in shared memory
//   COLUMNS            most rows of an item, a multiple of 16, at most 128
//   GROUPS             multiplying warpgroups of a block
//   GROUP_TILES        packed tiles that each of them multiplies
//   REGISTERS          of each of their threads, after the streaming warpgroup gave its own away
//   STAGES             steps of the ring
// docs/kernels.md, section "Grouped", says why.

#define ITEM_TILES (GROUPS * GROUP_TILES)
#define OUTPUT_GROUPS ((TILES + ITEM_TILES - 1) / ITEM_TILES)
#define THREADS ((GROUPS + 1) * 128)  // the streaming warpgroup has one warp at work and gives its registers away
#define CHUNK_BYTES 128         // of a row: half a step, what a 128-byte swizzle spans
#define STAGED_COLUMNS 32       // four threads of a warpgroup finish one
#define STAGED_SIDE 36          // floats from a column's gates to its ups, and from column to column:
#define STAGED_PITCH 76         // neither the stores of accumulators nor the loads of groups meet in a bank

struct GroupedArguments {
  const unsigned char* weights;  // [L, TILES, STEPS, 2, HALF_BYTES]
  const float* factor;           // [L]
  const float* bias;             // [L, NUM_OUTPUTS], gate_up in checkpoint order
  const unsigned char* inputs;   // [2 STEPS, num_row_blocks, 8, 64] bfloat16, swizzled
  const int* expert_offsets;
  float* rows;                   // down: [R, NUM_OUTPUTS]
  unsigned char* middle;         // gate_up: [R, NUM_OUTPUTS / 2]
  unsigned char* middle_scale;   // gate_up: [R, NUM_OUTPUTS / 64]
  long long num_row_blocks;
  int num_local_experts;
  float activation[4];           // beta, linear_beta and their reciprocals; or alpha, limit, up_offset
};

struct Shared {
  alignas(1024) unsigned char inputs[STAGES][2][COLUMNS * CHUNK_BYTES];
  alignas(128) unsigned char weights[STAGES][ITEM_TILES][SLOT_BYTES];
#if GATE_UP
  alignas(16) float staged[GROUPS][STAGED_COLUMNS * STAGED_PITCH];
#endif
  alignas(8) unsigned long long is_full[STAGES];
  unsigned long long is_empty[STAGES];
  int first_item[MAX_LOCAL_EXPERTS + 1];
  int first_row[MAX_LOCAL_EXPERTS + 1];
  int warp_total[THREADS / 32];
};

// --------------------------------------------------------------------------------------------------------- work items

__device__ __forceinline__ int row_tiles(int count) { return (count + COLUMNS - 1) / COLUMNS; }

__device__ __forceinline__ void list_items(const GroupedArguments& a, Shared& shared) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int items_before = 0;
  for (int first = 0; first < a.num_local_experts; first += THREADS) {
    const int expert = first + threadIdx.x;
    int row = 0, items = 0;
    if (expert < a.num_local_experts) {
      row = a.expert_offsets[expert];
      items = row_tiles(a.expert_offsets[expert + 1] - row) * OUTPUT_GROUPS;
    }
    int item = items;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
      const int lower = __shfl_up_sync(FULL_MASK, item, step);
      if (lane >= step) item += lower;
    }
    if (lane == 31) shared.warp_total[warp] = item;
    __syncthreads();
    const int warp_items = lane < THREADS / 32 ? shared.warp_total[lane] : 0;
    item += items_before + __reduce_add_sync(FULL_MASK, lane < warp ? warp_items : 0);
    if (expert < a.num_local_experts) {
      shared.first_row[expert] = row;
      shared.first_item[expert] = item - items;
    }
    items_before += __reduce_add_sync(FULL_MASK, warp_items);
    if (threadIdx.x == 0 && first + THREADS >= a.num_local_experts) {
      shared.first_row[a.num_local_experts] = a.expert_offsets[a.num_local_experts];
      shared.first_item[a.num_local_experts] = items_before;
    }
    __syncthreads();
  }
}

// Items of a block: every gridDim.x-th, so that blocks at work at the same time share an expert's weights and rows in L2.
struct Item {
  int index, expert;
  int first_tile;             // of the packed weight
  int column, width;          // first row within the expert, and columns of the multiplication
  int first_row, num_rows;

  __device__ __forceinline__ Item() : index(blockIdx.x), expert(0) {}
  __device__ __forceinline__ bool find(const GroupedArguments& a, const Shared& shared) {
    if (index >= shared.first_item[a.num_local_experts]) return false;
    while (index >= shared.first_item[expert + 1]) ++expert;
    const int place = index - shared.first_item[expert];
    const int start = shared.first_row[expert], count = shared.first_row[expert + 1] - start;
    const int parts = row_tiles(count);
    width = ((count + parts - 1) / parts + 15) & ~15;
    first_tile = place / parts * ITEM_TILES;
    column = place % parts * width;
    first_row = start + column;
    num_rows = min(width, count - column);
    return true;
  }
};

// ----------------------------------------------------------------------------------------------------------- streaming

__device__ __forceinline__ void copy_in(unsigned destination, const unsigned char* source, unsigned bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void stream_items(const GroupedArguments& a, Shared& shared) {
  int stage = 0, parity = 1;
  for (Item item; item.find(a, shared); item.index += gridDim.x) {
    const int num_tiles = min(ITEM_TILES, TILES - item.first_tile);
    const int row_block = shared.first_row[item.expert] / 8 + item.expert + item.column / 8;  // as in widen_rows.cu
    const unsigned char* weights = a.weights + ((long long)item.expert * TILES + item.first_tile) * STEPS * SLOT_BYTES;
    const unsigned char* inputs = a.inputs + (long long)row_block * 8 * CHUNK_BYTES;
    const long long chunk_stride = a.num_row_blocks * 8 * CHUNK_BYTES;
    for (int step = 0; step < STEPS; ++step) {
      const unsigned barrier = shared_address(&shared.is_full[stage]);
      wait_for(shared_address(&shared.is_empty[stage]), parity);
      expect_bytes(barrier, num_tiles * SLOT_BYTES + 2 * item.width * CHUNK_BYTES);
      for (int tile = 0; tile < num_tiles; ++tile)
        copy_in(shared_address(shared.weights[stage][tile]), weights + ((long long)tile * STEPS + step) * SLOT_BYTES, SLOT_BYTES,
                barrier);
#pragma unroll
      for (int chunk = 0; chunk < 2; ++chunk)
        copy_in(shared_address(shared.inputs[stage][chunk]), inputs + (2 * step + chunk) * chunk_stride,
                item.width * CHUNK_BYTES, barrier);
      if (++stage == STAGES) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------------------- multiplying

// Rows of 128 bytes, swizzled in blocks of eight that lie 1,024 bytes apart.
__device__ __forceinline__ unsigned long long describe(unsigned address) {
  return (unsigned long long)(address >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

__device__ __forceinline__ void open_group() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void close_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wait_for_groups() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

template <int N>
__device__ __forceinline__ void hold(float (&sum)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(sum[i])::"memory");
}

template <int WIDTH>
__device__ __forceinline__ void multiply_item(Shared& shared, int& stage, int& parity, float (&sum)[GROUP_TILES][WIDTH / 2]) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, group = threadIdx.x >> 7;
#pragma unroll
  for (int tile = 0; tile < GROUP_TILES; ++tile) {
#pragma unroll
    for (int i = 0; i < WIDTH / 2; ++i) sum[tile][i] = 0;
    hold(sum[tile]);
  }
  unsigned last_empty = 0;
  for (int step = 0; step < STEPS; ++step) {
    wait_for(shared_address(&shared.is_full[stage]), parity);
    unsigned word[GROUP_TILES][2][4], scale[GROUP_TILES][2];
#pragma unroll
    for (int tile = 0; tile < GROUP_TILES; ++tile) {
      // The warp's 16 outputs: half warp >> 1 of the tile, block warp & 1 of the half, both sides.
      const unsigned base = shared_address(shared.weights[stage][group * GROUP_TILES + tile]) + (warp >> 1) * HALF_BYTES;
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const uint4 v = load_shared(base + (warp & 1) * 1024 + side * 512 + lane * 16);
        word[tile][side][0] = v.x, word[tile][side][1] = v.y, word[tile][side][2] = v.z, word[tile][side][3] = v.w;
      }
      unsigned short scales;
      asm volatile("ld.shared.u16 %0, [%1];" : "=h"(scales) : "r"(base + 2048 + lane * 4 + (warp & 1) * 2));
      scale[tile][0] = (scales & 0xff) * 0x00800080u;
      scale[tile][1] = (scales >> 8) * 0x00800080u;
    }
    const unsigned inputs = shared_address(shared.inputs[stage][0]);
    unsigned operand[2][GROUP_TILES][4];  // of two slices of 16 inputs in turn
#pragma unroll
    for (int slice = 0; slice < 8; ++slice) {
#pragma unroll
      for (int tile = 0; tile < GROUP_TILES; ++tile) {
        unsigned low[8], high[8];  // of which the compiler keeps the slice's pairs
        decode(word[tile][0][slice / 4 * 2], word[tile][0][slice / 4 * 2 + 1], scale[tile][0], low);
        decode(word[tile][1][slice / 4 * 2], word[tile][1][slice / 4 * 2 + 1], scale[tile][1], high);
        unsigned(&own)[4] = operand[slice & 1][tile];
        const int first = slice % 4 * 2;
        own[0] = low[first], own[1] = high[first], own[2] = low[first + 1], own[3] = high[first + 1];
      }
      const unsigned long long columns = describe(inputs + (slice >> 2) * COLUMNS * CHUNK_BYTES + (slice & 3) * 32);
      open_group();
#pragma unroll
      for (int tile = 0; tile < GROUP_TILES; ++tile) multiply_add_columns(sum[tile], operand[slice & 1][tile], columns);
      close_group();
      wait_for_groups<1>();
      // Now every multiplication of the step before is done, too.
      if (slice == 0 && step > 0 && lane == 0) arrive(last_empty);
    }
    last_empty = shared_address(&shared.is_empty[stage]);
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
  wait_for_groups<0>();
#pragma unroll
  for (int tile = 0; tile < GROUP_TILES; ++tile) hold(sum[tile]);
  if (lane == 0) arrive(last_empty);
}

// ------------------------------------------------------------------------------------------------------------ finishing

__device__ __forceinline__ void synchronize_group() { asm volatile("bar.sync %0, 128;" ::"r"(1 + (threadIdx.x >> 7)) : "memory"); }

#if GATE_UP
// A thread's eight columns of the middle of one row, a quarter of an MXFP8 group: activation and requantisation.
__device__ __forceinline__ void finish_group(const GroupedArguments& a, const float* staged, int expert, int tile, long long row,
                                             bool is_row) {
  constexpr int width = NUM_OUTPUTS / 2;
  const int place = tile * 32 + 8 * (threadIdx.x & 3);
#if HAS_FACTOR
  const float factor = a.factor[expert];
#endif
  float value[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float gate = staged[i], up = staged[STAGED_SIDE + i];
#if HAS_FACTOR
    gate *= factor;
    up *= factor;
#endif
#if HAS_BIAS
    gate += a.bias[(long long)expert * NUM_OUTPUTS + place + i];
    up += a.bias[(long long)expert * NUM_OUTPUTS + width + place + i];
#endif
    value[i] = activate(a.activation, gate, up);
  }
  unsigned amax = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) amax = max(amax, __float_as_uint(value[i]) & 0x7fffffffu);
  amax = max(amax, __shfl_xor_sync(FULL_MASK, amax, 1));
  amax = max(amax, __shfl_xor_sync(FULL_MASK, amax, 2));
  const bool is_finite = amax < 0x7f800000u;
  const unsigned scale = mxfp8_scale(amax);
  const float per_scale = __uint_as_float((254 - scale) << 23);
  unsigned codes[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    codes[i] = is_finite ? e4m3_pair(value[4 * i] * per_scale, value[4 * i + 1] * per_scale) |
                               e4m3_pair(value[4 * i + 2] * per_scale, value[4 * i + 3] * per_scale) << 16
                         : 0x7f7f7f7fu;
  if (is_row) {
    *(uint2*)(a.middle + row * width + place) = make_uint2(codes[0], codes[1]);
    if ((threadIdx.x & 3) == 0) a.middle_scale[row * (width / 32) + tile] = is_finite ? (unsigned char)scale : 255;
  }
}

// Accumulator 4 j + i of a thread: column 8 j + 2 (lane & 3) + (i & 1), side i >> 1, place 8 warp + (lane >> 2) in the side.
// All go through shared memory before anything else, 32 columns at a time, so that the activation stands once in the code.
template <int WIDTH>
__device__ __forceinline__ void finish_tiles(const GroupedArguments& a, Shared& shared, const Item& item, int first_tile,
                                             const float (&sum)[GROUP_TILES][WIDTH / 2]) {
  constexpr int rounds = (WIDTH + STAGED_COLUMNS - 1) / STAGED_COLUMNS;
  const int lane = threadIdx.x & 31, place = (threadIdx.x & 127) >> 2, column = place;
  float* staged = shared.staged[threadIdx.x >> 7];
  float* own = staged + 2 * (lane & 3) * STAGED_PITCH + place;
#pragma unroll 1
  for (int round = 0; round < GROUP_TILES * rounds; ++round) {
    const int tile = first_tile + round / rounds, first = round % rounds * STAGED_COLUMNS;
    if (first >= item.num_rows || tile >= TILES) continue;
    synchronize_group();  // the columns before were read
#pragma unroll
    for (int other = 0; other < GROUP_TILES * rounds; ++other)
      if (other == round)
#pragma unroll
        for (int j = other % rounds * 4; j < other % rounds * 4 + 4 && j < WIDTH / 8; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            own[(8 * (j % 4) + (i & 1)) * STAGED_PITCH + (i >> 1) * STAGED_SIDE] = sum[other / rounds][4 * j + i];
    synchronize_group();
    const bool is_row = first + column < item.num_rows;
    if (__any_sync(FULL_MASK, is_row))
      finish_group(a, staged + column * STAGED_PITCH + 8 * (lane & 3), item.expert, tile, item.first_row + first + column, is_row);
  }
}
#else
template <int WIDTH>
__device__ __forceinline__ void finish_tiles(const GroupedArguments& a, Shared& shared, const Item& item, int first_tile,
                                             const float (&sum)[GROUP_TILES][WIDTH / 2]) {
  const int lane = threadIdx.x & 31, place = (threadIdx.x & 127) >> 2;
#if HAS_FACTOR
  const float factor = a.factor[item.expert];
#else
  const float factor = 1;
#endif
#pragma unroll
  for (int tile = 0; tile < GROUP_TILES; ++tile)
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int output = (first_tile + tile) * TILE + side * 32 + place;
      if (output >= NUM_OUTPUTS) continue;
      float bias = 0;
#if HAS_BIAS
      bias = a.bias[(long long)item.expert * NUM_OUTPUTS + output];
#endif
#pragma unroll
      for (int j = 0; j < WIDTH / 8; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int column = 8 * j + 2 * (lane & 3) + i;
          if (column < item.num_rows)
            a.rows[(long long)(item.first_row + column) * NUM_OUTPUTS + output] = sum[tile][4 * j + 2 * side + i] * factor + bias;
        }
    }
}
#endif

template <int WIDTH>
__device__ __forceinline__ void compute_item(const GroupedArguments& a, Shared& shared, const Item& item, int& stage, int& parity) {
  float sum[GROUP_TILES][WIDTH / 2];
  multiply_item<WIDTH>(shared, stage, parity, sum);
  finish_tiles<WIDTH>(a, shared, item, item.first_tile + (threadIdx.x >> 7) * GROUP_TILES, sum);
}

// Instances for each width, so that no multiplication is wider than its rows need.
template <int WIDTH>
__device__ __forceinline__ void compute_width(const GroupedArguments& a, Shared& shared, const Item& item, int& stage, int& parity) {
  if constexpr (WIDTH <= COLUMNS) {
    if (item.width == WIDTH) compute_item<WIDTH>(a, shared, item, stage, parity);
    else compute_width<WIDTH + 16>(a, shared, item, stage, parity);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) experts_grouped(const __grid_constant__ GroupedArguments a) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  Shared& shared = *(Shared*)shared_bytes;
  if (threadIdx.x < STAGES) {
    initialize_barrier(shared_address(&shared.is_full[threadIdx.x]), 1);
    initialize_barrier(shared_address(&shared.is_empty[threadIdx.x]), GROUPS * 4);
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  wait_for_previous_launch();
  list_items(a, shared);  // its barrier also makes the ones above known
  if (threadIdx.x >= GROUPS * 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == GROUPS * 128) stream_items(a, shared);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
  int stage = 0, parity = 0;
  for (Item item; item.find(a, shared); item.index += gridDim.x) compute_width<16>(a, shared, item, stage, parity);
}

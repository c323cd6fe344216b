// MXFP8 rows to bfloat16 in the order in which experts_grouped.cu copies them: the scales applied, which is exact, tokens
// gathered into the schedule's order, an expert's rows from a block of eight on, inputs in the order of wgmma's registers.
//
// Out: [2 STEPS, num_row_blocks, 8, 64] bfloat16; a row's half step is 128 bytes whose 16-byte pieces are swizzled by the row.
// Prepended: experts_common.cuh. The including side defines, beside what that wants:
//   HAS_TOKENS         1 rows are gathered by row_tokens, 0 they lie in order

#define WARPS 8

struct WidenArguments {
  const unsigned char* data;   // [rows, NUM_INPUTS] e4m3
  const unsigned char* scale;  // [rows, NUM_INPUTS / 32]
  const int* row_tokens;
  const int* expert_offsets;
  unsigned char* out;
  long long num_row_blocks;
  int num_local_experts;
};

// The expert of a row below the last offset.
__device__ __forceinline__ int search_expert(const int* offsets, int num_experts, int row) {
  int low = 0, high = num_experts - 1;
  while (low < high) {
    const int middle = (low + high) >> 1;
    if (row >= offsets[middle + 1]) low = middle + 1;
    else high = middle;
  }
  return low;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) widen_rows(const __grid_constant__ WidenArguments a) {
  wait_for_previous_launch();
  const int lane = threadIdx.x & 31, num_rows = a.expert_offsets[a.num_local_experts];
  for (int row = blockIdx.x * WARPS + (threadIdx.x >> 5); row < num_rows; row += gridDim.x * WARPS) {
    const int expert = search_expert(a.expert_offsets, a.num_local_experts, row);
    const int start = a.expert_offsets[expert];
    // Expert e's rows begin with block start / 8 + e: at least as many blocks on as the experts before it fill.
    const long long block = start / 8 + expert + (row - start) / 8;
    const int place = (row - start) % 8;
#if HAS_TOKENS
    const long long source = a.row_tokens[row];
#else
    const long long source = row;
#endif
    // A thread takes the w-th eight inputs of each of a step's groups: two slices of 16 for the multiplication.
    for (int i = lane; i < STEPS * 4; i += 32) {
      const int step = i >> 2, w = i & 3;
      unsigned pair[4][4];  // of a group's eight inputs
#pragma unroll
      for (int group = 0; group < 4; ++group) {
        const int input = step * STEP + group * 32;
        uint2 codes = make_uint2(0, 0);
        float scale = 0;
        if (NUM_INPUTS % STEP == 0 || input < NUM_INPUTS) {
          codes = *(const uint2*)(a.data + source * NUM_INPUTS + input + 8 * w);
          scale = scale_of(a.scale[source * (NUM_INPUTS / 32) + (input >> 5)]);
        }
        pair[group][0] = widen_pair(codes.x, scale), pair[group][1] = widen_pair(codes.x >> 16, scale);
        pair[group][2] = widen_pair(codes.y, scale), pair[group][3] = widen_pair(codes.y >> 16, scale);
      }
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        // Slice 2 w + p / 2 of eight, its half p % 2: the p-th pair of each group.
        const int piece = (2 * w + (p >> 1) & 3) * 2 + (p & 1);
        const long long chunk = 2 * step + (w >> 1);
        unsigned char* out = a.out + ((chunk * a.num_row_blocks + block) * 8 + place) * 128 + ((piece ^ place) << 4);
        *(uint4*)out = make_uint4(pair[0][p], pair[1][p], pair[2][p], pair[3][p]);
      }
    }
  }
}

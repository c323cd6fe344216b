// What the expert GEMMs share: the packed layout's sizes, decoding, barriers, bulk copies, the activation and MXFP8.
// Prepended to experts.cu, experts_grouped.cu and widen_rows.cu. The including side defines:
//   GATE_UP            1 gate_up, 0 down
//   NUM_INPUTS, NUM_OUTPUTS  of the logical weight; a gate_up tile is 32 gate rows and the 32 up rows of the same columns
//   HAS_BIAS, HAS_FACTOR
//   ACTIVATION         0 SiTU, 1 SwiGLU; HAS_LIMIT

#define FULL_MASK 0xffffffffu
#define TILE 64                 // outputs of a packed tile
#define STEP 128                // inputs of a step: a group of 32 for each thread of a quad
#define STEPS ((NUM_INPUTS + STEP - 1) / STEP)
#define HALF_BYTES (32 * 64 + 128)  // half a step: 32 outputs, four groups of 16 bytes each, and their scales
#define SLOT_BYTES (2 * HALF_BYTES)
#define TILES ((NUM_OUTPUTS + TILE - 1) / TILE)

__device__ __forceinline__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void initialize_barrier(unsigned barrier, unsigned count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void wait_for(unsigned barrier, unsigned parity) {
  asm volatile(
      "{\n .reg .pred done;\n"
      "again:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      " @!done bra again;\n}"
      ::"r"(barrier), "r"(parity)
      : "memory");
}

__device__ __forceinline__ void expect_bytes(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// What the next launch may read early, the schedule and the weights, was there before this wait ended.
__device__ __forceinline__ void wait_for_previous_launch() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
}

__device__ __forceinline__ uint4 load_shared(unsigned address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}

__device__ __forceinline__ unsigned multiply_bf16x2(unsigned a, unsigned b) {
  unsigned product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// A pair's codes, brought from where they stand in a word to bits 15 and 8..6 of the halves: bfloat16 of 2^-126 times the value,
// subnormals included. The scale makes up for it.
template <int ROTATION>
__device__ __forceinline__ unsigned decode_pair(unsigned word, unsigned scale) {
  const unsigned rotated = ROTATION < 7 ? word << ROTATION : __funnelshift_l(word, word, ROTATION);
  return multiply_bf16x2(rotated & 0x81c081c0u, scale);
}

#define REST_OF_FIRST 0x06030603u

// Sixteen e2m1 codes to eight pairs. Three pairs stand in each word so that one rotation brings each to its bits. What is left of
// either word does not meet what is left of the other, so that both together hold the fourth pairs.
__device__ __forceinline__ void decode(unsigned first, unsigned second, unsigned scale, unsigned (&pair)[8]) {
  const unsigned rest = (first & REST_OF_FIRST) | (second & ~REST_OF_FIRST);
  pair[0] = decode_pair<0>(first, scale);
  pair[1] = decode_pair<4>(first, scale);
  pair[2] = decode_pair<10>(first, scale);
  pair[3] = decode_pair<8>(rest, scale);
  pair[4] = decode_pair<2>(second, scale);
  pair[5] = decode_pair<6>(second, scale);
  pair[6] = decode_pair<12>(second, scale);
  pair[7] = decode_pair<14>(rest, scale);
}

// Two e4m3 codes times a power of two, exact in bfloat16.
__device__ __forceinline__ unsigned widen_pair(unsigned short codes, float scale) {
  unsigned halves, pair;
  float low, high;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
  asm("{\n .reg .b16 a, b;\n mov.b32 {a, b}, %2;\n cvt.f32.f16 %0, a;\n cvt.f32.f16 %1, b;\n}"
      : "=f"(low), "=f"(high)
      : "r"(halves));
  low *= scale;
  high *= scale;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ float scale_of(unsigned byte) {
  return __uint_as_float(byte == 0 ? 0x00400000u : byte == 255 ? 0x7fc00000u : byte << 23);
}

#if GATE_UP
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float sigmoid(float x) { return reciprocal(1 + expf(-x)); }

// Within a few ulp, without a branch: an odd polynomial near 0, where 1 - 2 / (exp(2 x) + 1) cancels.
__device__ __forceinline__ float hyperbolic_tangent(float x) {
  const float square = x * x;
  float p = fmaf(square, 0.0033036924f, -0.0087897921f);  // least squares for |x| <= 0.625
  p = fmaf(p, square, 0.021859569f);
  p = fmaf(p, square, -0.053967599f);
  p = fmaf(p, square, 0.13333331f);
  p = fmaf(p, square, -0.33333334f);
  const float small = fmaf(x * square, p, x);
  float power, quotient;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(fabsf(x) * 2.885390082f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(quotient) : "f"(1 + power));
  const float large = copysignf(fmaf(-2, quotient, 1), x);
  return fabsf(x) < 0.625f ? small : large;
}

__device__ __forceinline__ float activate(const float (&constants)[4], float gate, float up) {
#if ACTIVATION == 0
  const float beta = constants[0], linear_beta = constants[1], per_beta = constants[2], per_linear_beta = constants[3];
  return beta * hyperbolic_tangent(gate * per_beta) * sigmoid(gate) * (linear_beta * hyperbolic_tangent(up * per_linear_beta));
#else
  const float alpha = constants[0], limit = constants[1], up_offset = constants[2];
#if HAS_LIMIT
  gate = gate > limit ? limit : gate;  // comparisons, since a minimum would replace NaN
  up = up > limit ? limit : up < -limit ? -limit : up;
#endif
  return gate * sigmoid(alpha * gate) * (up + up_offset);
#endif
}

// The scale byte of a group from the bits of its largest magnitude. That is m * 2^k with m in [1, 2): the scale is 2^(k - 8),
// one more where m > 1.75 (mantissa above 0x600000); magnitudes are floored at 1e-10.
__device__ __forceinline__ unsigned mxfp8_scale(unsigned amax) { return ((max(amax, 0x2edbe6ffu) + 0x1fffffu) >> 23) - 8; }

// Two floats to e4m3 codes, to nearest even and saturating; the first in the low byte.
__device__ __forceinline__ unsigned e4m3_pair(float low, float high) {
  unsigned short codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}
#endif

// CUDA C++ on a CPU, for tests: every thread of a launch is a fiber of one operating system thread.
//
// What a kernel's results depend on is modelled: warps' collectives, barriers of blocks, clusters and shared memory, bulk
// copies, remote reductions, tensor core fragments, conversions. Time, caches and the memory model are not. A fiber runs until
// it has to wait; which warps go on, and the order of their threads, change each time by a fixed random sequence; copies arrive
// when everybody waits. So threads get further apart than on a GPU, and what lacks a barrier fails sooner. Shared memory, and the
// destination of a copy that is under way, hold a pattern that no result should show.
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>

// Few of the standard library's headers: every kernel is compiled with them anew.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __shared__ static __attribute__((section("emulated_shared")))

// What lies in it is swapped when another block goes on. The linker gives its bounds; the first variable makes sure that it exists.
extern "C" unsigned char __start_emulated_shared[], __stop_emulated_shared[];
__attribute__((section("emulated_shared"), used, aligned(128))) static unsigned char first_of_shared = 1;

namespace emulated {

constexpr unsigned WARP = 32;
// An address in shared memory: a block's rank in its cluster plus one, or 0 for the own; an offset, from DYNAMIC on in the
// dynamic part.
constexpr unsigned RANK_SHIFT = 24, OFFSET_MASK = (1u << RANK_SHIFT) - 1, DYNAMIC = 1u << 20;
constexpr unsigned char PATTERN = 0xcd;
constexpr size_t STACK_BYTES = 256 << 10;

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

struct Arrivals {
  unsigned count = 0, generation = 0;
  // A late one of the last generation has seen the change before anyone completes the next.
  void arrive(unsigned expected) {
    if (++count == expected) {
      count = 0;
      ++generation;
    }
  }
};

struct Warp {
  Arrivals arrivals;
  uint64_t values[2][WARP][6];  // of the collective under way and of the one before
};

struct Cluster {
  Arrivals arrivals;
  unsigned num_threads = 0;
};

struct Block {
  unsigned index = 0, num_live = 0;
  Cluster* cluster = nullptr;
  unsigned first_of_cluster = 0;
  std::vector<Warp> warps;
  Arrivals barriers[16];
  std::vector<unsigned char> saved, dynamic_storage;
  unsigned char* dynamic = nullptr;
};

struct Fiber {
  ucontext_t context;  // of its start; later switches go by jumps, which make no system calls
  jmp_buf place;
  bool is_started = false;
  Index thread;
  Block* block = nullptr;
  bool is_done = false;
  unsigned cluster_generation = 0;
};

// A bulk copy where it has a source, else the bits of a remote reduction; the barrier then counts its bytes.
struct Transfer {
  Block *block, *barrier_block;
  unsigned to, barrier;
  const void* source;
  unsigned bytes, bits;
};

struct Machine {
  std::vector<Block> blocks;
  std::vector<Fiber> fibers;
  std::vector<Transfer> under_way;
  Fiber* current = nullptr;
  Block* loaded = nullptr;  // whose shared memory lies in the section
  ucontext_t start;
  jmp_buf scheduler;
  uint64_t progress = 0;
  const char* error = nullptr;
  pthread_t system_thread = pthread_self();
  volatile bool is_in_fiber = false;
  unsigned num_blocks = 0, num_threads = 0, cluster_size = 1, dynamic_bytes = 0, max_seconds = 0;
  void (*run_kernel)(const void* kernel, const void* arguments) = nullptr;
  const void *kernel = nullptr, *arguments = nullptr;
};

static Machine* machine;

static void leave() {
  if (!_setjmp(machine->current->place)) _longjmp(machine->scheduler, 1);
}

static void resume(Fiber& fiber) {
  if (_setjmp(machine->scheduler)) {
    machine->is_in_fiber = false;
    return;
  }
  machine->is_in_fiber = true;
  if (fiber.is_started) _longjmp(fiber.place, 1);
  fiber.is_started = true;
  swapcontext(&machine->start, &fiber.context);
}

[[noreturn]] static void fail(const char* message) {
  if (!machine->error) machine->error = message;
  for (;;) leave();
}

template <class Condition>
static void wait_until(Condition condition) {
  while (!condition()) leave();
  ++machine->progress;
}

// --- shared memory ---------------------------------------------------------------------------------------------------
static size_t static_bytes() { return __stop_emulated_shared - __start_emulated_shared; }

static unsigned address_of(const void* pointer) {
  const unsigned char* p = (const unsigned char*)pointer;
  if (p >= __start_emulated_shared && p < __stop_emulated_shared) return p - __start_emulated_shared;
  const Block& block = *machine->current->block;
  if (p >= block.dynamic && p < block.dynamic + machine->dynamic_bytes) return DYNAMIC + (p - block.dynamic);
  fail("an address that is not of shared memory");
}

static unsigned char* memory_of(Block& block, unsigned address, unsigned bytes) {
  const bool is_dynamic = address >= DYNAMIC;
  const unsigned offset = is_dynamic ? address - DYNAMIC : address;
  if (offset + bytes > (is_dynamic ? machine->dynamic_bytes : static_bytes())) fail("beyond the end of shared memory");
  if (is_dynamic) return block.dynamic + offset;
  return (&block == machine->loaded ? __start_emulated_shared : block.saved.data()) + offset;
}

static Block& block_of(unsigned address) {
  Block& own = *machine->current->block;
  const unsigned rank = address >> RANK_SHIFT;
  return rank ? machine->blocks[own.first_of_cluster + rank - 1] : own;
}

template <class T>
static T& shared_at(unsigned address) {
  if (address % sizeof(T)) fail("a misaligned address of shared memory");
  return *(T*)memory_of(block_of(address), address & OFFSET_MASK, sizeof(T));
}

static unsigned char* dynamic_shared() { return machine->current->block->dynamic; }

// --- collectives -----------------------------------------------------------------------------------------------------
// Gives a warp's values of this collective, after all 32 lanes have given theirs.
template <class... T>
static const uint64_t (*exchange(const T&... own))[6] {
  static_assert(sizeof...(T) <= 6 && ((sizeof(T) <= 8) && ...));
  const Fiber& fiber = *machine->current;
  Warp& warp = fiber.block->warps[fiber.thread.x / WARP];
  const unsigned generation = warp.arrivals.generation;
  uint64_t(&values)[WARP][6] = warp.values[generation & 1];
  unsigned i = 0;
  ((values[fiber.thread.x % WARP][i] = 0, std::memcpy(&values[fiber.thread.x % WARP][i++], &own, sizeof(own))), ...);
  warp.arrivals.arrive(WARP);
  wait_until([&] { return warp.arrivals.generation != generation; });
  return values;
}

template <class T>
static T as(uint64_t value) {
  T result;
  std::memcpy(&result, &value, sizeof(T));
  return result;
}

static unsigned lane() { return machine->current->thread.x % WARP; }

template <class T, class Combine>
static T reduce(T own, Combine combine) {
  const auto values = exchange(own);
  T result = as<T>(values[0][0]);
  for (unsigned i = 1; i < WARP; ++i) result = combine(result, as<T>(values[i][0]));
  return result;
}

static void synchronize(unsigned id, unsigned num_threads) {
  Arrivals& arrivals = machine->current->block->barriers[id];
  const unsigned generation = arrivals.generation;
  arrivals.arrive(num_threads);
  wait_until([&] { return arrivals.generation != generation; });
}

static void cluster_arrive() {
  Cluster& cluster = *machine->current->block->cluster;
  machine->current->cluster_generation = cluster.arrivals.generation;
  cluster.arrivals.arrive(cluster.num_threads);
}

static void cluster_wait() {
  const Fiber& fiber = *machine->current;
  wait_until([&] { return fiber.block->cluster->arrivals.generation != fiber.cluster_generation; });
}

static void map_to_first(unsigned& out, unsigned address) { out = 1u << RANK_SHIFT | address; }

// --- barriers in shared memory ---------------------------------------------------------------------------------------
struct Barrier {
  int bytes;
  uint16_t pending;
  uint16_t expected : 15, phase : 1;
  void advance() {
    if (pending == 0 && bytes == 0) {
      phase ^= 1;
      pending = expected;
    }
  }
};
static_assert(sizeof(Barrier) == 8);

static void barrier_init(unsigned address, unsigned count) {
  shared_at<Barrier>(address) = {0, (uint16_t)count, (uint16_t)count, 0};
}

static void barrier_arrive(unsigned address) {
  Barrier& barrier = shared_at<Barrier>(address);
  if (barrier.pending == 0) fail("one arrival too many");
  --barrier.pending;
  barrier.advance();
}

static void barrier_expect(unsigned address, unsigned bytes) {
  shared_at<Barrier>(address).bytes += bytes;
  barrier_arrive(address);
}

static void barrier_wait(unsigned address, unsigned parity) {
  wait_until([&] { return shared_at<Barrier>(address).phase != parity; });
}

static void start(const Transfer& transfer) {
  unsigned char* to = memory_of(*transfer.block, transfer.to, transfer.bytes);
  if (transfer.source) std::memset(to, PATTERN, transfer.bytes);
  memory_of(*transfer.barrier_block, transfer.barrier, sizeof(Barrier));
  machine->under_way.push_back(transfer);
}

static void finish(const Transfer& transfer) {
  unsigned char* to = memory_of(*transfer.block, transfer.to, transfer.bytes);
  if (transfer.source) std::memcpy(to, transfer.source, transfer.bytes);
  else *(unsigned*)to |= transfer.bits;
  Barrier& barrier = *(Barrier*)memory_of(*transfer.barrier_block, transfer.barrier, sizeof(Barrier));
  barrier.bytes -= transfer.bytes;
  barrier.advance();
}

static void copy_bulk(unsigned to, const void* source, unsigned bytes, unsigned barrier, uint64_t = 0) {
  if (to % 16 || (uintptr_t)source % 16 || bytes % 16) fail("a bulk copy that is not of 16-byte pieces");
  Block* own = machine->current->block;
  start({own, own, to, barrier, source, bytes, 0});
}

static void remote_or(unsigned to, unsigned bits, unsigned barrier) {
  start({&block_of(to), &block_of(barrier), to & OFFSET_MASK, barrier & OFFSET_MASK, nullptr, 4, bits});
}

// --- conversions -----------------------------------------------------------------------------------------------------
static float bf16_to_float(unsigned bits) { return as<float>((uint64_t)(bits & 0xffff) << 16); }

static unsigned bf16_from_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static void bf16_from(unsigned short& out, float value) { out = bf16_from_float(value); }
static void bf16_pair_from(unsigned& out, float high, float low) { out = bf16_from_float(high) << 16 | bf16_from_float(low); }

static void bf16_pair_multiply(unsigned& out, unsigned a, unsigned b) {
  bf16_pair_from(out, bf16_to_float(a >> 16) * bf16_to_float(b >> 16), bf16_to_float(a) * bf16_to_float(b));
}

static float e4m3_to_float(unsigned code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  const float magnitude = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp((float)mantissa, -9);
  return code & 0x80 ? -magnitude : magnitude;
}

// To nearest even, saturating.
static unsigned e4m3_from_float(float value) {
  if (value != value) return 0x7f;
  const unsigned sign = std::signbit(value) ? 0x80 : 0;
  const float magnitude = std::fabs(value);
  if (magnitude >= 448) return sign | 0x7e;
  const int exponent = magnitude < 0x1p-6f ? -6 : std::ilogb(magnitude);
  const int eighths = (int)std::nearbyint(std::ldexp(magnitude, 3 - exponent));  // 8 to 16 of a normal one
  return sign | (unsigned)((exponent + 6) * 8 + eighths);
}

static void e4m3_pair_from(unsigned short& out, float high, float low) { out = e4m3_from_float(high) << 8 | e4m3_from_float(low); }

static unsigned f16_from_e4m3(unsigned code) {  // exact
  const float value = e4m3_to_float(code);
  if (value != value) return 0x7fff;
  const unsigned sign = (code & 0x80) << 8;
  if (value == 0) return sign;
  const int exponent = std::ilogb(value);
  return sign | (exponent + 15) << 10 | ((unsigned)std::ldexp(std::fabs(value), 10 - exponent) & 0x3ff);
}

static void f16_pair_from_e4m3(unsigned& out, unsigned short codes) {
  out = f16_from_e4m3(codes >> 8) << 16 | f16_from_e4m3(codes & 0xff);
}

static float f16_to_float(unsigned bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 0x3ff;
  if (exponent == 31) return mantissa ? NAN : bits & 0x8000 ? -INFINITY : INFINITY;
  const float magnitude = exponent ? std::ldexp(1024.0f + mantissa, exponent - 25) : std::ldexp((float)mantissa, -24);
  return bits & 0x8000 ? -magnitude : magnitude;
}

static void floats_from_f16_pair(float& low, float& high, unsigned pair) {
  low = f16_to_float(pair & 0xffff), high = f16_to_float(pair >> 16);
}

static float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
static void exp2_approximate(float& out, float x) { out = std::exp2(x); }
static void exp2_flushing(float& out, float x) { out = flushed(std::exp2(flushed(x))); }
static void reciprocal_approximate(float& out, float x) { out = 1 / x; }
static void reciprocal_flushing(float& out, float x) { out = flushed(1 / flushed(x)); }
static void max_of_u16_pairs(unsigned& out, unsigned a, unsigned b) {
  const unsigned high = a >> 16 > b >> 16 ? a : b, low = (a & 0xffff) > (b & 0xffff) ? a : b;
  out = high >> 16 << 16 | (low & 0xffff);
}
template <class T>
static void add_if_greater(T& count, int a, int b) { count += a > b; }

// --- memory ----------------------------------------------------------------------------------------------------------
static void load_shared_u16(unsigned short& x, unsigned address) { x = shared_at<unsigned short>(address); }
static void load_shared_u32(unsigned& x, unsigned address) { x = shared_at<unsigned>(address); }
struct alignas(16) Four {
  unsigned x[4];
};
static void load_shared_v4(unsigned& x, unsigned& y, unsigned& z, unsigned& w, unsigned address) {
  const Four& v = shared_at<Four>(address);
  x = v.x[0], y = v.x[1], z = v.x[2], w = v.x[3];
}
static void load_shared_v4_if(unsigned& x, unsigned& y, unsigned& z, unsigned& w, unsigned address, unsigned condition) {
  if (condition) load_shared_v4(x, y, z, w, address);
}
static void or_shared(unsigned address, unsigned bits) { shared_at<unsigned>(address) |= bits; }
// What polls lets others run.
static void load_global(unsigned& x, const void* pointer) {
  leave();
  x = *(const unsigned*)pointer;
}
static void store_global(void* pointer, unsigned x) {
  *(unsigned*)pointer = x;
  ++machine->progress;
}
static void zero(uint64_t& x) { x = 0; }
static void zero(unsigned long long& x) { x = 0; }
static void zero(unsigned& x) { x = 0; }
template <class... T>
static void nothing(const T&...) {}

// --- tensor cores ----------------------------------------------------------------------------------------------------
// A fragment's input k of 16 lies with the thread k / 2 % 4 of its quad, in register k / 8, half k % 2.
static float element(const uint64_t* registers, int k, int stride) {
  return bf16_to_float((unsigned)registers[k / 8 * stride] >> 16 * (k % 2));
}

static void multiply_m16n8k16(float& d0, float& d1, float& d2, float& d3, unsigned a0, unsigned a1, unsigned a2,
                              unsigned a3, unsigned b0, unsigned b1) {
  const auto values = exchange(a0, a1, a2, a3, b0, b1);
  const unsigned row = lane() / 4, column = lane() % 4 * 2;
  double sums[4] = {d0, d1, d2, d3};
  for (int k = 0; k < 16; ++k)
    for (int i = 0; i < 4; ++i) {
      const double a = element(values[4 * row + k / 2 % 4] + i / 2, k, 2);
      sums[i] += a * element(values[4 * (column + i % 2) + k / 2 % 4] + 4, k, 1);
    }
  d0 = sums[0], d1 = sums[1], d2 = sums[2], d3 = sums[3];
}

// 64 outputs by WIDTH columns of shared memory: rows of 128 bytes whose 16-byte pieces are swizzled, by a matrix descriptor.
template <int WIDTH>
static void multiply_columns(float* sums, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned long long descriptor) {
  const auto values = exchange(a0, a1, a2, a3);
  const bool is_known = (descriptor >> 62) == 1 && (descriptor >> 32 & 0x3fff) == 64;
  if (!is_known) fail("a descriptor that is not of 128-byte rows in blocks of 1,024");
  // The 18 bits of an address wrap at 256 KB, so the window of dynamic memory is found again.
  const unsigned start = DYNAMIC | (unsigned)(descriptor & 0x3fff) << 4;
  const unsigned row = lane() / 4, quad_thread = lane() % 4;
  for (int i = 0; i < WIDTH / 2; ++i) {
    const unsigned column = i / 4 * 8 + 2 * quad_thread + i % 2;
    double sum = sums[i];
    for (int k = 0; k < 16; ++k) {
      unsigned address = start + column / 8 * 1024 + column % 8 * 128 + 2 * k;
      address ^= (address >> 7 & 7) << 4;
      sum += (double)element(values[4 * row + k / 2 % 4] + i / 2 % 2, k, 2) * bf16_to_float(shared_at<unsigned short>(address));
    }
    sums[i] = (float)sum;
  }
}

// --- launch ----------------------------------------------------------------------------------------------------------
static void run_fiber() {
  machine->run_kernel(machine->kernel, machine->arguments);
  machine->current->is_done = true;
  --machine->current->block->num_live;
  ++machine->progress;
  for (;;) leave();
}

static void load(Block& block) {
  if (machine->loaded == &block) return;
  if (machine->loaded) std::memcpy(machine->loaded->saved.data(), __start_emulated_shared, static_bytes());
  std::memcpy(__start_emulated_shared, block.saved.data(), static_bytes());
  machine->loaded = &block;
}

static unsigned next_random(uint64_t& random) {
  random = random * 6364136223846793005u + 1442695040888963407u;
  return random >> 32;
}

// Lets the threads of some warps of a block, or of all, go on until each waits.
static void run_block(Machine& m, Block& block, bool is_everyone, std::vector<unsigned>& order, uint64_t& random) {
  load(block);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[next_random(random) % i]);
  const unsigned awake = is_everyone ? ~0u : next_random(random);
  for (const unsigned thread : order) {
    Fiber& fiber = m.fibers[(size_t)block.index * m.num_threads + thread];
    if (fiber.is_done || !(awake >> thread / WARP & 1)) continue;
    m.current = &fiber;
    resume(fiber);
    if (m.error) return;
  }
}

// Runs all until they are done, nothing goes on any more, or one fails. Returns how many are done.
static size_t run_all(Machine& m) {
  std::vector<unsigned> order(m.num_threads);
  for (unsigned i = 0; i < m.num_threads; ++i) order[i] = i;
  uint64_t random = 1;
  bool is_everyone = true;
  for (int idle = 0;;) {
    const uint64_t before = m.progress;
    size_t num_done = 0;
    for (Block& block : m.blocks) {
      num_done += m.num_threads - block.num_live;
      if (block.num_live) run_block(m, block, is_everyone, order, random);
      if (m.error) return num_done;
    }
    if (num_done == m.fibers.size()) return num_done;
    const bool is_stuck = is_everyone && m.progress == before;
    if (is_stuck && m.under_way.empty() && ++idle > 10) return num_done;
    if (is_stuck && !m.under_way.empty()) {
      for (const Transfer& transfer : m.under_way) finish(transfer);
      m.under_way.clear();
    }
    if (m.progress != before) idle = 0;
    is_everyone = m.progress == before;
  }
}

// A thread that never waits would keep the test from being stopped.
static void stop_late_launch(int signal) {
  if (!machine) return;
  if (!pthread_equal(pthread_self(), machine->system_thread)) {
    pthread_kill(machine->system_thread, signal);
    return;
  }
  machine->error = "a thread does not end";
  if (machine->is_in_fiber) _longjmp(machine->scheduler, 1);
}

static void set_timer(unsigned seconds) {
  const itimerval timer = {{0, 0}, {(time_t)seconds, 0}};
  setitimer(ITIMER_VIRTUAL, &timer, nullptr);
}

// Returns what went wrong, or null.
static const char* run(Machine& m) {
  static char deadlock[80];
  const unsigned cluster_size = m.cluster_size;
  machine = &m;
  std::vector<Cluster> clusters((m.num_blocks + cluster_size - 1) / cluster_size);
  m.blocks.resize(m.num_blocks);
  m.fibers.resize((size_t)m.num_blocks * m.num_threads);
  const size_t stack_bytes = m.fibers.size() * STACK_BYTES;
  char* stacks = (char*)mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) return "no memory for the threads' stacks";
  for (unsigned b = 0; b < m.num_blocks; ++b) {
    Block& block = m.blocks[b];
    block.index = b, block.num_live = m.num_threads;
    block.cluster = &clusters[b / cluster_size];
    block.cluster->num_threads += m.num_threads;
    block.first_of_cluster = b / cluster_size * cluster_size;
    block.warps.resize((m.num_threads + WARP - 1) / WARP);
    block.saved.assign(static_bytes(), PATTERN);
    block.dynamic_storage.assign(m.dynamic_bytes + 1024, PATTERN);
    block.dynamic = (unsigned char*)(((uintptr_t)block.dynamic_storage.data() + 1023) / 1024 * 1024);
    for (unsigned t = 0; t < m.num_threads; ++t) {
      const size_t place = (size_t)b * m.num_threads + t;
      Fiber& fiber = m.fibers[place];
      fiber.thread.x = t, fiber.block = &block;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = stacks + place * STACK_BYTES;
      fiber.context.uc_stack.ss_size = STACK_BYTES;
      makecontext(&fiber.context, run_fiber, 0);
    }
  }
  struct sigaction action = {};
  action.sa_handler = stop_late_launch;
  action.sa_flags = SA_NODEFER;  // since it leaves by a jump
  sigaction(SIGVTALRM, &action, nullptr);
  set_timer(m.max_seconds);
  const size_t num_done = run_all(m);
  set_timer(0);
  munmap(stacks, stack_bytes);
  machine = nullptr;
  if (!m.error && num_done < m.fibers.size()) {
    std::snprintf(deadlock, sizeof(deadlock), "deadlock: %zu of %zu threads wait", m.fibers.size() - num_done, m.fibers.size());
    m.error = deadlock;
  }
  return m.error;
}

// max_seconds: of processor time.
template <class Arguments>
static const char* run(unsigned num_blocks, unsigned num_threads, unsigned cluster_size, unsigned dynamic_bytes,
                       unsigned max_seconds, void (*kernel)(Arguments), const void* arguments) {
  Machine m;
  m.num_blocks = num_blocks, m.num_threads = num_threads, m.cluster_size = cluster_size;
  m.dynamic_bytes = dynamic_bytes, m.max_seconds = max_seconds;
  m.kernel = (const void*)kernel, m.arguments = arguments;
  m.run_kernel = [](const void* kernel, const void* arguments) { ((void (*)(Arguments))kernel)(*(const Arguments*)arguments); };
  return run(m);
}

}  // namespace emulated

// --- CUDA's names ----------------------------------------------------------------------------------------------------
#define threadIdx (emulated::machine->current->thread)
#define blockIdx (emulated::Index{emulated::machine->current->block->index})
#define blockDim (emulated::Index{emulated::machine->num_threads})
#define gridDim (emulated::Index{emulated::machine->num_blocks})

template <class T>
static T max(T a, T b) { return a < b ? b : a; }
template <class T>
static T min(T a, T b) { return b < a ? b : a; }

struct int2 { int x, y; };
struct uint2 { unsigned x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
static int2 make_int2(int x, int y) { return {x, y}; }
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

static void __syncthreads() { emulated::synchronize(0, emulated::machine->num_threads); }
static void __syncwarp() { emulated::exchange(); }
static unsigned __ballot_sync(unsigned, bool own) {
  return emulated::reduce(own ? 1u << emulated::lane() : 0u, [](unsigned a, unsigned b) { return a | b; });
}
static bool __any_sync(unsigned mask, bool own) { return __ballot_sync(mask, own) != 0; }
template <class T>
static T __shfl_sync(unsigned, T own, int from) { return emulated::as<T>(emulated::exchange(own)[from & 31][0]); }
template <class T>
static T __shfl_xor_sync(unsigned mask, T own, int other) { return __shfl_sync(mask, own, emulated::lane() ^ other); }
template <class T>
static T __shfl_up_sync(unsigned mask, T own, unsigned step) {
  return __shfl_sync(mask, own, emulated::lane() < step ? emulated::lane() : emulated::lane() - step);
}
template <class T>
static T __reduce_add_sync(unsigned, T own) { return emulated::reduce(own, [](T a, T b) { return a + b; }); }
template <class T>
static T __reduce_max_sync(unsigned, T own) { return emulated::reduce(own, [](T a, T b) { return max(a, b); }); }
template <class T>
static T __reduce_min_sync(unsigned, T own) { return emulated::reduce(own, [](T a, T b) { return min(a, b); }); }
template <class T, class U>
static T atomicOr(T* p, U x) { return std::exchange(*p, *p | (T)x); }
template <class T, class U>
static T atomicAdd(T* p, U x) { return std::exchange(*p, *p + (T)x); }
template <class T, class U>
static T atomicMax(T* p, U x) { return std::exchange(*p, max(*p, (T)x)); }
template <class T, class U>
static T atomicMin(T* p, U x) { return std::exchange(*p, min(*p, (T)x)); }

static int __popc(unsigned x) { return __builtin_popcount(x); }
static int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static int __ffs(int x) { return __builtin_ffs(x); }
static int __ffsll(long long x) { return __builtin_ffsll(x); }
static unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
static int __float_as_int(float x) { return (int)__float_as_uint(x); }
static float __uint_as_float(unsigned x) { return emulated::as<float>(x); }
static float __int_as_float(int x) { return __uint_as_float((unsigned)x); }
static unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = (uint64_t)y << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}
static unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return (unsigned)(((uint64_t)high << 32 | low) << (shift & 31) >> 32);
}
static float __fadd_rn(float a, float b) { return a + b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static size_t __cvta_generic_to_shared(const void* p) { return emulated::address_of(p); }

"""That kernels on a CPU fail where a GPU's would: without a barrier, a wait, or a thread that others wait for."""

import ctypes

import cuda_on_cpu
import pytest

from rankmoe.kernels import combine_cuda, experts_common, experts_grouped_cuda, front_cuda, schedule_cuda

needs_compiler = pytest.mark.skipif(not cuda_on_cpu.can_run(), reason="needs g++")

#: Warps put a number each into shared memory; every thread then adds them up.
SUM = """
struct Arguments { int* out; };
extern "C" __global__ void kernel(const __grid_constant__ Arguments a) {
  __shared__ int part[4];
  const int warp = threadIdx.x >> 5;
  if ((threadIdx.x & 31) == 31) part[warp] = warp + 1;
  BARRIER
  a.out[blockIdx.x * 128 + threadIdx.x] = part[0] + part[1] + part[2] + part[3];
}
"""
#: A bulk copy of sixteen integers to shared memory.
COPY = """
struct Arguments { const int* source; int* out; };
extern "C" __global__ void kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) unsigned char bytes[];
  __shared__ unsigned long long barrier;
  const unsigned address = (unsigned)__cvta_generic_to_shared(&barrier);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address) : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(EXPECTED) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     (unsigned)__cvta_generic_to_shared(bytes)),
                 "l"(a.source), "r"(64), "r"(address)
                 : "memory");
  }
  __syncthreads();
  WAIT
  if (threadIdx.x < 16) a.out[threadIdx.x] = ((const int*)bytes)[threadIdx.x];
}
"""
WAIT = (
    r'asm volatile("{\n .reg .pred done;\n again:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"'
    r'" @!done bra again;\n}" ::"r"(address), "r"(0) : "memory");'
)
#: Every thread of a cluster sets a bit in the first block's shared memory, which that block writes when all have come.
CLUSTER = """
struct Arguments { unsigned* out; };
extern "C" __global__ void kernel(const __grid_constant__ Arguments a) {
  __shared__ unsigned bits;
  __shared__ unsigned long long barrier;
  unsigned there, counting;
  const unsigned own = (unsigned)__cvta_generic_to_shared(&bits);
  const unsigned own_barrier = (unsigned)__cvta_generic_to_shared(&barrier);
  if (threadIdx.x == 0) {
    bits = 0;
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(own_barrier) : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(own_barrier), "r"(4 * 32) : "memory");
  }
  __syncthreads();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(there) : "r"(own));
  asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(counting) : "r"(own_barrier));
  if (threadIdx.x < 16)
    asm volatile("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.or.b32 [%0], %1, [%2];" ::"r"(
                     there),
                 "r"(1u << (threadIdx.x + 16 * (blockIdx.x % 2))), "r"(counting)
                 : "memory");
  if (blockIdx.x % 2) return;
  asm volatile("{.reg .pred done;\\n"
               "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\\n"
               "@!done bra again;}" ::"r"(own_barrier)
               : "memory");
  a.out[blockIdx.x] = bits;
}
"""


def run(
    directory,
    source: str,
    *buffers: ctypes.Array,
    num_blocks: int = 1,
    num_threads: int = 128,
    cluster: int = 1,
    max_seconds: int = 60,
):
    """What the launch reports, None where all is well."""
    library = cuda_on_cpu.compile_kernel(source, "kernel", {}, directory)
    pointers = (ctypes.c_void_p * len(buffers))(*(ctypes.addressof(buffer) for buffer in buffers))
    return library.launch(num_blocks, num_threads, cluster, 1024, max_seconds, pointers)


def integers(*values: int) -> ctypes.Array:
    """In memory that a bulk copy can read: from 16 bytes on."""
    storage = (ctypes.c_uint32 * (len(values) + 4))()
    offset = -ctypes.addressof(storage) % 16
    found = (ctypes.c_uint32 * len(values)).from_buffer(storage, offset)
    found[:] = values
    return found


@needs_compiler
def test_a_missing_barrier_shows(emulation_directory):
    for barrier, is_right in (("__syncthreads();", True), ("", False)):
        out = integers(*[0] * 256)
        assert run(emulation_directory, SUM.replace("BARRIER", barrier), out, num_blocks=2) is None
        assert (list(out) == [10] * 256) == is_right


@needs_compiler
def test_a_copy_is_not_there_before_its_wait(emulation_directory):
    values = list(range(1, 17))
    for wait, expected in ((WAIT, values), ("", [0xCDCDCDCD] * 16)):
        out = integers(*[0] * 16)
        source = COPY.replace("WAIT", wait).replace("EXPECTED", "64")
        assert run(emulation_directory, source, integers(*values), out) is None
        assert list(out) == expected


@needs_compiler
def test_waiting_for_what_never_comes_is_reported(emulation_directory):
    buffers = integers(*range(16)), integers(*[0] * 16)
    source = COPY.replace("WAIT", WAIT).replace("EXPECTED", "80")
    assert run(emulation_directory, source, *buffers) == b"deadlock: 128 of 128 threads wait"
    source = SUM.replace("BARRIER", "if (threadIdx.x < 96) __syncthreads();")
    assert run(emulation_directory, source, integers(*[0] * 128)) == b"deadlock: 96 of 128 threads wait"


@needs_compiler
def test_a_thread_that_never_ends_is_stopped(emulation_directory):
    source = SUM.replace("BARRIER", "__syncthreads(); while (threadIdx.x == 77 && ((volatile int*)part)[1]) continue;")
    assert run(emulation_directory, source, integers(*[0] * 128), max_seconds=1) == b"a thread does not end"


@needs_compiler
def test_a_cluster_meets_in_its_first_blocks_memory(emulation_directory):
    out = integers(*[0] * 4)
    assert run(emulation_directory, CLUSTER, out, num_blocks=4, num_threads=32, cluster=2) is None
    assert list(out) == [0xFFFFFFFF, 0, 0xFFFFFFFF, 0]


def test_an_instruction_without_an_emulation_is_named():
    with pytest.raises(NotImplementedError, match=r"no emulation of 'trap;'"):
        cuda_on_cpu.translate('void f() { asm volatile("trap;"); }')


@pytest.mark.parametrize(
    "source",
    [front_cuda.source, schedule_cuda.source, combine_cuda.source, experts_grouped_cuda.source],
    ids=lambda source: source.__module__.rpartition(".")[2],
)
def test_no_kernel_keeps_an_instruction(source):
    assert "asm" not in cuda_on_cpu.translate(source())
    for name in ("experts.cu", "widen_rows.cu"):
        assert "asm" not in cuda_on_cpu.translate(experts_common.source(name))

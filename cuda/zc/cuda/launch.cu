#include "zc/base/error.h"
#include "zc/cuda/kernels.h"
#include "zc/cuda/launch.h"

namespace zc::cuda {
namespace {

template <class T>
struct Register {
  T value;
  __device__ T& operator[](int) { return value; }
};

struct DeviceBlock {
  std::int64_t index, count;

  template <class F>
  __device__ void each(const F& f) const {
    f(static_cast<int>(threadIdx.x));
    __syncthreads();
  }
  template <class T>
  __device__ Register<T> per_thread() const {
    return {};
  }
  __device__ void add(std::int64_t* at, std::int64_t value) const {
    atomicAdd(reinterpret_cast<unsigned long long*>(at), static_cast<unsigned long long>(value));
  }
  __device__ void set(std::int64_t* at, std::int64_t value) const {
    atomicExch(reinterpret_cast<unsigned long long*>(at), static_cast<unsigned long long>(value));
  }
};

// At least 512 threads of a multiprocessor: up to 128 registers each, which is more than any kernel wants.
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 512 / Kernel::kThreads) run(const __grid_constant__ Kernel kernel) {
  if constexpr (requires { typename Kernel::Shared; }) {
    __shared__ typename Kernel::Shared shared;
    kernel(DeviceBlock{blockIdx.x, gridDim.x}, shared);
  } else {
    kernel(Thread{blockIdx.x, gridDim.x, static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x)});
  }
}

}  // namespace

template <class Kernel>
void launch(const Kernel& kernel, std::int64_t blocks, device::Stream stream) {
  static_assert(sizeof(Kernel) <= kMaxArgumentBytes);
  run<<<static_cast<unsigned>(blocks), Kernel::kThreads, 0, static_cast<cudaStream_t>(stream.handle)>>>(kernel);
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return;
  int device = -1;
  cudaGetDevice(&device);
  fail(ErrorKind::kDevice, "[cuda] launch of kernel '", Kernel::kName, "' failed on cuda:", device, ": got ",
       cudaGetErrorName(error), " (", cudaGetErrorString(error), ") from <<<", blocks, ", ", Kernel::kThreads,
       ">>> in launch.cu, expected cudaSuccess. An error of earlier work may show here: CUDA_LAUNCH_BLOCKING=1 shows "
       "where it happened.");
}

#define ZC_INSTANCE(...) template void launch(const __VA_ARGS__&, std::int64_t, device::Stream);
ZC_KERNELS(ZC_INSTANCE)
#undef ZC_INSTANCE

}  // namespace zc::cuda

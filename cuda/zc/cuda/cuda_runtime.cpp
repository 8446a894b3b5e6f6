// The runtime itself, linked statically: the package then loads on machines without a driver.
#include <cuda_runtime_api.h>

#include "zc/base/error.h"
#include "zc/cuda/runtime.h"

namespace zc::cuda {
namespace {

int device_of_thread() {
  int device = -1;
  cudaGetDevice(&device);
  return device;
}

void check(cudaError_t result, const char* call, int line) {
  if (result == cudaSuccess) return;
  cudaGetLastError();  // this call's is reported here, and not again by the next one
  fail(ErrorKind::kDevice, "[cuda] ", call, " failed (cuda_runtime.cpp:", line, ") on cuda:", device_of_thread(), ": ",
       cudaGetErrorName(result), ", ", cudaGetErrorString(result),
       ". It may come from an earlier call or kernel on this device: run with CUDA_LAUNCH_BLOCKING=1 to find it.");
}

// Of what cannot throw: a failure shows again at the next call, if it lasts, and must not be blamed on that if not.
void let_pass(cudaError_t result) {
  if (result != cudaSuccess) cudaGetLastError();
}

#define ZC_CUDA(call) check(call, #call, __LINE__)

cudaStream_t stream_of(void* handle) { return static_cast<cudaStream_t>(handle); }
cudaEvent_t event_of(void* handle) { return static_cast<cudaEvent_t>(handle); }

class CudaRuntime final : public Runtime {
 public:
  int num_devices() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
    cudaGetLastError();
    return 0;
  }

  std::string device_name(int device) override { return properties(device).name; }

  std::string device_id(int device) override {
    constexpr char kDigits[] = "0123456789abcdef";
    std::string text;
    for (const char byte : properties(device).uuid.bytes) {
      text += kDigits[(byte >> 4) & 15];
      text += kDigits[byte & 15];
    }
    return text;
  }

  int num_multiprocessors(int device) override {
    int count = 0;
    ZC_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    return count;
  }

  int current_device() override {
    int device = 0;
    ZC_CUDA(cudaGetDevice(&device));
    return device;
  }

  void set_device(int device) override { ZC_CUDA(cudaSetDevice(device)); }

  void* allocate(std::int64_t bytes) override {
    void* memory = nullptr;
    const cudaError_t result = cudaMalloc(&memory, static_cast<std::size_t>(bytes));
    return given(result, memory, "cudaMalloc", __LINE__);
  }
  void free(void* memory) noexcept override { let_pass(cudaFree(memory)); }

  void* allocate_pinned(std::int64_t bytes) override {
    void* memory = nullptr;
    const cudaError_t result = cudaHostAlloc(&memory, static_cast<std::size_t>(bytes), cudaHostAllocPortable);
    return given(result, memory, "cudaHostAlloc", __LINE__);
  }
  void free_pinned(void* memory) noexcept override { let_pass(cudaFreeHost(memory)); }

  void copy(void* to, const void* from, std::int64_t bytes, void* stream) override {
    ZC_CUDA(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault, stream_of(stream)));
  }
  void zero(void* memory, std::int64_t bytes, void* stream) override {
    ZC_CUDA(cudaMemsetAsync(memory, 0, static_cast<std::size_t>(bytes), stream_of(stream)));
  }

  void* make_stream() override {
    int lowest = 0, highest = 0;
    ZC_CUDA(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    cudaStream_t stream = nullptr;
    ZC_CUDA(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest));
    return stream;
  }
  void free_stream(void* stream) noexcept override { let_pass(cudaStreamDestroy(stream_of(stream))); }
  void synchronize(void* stream) override { ZC_CUDA(cudaStreamSynchronize(stream_of(stream))); }

  void* make_event() override {
    cudaEvent_t event = nullptr;
    ZC_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return event;
  }
  void free_event(void* event) noexcept override { let_pass(cudaEventDestroy(event_of(event))); }
  void record(void* event, void* stream) override { ZC_CUDA(cudaEventRecord(event_of(event), stream_of(stream))); }
  bool done(void* event) override {
    const cudaError_t result = cudaEventQuery(event_of(event));
    if (result != cudaErrorNotReady) {
      check(result, "cudaEventQuery", __LINE__);
      return true;
    }
    cudaGetLastError();  // it is kept as if it were an error, and would be taken for one of the next launch
    return false;
  }
  void wait(void* stream, void* event) override { ZC_CUDA(cudaStreamWaitEvent(stream_of(stream), event_of(event), 0)); }

 private:
  static cudaDeviceProp properties(int device) {
    cudaDeviceProp properties{};
    ZC_CUDA(cudaGetDeviceProperties(&properties, device));
    return properties;
  }

  static void* given(cudaError_t result, void* memory, const char* call, int line) {
    if (result == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      return nullptr;
    }
    check(result, call, line);
    return memory;
  }
};

}  // namespace

std::shared_ptr<Runtime> make_runtime() { return std::make_shared<CudaRuntime>(); }

}  // namespace zc::cuda

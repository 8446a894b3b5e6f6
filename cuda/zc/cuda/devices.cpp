// The devices of this process.
#include <map>
#include <mutex>

#include "zc/cuda/cuda_device.h"
#include "zc/cuda/cuda_kernels.h"

namespace zc::cuda {
namespace {

std::shared_ptr<Runtime>& runtime() {
  static std::shared_ptr<Runtime> instance = make_runtime();
  return instance;
}

}  // namespace

int num_cuda_devices() { return runtime()->num_devices(); }

CudaDevice& cuda_device(int index) {
  static std::mutex mutex;
  static auto& devices = *new std::map<int, CudaDevice>;  // never destroyed: CUDA may be gone by then
  const std::lock_guard lock(mutex);
  if (const auto at = devices.find(index); at != devices.end()) return at->second;
  const int num_devices = num_cuda_devices();
  ZC_CHECK(index >= 0 && index < num_devices, kDevice, "[cuda] no device cuda:", index, ": got ", num_devices,
           " devices (", cuda_status(), "). Look at nvidia-smi and CUDA_VISIBLE_DEVICES, or train on the CPU.");
  return devices.try_emplace(index, runtime(), index, make_cuda_kernels(*runtime(), index)).first->second;
}

std::string cuda_status() {
  const int num_devices = num_cuda_devices();
  if (num_devices == 0) return "CUDA backend built, no device";
  const std::string first = runtime()->device_name(0);
  std::string text = concat(num_devices, " x ", first);
  for (int device = 1; device < num_devices; ++device) {
    if (runtime()->device_name(device) != first) return text + " and others";
  }
  return text;
}

}  // namespace zc::cuda

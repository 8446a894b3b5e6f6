#include "zc/cuda/backend.h"

#include <map>
#include <mutex>

#include "zc/cuda/cuda_device.h"
#include "zc/cuda/cuda_kernels.h"
#include "zc/cuda/nccl_communicator.h"

namespace zc::cuda {
namespace {

const std::shared_ptr<Runtime>& runtime() {
  static const std::shared_ptr<Runtime> instance = make_runtime();
  return instance;
}

std::string names_of_devices(int num_devices) {
  const std::string first = runtime()->device_name(0);
  for (int device = 1; device < num_devices; ++device) {
    if (runtime()->device_name(device) != first) return first + " and others";
  }
  return first;
}

CudaDevice& cuda_device(int index) {
  static std::mutex mutex;
  static auto& devices = *new std::map<int, CudaDevice>;  // never destroyed: CUDA may be gone by then
  const std::lock_guard lock(mutex);
  if (const auto at = devices.find(index); at != devices.end()) return at->second;
  const Status found = status();
  ZC_CHECK(index >= 0 && index < found.num_devices, kDevice, "[cuda] no device cuda:", index, ": got \"", found.text,
           "\", expected a device of that number. Look at nvidia-smi and CUDA_VISIBLE_DEVICES, or train on the CPU.");
  return devices.try_emplace(index, runtime(), index, make_cuda_kernels(*runtime(), index)).first->second;
}

}  // namespace

Status status() {
  const int num_devices = runtime()->num_devices();
  if (num_devices == 0) return {.built = true, .num_devices = 0, .text = "CUDA backend built, no device"};
  return {.built = true,
          .num_devices = num_devices,
          .text = concat("CUDA backend, ", num_devices, " x ", names_of_devices(num_devices))};
}

device::Device& device(int index) { return cuda_device(index); }

std::string nccl(const std::string& path) { return load_nccl(path).description; }

std::shared_ptr<comm::Communicator> make_communicator(std::shared_ptr<comm::Communicator> host, device::Device& device,
                                                      const Options& options) {
  return make_device_communicator(std::move(host), cuda_device(device.id().index), options.nccl_path,
                                  {.fast = options.fast_reduction});
}

}  // namespace zc::cuda

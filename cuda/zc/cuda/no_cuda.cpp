// Compiled in place of the backend where that is not built.
#include "zc/cuda/cuda_device.h"

namespace zc::cuda {

int num_cuda_devices() { return 0; }

CudaDevice& cuda_device(int index) {
  fail(ErrorKind::kDevice, "[cuda] no device cuda:", index,
       ": this zerocore was built without its CUDA backend. Build it with ZC_CUDA=ON, or train on the CPU.");
}

std::string cuda_status() { return "not built"; }

}  // namespace zc::cuda

// The kernels of a CUDA device. None waits for the device, and none allocates.
#pragma once

#include <memory>

#include "zc/cuda/runtime.h"
#include "zc/device/kernels.h"

namespace zc::cuda {

// The runtime must outlive them.
std::unique_ptr<device::Kernels> make_cuda_kernels(Runtime& runtime, int device);

}  // namespace zc::cuda

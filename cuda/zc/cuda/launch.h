// Runs kernels. launch.cu does it on the device, launch_host.cpp on the host, for tests; which one is linked decides.
#pragma once

#include <cstdint>

#include "zc/device/kernels.h"

namespace zc::cuda {

// What a device of any age and driver takes.
inline constexpr std::size_t kMaxArgumentBytes = 4096;

// Puts one of ZC_KERNELS on a stream of the calling thread's device, with Kernel::kThreads threads a block. Throws
// kDevice when CUDA refuses it.
template <class Kernel>
void launch(const Kernel& kernel, std::int64_t blocks, device::Stream stream);

}  // namespace zc::cuda

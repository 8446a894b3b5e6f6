// The CPU's kernels, as work on the streams of a simulation. They find pieces where a GPU does, in device memory.
#pragma once

#include <memory>

#include "cuda/simulation.h"
#include "zc/device/kernels.h"

namespace zc::cuda {

std::unique_ptr<device::Kernels> make_simulated_kernels(Simulation& simulation);

}  // namespace zc::cuda

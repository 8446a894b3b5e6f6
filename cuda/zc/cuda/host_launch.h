// What the host build of the kernels needs from whoever simulates streams.
#pragma once

#include <functional>

namespace zc::cuda {

// Puts work on a simulated stream (Stream::handle).
void enqueue(void* stream, std::function<void()> work);

}  // namespace zc::cuda

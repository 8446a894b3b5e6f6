#include "cuda/at_once.h"

#include <cstdlib>
#include <cstring>

#include "zc/cuda/host_launch.h"

namespace zc::cuda {
namespace {

int launches = 0;

}  // namespace

void* HostRuntime::allocate(std::int64_t bytes) { return std::malloc(static_cast<std::size_t>(bytes)); }
void HostRuntime::free(void* memory) noexcept { std::free(memory); }
void HostRuntime::copy(void* to, const void* from, std::int64_t bytes, void*) {
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}
void HostRuntime::zero(void* memory, std::int64_t bytes, void*) {
  std::memset(memory, 0, static_cast<std::size_t>(bytes));
}

void enqueue(void*, std::function<void()> work) {
  ++launches;
  work();
}

int num_launches() { return launches; }

}  // namespace zc::cuda

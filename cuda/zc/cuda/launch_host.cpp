// All blocks and threads one after another: the kernels without a GPU, for tests.
#include <vector>

#include "zc/cuda/host_launch.h"
#include "zc/cuda/kernels.h"
#include "zc/cuda/launch.h"

namespace zc::cuda {
namespace {

struct HostBlock {
  std::int64_t index, count;
  int num_threads;

  template <class F>
  void each(const F& f) const {
    for (int t = 0; t < num_threads; ++t) f(t);
  }
  template <class T>
  std::vector<T> per_thread() const {
    return std::vector<T>(static_cast<std::size_t>(num_threads));
  }
  void add(std::int64_t* at, std::int64_t value) const { *at += value; }
  void set(std::int64_t* at, std::int64_t value) const { *at = value; }
};

template <class Kernel>
void run(const Kernel& kernel, std::int64_t blocks) {
  for (std::int64_t block = 0; block < blocks; ++block) {
    if constexpr (requires { typename Kernel::Shared; }) {
      typename Kernel::Shared shared;
      kernel(HostBlock{block, blocks, Kernel::kThreads}, shared);
    } else {
      for (int thread = 0; thread < Kernel::kThreads; ++thread) kernel(Thread{block, blocks, thread, Kernel::kThreads});
    }
  }
}

}  // namespace

template <class Kernel>
void launch(const Kernel& kernel, std::int64_t blocks, device::Stream stream) {
  static_assert(sizeof(Kernel) <= kMaxArgumentBytes);
  enqueue(stream.handle, [kernel, blocks] { run(kernel, blocks); });
}

#define ZC_INSTANCE(...) template void launch(const __VA_ARGS__&, std::int64_t, device::Stream);
ZC_KERNELS(ZC_INSTANCE)
#undef ZC_INSTANCE

}  // namespace zc::cuda

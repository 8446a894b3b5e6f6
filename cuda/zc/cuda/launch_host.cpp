// All blocks and threads one after another: the kernels without a GPU, for tests. As on a GPU, neither the order of
// threads nor what shared memory holds at first is to be relied on: the one is scattered, the other garbage.
#include <cstring>
#include <vector>

#include "zc/cuda/host_launch.h"
#include "zc/cuda/kernels.h"
#include "zc/cuda/launch.h"

namespace zc::cuda {
namespace {

constexpr int kScatter = 77;  // odd: thread counts are powers of two, so each thread has its turn

struct HostBlock {
  std::int64_t index, count;
  int num_threads;
  mutable int calls = 0;

  template <class F>
  void each(const F& f) const {
    for (int t = 0; t < num_threads; ++t) f((t * kScatter + calls) % num_threads);
    ++calls;
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
  static_assert((Kernel::kThreads & (Kernel::kThreads - 1)) == 0);
  for (std::int64_t block = blocks; block-- > 0;) {
    if constexpr (requires { typename Kernel::Shared; }) {
      typename Kernel::Shared shared;
      std::memset(static_cast<void*>(&shared), 0xfb, sizeof shared);
      kernel(HostBlock{block, blocks, Kernel::kThreads}, shared);
    } else {
      for (int t = 0; t < Kernel::kThreads; ++t) {
        kernel(Thread{block, blocks, t * kScatter % Kernel::kThreads, Kernel::kThreads});
      }
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

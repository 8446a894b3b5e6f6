// The CUDA runtime as plain host memory; work put on a stream is done at once.
#pragma once

#include "zc/cuda/runtime.h"

namespace zc::cuda {

class HostRuntime final : public Runtime {
 public:
  explicit HostRuntime(int num_multiprocessors = 2) : num_multiprocessors_(num_multiprocessors) {}

  int num_devices() override { return 1; }
  std::string device_name(int) override { return "host"; }
  int num_multiprocessors(int) override { return num_multiprocessors_; }
  void set_device(int) override {}
  void* allocate(std::int64_t bytes) override;
  void free(void* memory) noexcept override;
  void* allocate_pinned(std::int64_t bytes) override { return allocate(bytes); }
  void free_pinned(void* memory) noexcept override { free(memory); }
  void copy(void* to, const void* from, std::int64_t bytes, void*) override;
  void zero(void* memory, std::int64_t bytes, void*) override;
  void* make_stream() override { return nullptr; }
  void free_stream(void*) noexcept override {}
  void synchronize(void*) override {}
  void* make_event() override { return nullptr; }
  void free_event(void*) noexcept override {}
  void record(void*, void*) override {}
  bool done(void*) override { return true; }
  void wait(void*, void*) override {}

 private:
  int num_multiprocessors_;
};

// Kernels launched so far.
int num_launches();

}  // namespace zc::cuda

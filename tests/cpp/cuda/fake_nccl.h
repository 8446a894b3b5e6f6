// NCCL over a simulation of streams: ranks are threads, each with a device of its own, and a collective is work that
// their streams do together.
#pragma once

#include <string>
#include <vector>

#include "cuda/simulation.h"
#include "zc/cuda/nccl_api.h"

namespace zc::cuda {

// One at a time in a process.
class FakeNccl {
 public:
  explicit FakeNccl(Simulation& simulation);
  ~FakeNccl();
  FakeNccl(const FakeNccl&) = delete;
  FakeNccl& operator=(const FakeNccl&) = delete;

  const NcclApi& api() const { return api_; }

  // From now on, of the device's communicators: an asynchronous error; every call after the connecting ones fails.
  void fail_asynchronously(int device);
  void refuse_calls(int device);
  void refuse_to_connect(int device);

  int num_live() const;       // communicators that were neither destroyed nor aborted
  int num_aborted() const;    // so far
  int num_connected() const;  // so far
  std::vector<std::string> problems() const;

 private:
  NcclApi api_;
};

}  // namespace zc::cuda

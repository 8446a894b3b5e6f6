// What the rest of the program sees of CUDA. One of two sources is compiled: backend.cpp, or no_backend.cpp, with which
// there is no CUDA and every request for it is a kDevice error.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "zc/comm/communicator.h"
#include "zc/device/device.h"

namespace zc::cuda {

struct Status {
  bool built = false;
  int num_devices = 0;
  std::string text;  // "no CUDA backend", "CUDA backend built, no device", "CUDA backend, 2 x NVIDIA H200"
};

// Creates no context on any device. Never throws.
Status status();

// One instance a device and process. Throws kDevice where there is none.
device::Device& device(int index);

struct Options {
  bool fast_reduction = false;  // NCCL's own reduce-scatter: faster, and outside the bit promise
  std::string nccl_path;        // a file that is tried after the libnccl that is loaded already; empty: none
};

// The ranks of `host`, with collectives on memory of `device`: by NCCL, or through host memory where ranks share a
// device. Collective over `host`; blocks.
std::shared_ptr<comm::Communicator> make_communicator(std::shared_ptr<comm::Communicator> host, device::Device& device,
                                                      const Options& options);

// "NCCL 2.27.3 (/opt/nccl/libnccl.so.2)", which it loads; see Options::nccl_path.
std::string nccl(const std::string& path);

// Returns when no collective of this process is under way on a device, and all that their threads were to drop is gone;
// false after `limit`.
bool wait_until_idle(std::chrono::milliseconds limit);

}  // namespace zc::cuda

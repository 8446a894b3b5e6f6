#include "zc/base/error.h"
#include "zc/cuda/backend.h"

namespace zc::cuda {
namespace {

[[noreturn]] void fail_not_built() {
  fail(ErrorKind::kDevice,
       "[cuda] this build has no CUDA backend: got a request for a CUDA device, expected one for the CPU. Install with "
       "`pip install . --config-settings=cmake.define.ZC_CUDA=ON`, or train on the CPU.");
}

}  // namespace

Status status() { return {.built = false, .num_devices = 0, .text = "no CUDA backend"}; }

device::Device& device(int) { fail_not_built(); }

std::shared_ptr<comm::Communicator> make_communicator(std::shared_ptr<comm::Communicator>, device::Device&,
                                                      const Options&) {
  fail_not_built();
}

std::string nccl(const std::string&) { fail_not_built(); }

bool wait_until_idle(std::chrono::milliseconds) { return true; }

}  // namespace zc::cuda

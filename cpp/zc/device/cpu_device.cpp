#include <cstring>

#include "zc/device/device.h"

namespace zc::device {
namespace {

class CpuDevice final : public Device {
 public:
  DeviceId id() const override { return {}; }
  Kernels& kernels() override { return cpu_kernels(); }
  Memory allocate(std::int64_t bytes) override { return allocate_host(bytes); }

  void copy(BufferView in, BufferView out, Stream) override {
    ZC_CHECK(in.numel == out.numel && in.dtype == out.dtype, kInternal, "[device] copy of ", in.numel, " ",
             name(in.dtype), " elements to ", out.numel, " ", name(out.dtype));
    if (in.numel > 0) std::memcpy(out.data, in.data, static_cast<std::size_t>(in.bytes()));
  }

  void synchronize(Stream) override {}
};

}  // namespace

Device& cpu_device() {
  static CpuDevice device;
  return device;
}

}  // namespace zc::device

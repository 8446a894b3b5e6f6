#include <cstring>

#include "zc/device/device.h"

namespace zc::device {
namespace {

// Everything before has finished already.
class CpuEvent final : public Event {
 public:
  void record(Stream) override {}
  bool done() override { return true; }
  void order(Stream) override {}
};

class CpuDevice final : public Device {
 public:
  DeviceId id() const override { return {}; }
  Kernels& kernels() override { return cpu_kernels(); }
  bool runs_behind() const override { return false; }
  Memory allocate(std::int64_t bytes) override { return allocate_host(bytes); }
  Memory allocate_pinned(std::int64_t bytes) override { return allocate_host(bytes); }
  std::shared_ptr<const Stream> make_stream() override { return std::make_shared<Stream>(); }
  std::unique_ptr<Event> make_event() override { return std::make_unique<CpuEvent>(); }

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

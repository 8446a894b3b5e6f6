#include "zc/device/device.h"

namespace zc::device {
namespace {

class PlanDevice final : public Device {
 public:
  DeviceId id() const override { return {}; }
  Kernels& kernels() override { return cpu_kernels(); }
  bool runs_behind() const override { return false; }
  Memory allocate(std::int64_t bytes) override { return reserve_addresses(bytes); }
  Memory allocate_pinned(std::int64_t bytes) override { return reserve_addresses(bytes); }
  std::shared_ptr<const Stream> make_stream() override { return std::make_shared<Stream>(); }
  std::unique_ptr<Event> make_event() override { return cpu_device().make_event(); }
  void copy(BufferView, BufferView, Stream) override { fail(ErrorKind::kInternal, "[device] a copy in a plan"); }
  void synchronize(Stream) override {}
};

}  // namespace

Device& plan_device() {
  static PlanDevice device;
  return device;
}

}  // namespace zc::device

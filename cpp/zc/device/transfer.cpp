#include "zc/device/transfer.h"

#include <chrono>
#include <thread>

namespace zc::device {

void wait_for(Event& event, const char* what) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::minutes kPatience{10};
  constexpr std::chrono::microseconds kBusy{200}, kPause{20};
  const auto begin = Clock::now();
  while (!event.done()) {
    const auto waited = Clock::now() - begin;
    ZC_CHECK(waited < kPatience, kDevice, "[device] timed out after 10 min: the device has not finished ", what,
             ". Look at what else runs on it.");
    if (waited > kBusy) std::this_thread::sleep_for(kPause);
  }
}

Upload::Upload(Device& device, std::int64_t bytes) : device_(&device), bytes_(bytes) {
  there_ = device.allocate(bytes);
  if (!device.runs_behind()) return;
  for (Buffer& buffer : buffers_) buffer = {device.allocate_pinned(bytes), device.make_event()};
}

std::byte* Upload::host() {
  if (!device_->runs_behind()) return there_.get();
  wait_for(*buffers_[current_].copied, "an earlier step");
  return buffers_[current_].host.get();
}

const std::byte* Upload::send(Stream stream) {
  if (!device_->runs_behind()) return there_.get();
  Buffer& buffer = buffers_[current_];
  device_->copy({buffer.host.get(), bytes_, DType::kU8, {}}, {there_.get(), bytes_, DType::kU8, device_->id()}, stream);
  buffer.copied->record(stream);
  current_ = 1 - current_;
  return there_.get();
}

Download::Download(Device& device, std::int64_t bytes) : device_(&device), bytes_(bytes) {
  there_ = device.allocate(bytes);
  here_ = device.runs_behind() ? device.allocate_pinned(bytes) : there_;
  copied_ = device.make_event();
}

void Download::fetch(Stream stream) {
  if (!device_->runs_behind()) return;
  device_->copy({there_.get(), bytes_, DType::kU8, device_->id()}, {here_.get(), bytes_, DType::kU8, {}}, stream);
  copied_->record(stream);
}

void Download::wait() { wait_for(*copied_, "a step"); }

}  // namespace zc::device

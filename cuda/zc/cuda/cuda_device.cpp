#include "zc/cuda/cuda_device.h"

#include <atomic>
#include <cstring>

namespace zc::cuda {
namespace {

thread_local bool is_own_thread = false;

class CudaEvent final : public device::Event {
 public:
  CudaEvent(std::shared_ptr<Runtime> runtime, int device) : runtime_(std::move(runtime)), device_(device) {
    const OnDevice on(*runtime_, device_);
    handle_ = runtime_->make_event();
  }
  ~CudaEvent() override { runtime_->free_event(handle_); }

  void record(device::Stream stream) override {
    const OnDevice on(*runtime_, device_);
    runtime_->record(handle_, stream.handle);
    recorded_ = true;
  }

  bool done() override { return !recorded_ || runtime_->done(handle_); }

  void order(device::Stream stream) override {
    if (!recorded_) return;
    const OnDevice on(*runtime_, device_);
    runtime_->wait(stream.handle, handle_);
  }

 private:
  std::shared_ptr<Runtime> runtime_;
  int device_;
  void* handle_;
  std::atomic<bool> recorded_{false};
};

}  // namespace

void OnDevice::own_thread() { is_own_thread = true; }

OnDevice::~OnDevice() {
  if (!changed_ || is_own_thread) return;
  try {
    runtime_.set_device(before_);
  } catch (...) {  // it was current before, so only a device that has failed refuses, and says so at the next call
  }
}

Memory CudaDevice::allocate(std::int64_t bytes) {
  const OnDevice on(*runtime_, index_);
  if (bytes == 0) bytes = 1;  // memory has an address
  auto* memory = static_cast<std::byte*>(runtime_->allocate(bytes));
  ZC_CHECK(memory != nullptr, kDevice, "[cuda] no memory left on cuda:", index_, " (", name(), "): got a request for ",
           bytes, " bytes. Use smaller micro-batches or buckets, a higher ZeRO stage, or more ranks.");
  Memory owned(memory, [runtime = runtime_, device = index_](std::byte* at) {
    try {
      const OnDevice back(*runtime, device);
      runtime->free(at);
    } catch (...) {  // the device has failed: its memory goes with the process
    }
  });
  // On a stream of its own: the default one may be waiting for peers, who may be waiting for this rank.
  const std::lock_guard lock(zeroing_mutex_);
  if (zeroing_ == nullptr) zeroing_ = make_stream();
  runtime_->zero(memory, bytes, zeroing_->handle);
  runtime_->synchronize(zeroing_->handle);
  return owned;
}

Memory CudaDevice::allocate_pinned(std::int64_t bytes) {
  const OnDevice on(*runtime_, index_);
  if (bytes == 0) bytes = 1;
  auto* memory = static_cast<std::byte*>(runtime_->allocate_pinned(bytes));
  ZC_CHECK(memory != nullptr, kDevice, "[cuda] no pinned host memory left: got a request for ", bytes,
           " bytes. Look at the limits on locked memory, and at what else runs on this host.");
  std::memset(memory, 0, static_cast<std::size_t>(bytes));
  return {memory, [runtime = runtime_](std::byte* at) { runtime->free_pinned(at); }};
}

std::shared_ptr<const device::Stream> CudaDevice::make_stream() {
  const OnDevice on(*runtime_, index_);
  return {new device::Stream{runtime_->make_stream()}, [runtime = runtime_](const device::Stream* stream) {
            runtime->free_stream(stream->handle);
            delete stream;
          }};
}

std::unique_ptr<device::Event> CudaDevice::make_event() { return std::make_unique<CudaEvent>(runtime_, index_); }

void CudaDevice::copy(BufferView in, BufferView out, device::Stream stream) {
  ZC_CHECK(in.numel == out.numel && in.dtype == out.dtype, kInternal, "[cuda] copy of ", in.numel, " ",
           zc::name(in.dtype), " elements to ", out.numel, " ", zc::name(out.dtype));
  if (in.numel == 0) return;
  const OnDevice on(*runtime_, index_);
  runtime_->copy(out.data, in.data, in.bytes(), stream.handle);
}

void CudaDevice::synchronize(device::Stream stream) {
  const OnDevice on(*runtime_, index_);
  runtime_->synchronize(stream.handle);
}

}  // namespace zc::cuda

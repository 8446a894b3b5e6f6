// A typed, non-owning range of memory. The core never sees a framework's tensor: it sees these.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "zc/base/dtype.h"
#include "zc/base/error.h"

namespace zc {

enum class DeviceType : std::uint8_t { kCpu, kCuda };

struct DeviceId {
  DeviceType type = DeviceType::kCpu;
  int index = 0;
  friend bool operator==(const DeviceId&, const DeviceId&) = default;
};

// "host memory", "cuda:1".
inline std::string to_text(DeviceId device) {
  return device.type == DeviceType::kCpu ? "host memory" : concat("cuda:", device.index);
}

struct BufferView {
  void* data = nullptr;
  std::int64_t numel = 0;
  DType dtype = DType::kF32;
  DeviceId device;

  std::int64_t bytes() const { return numel * size_bytes(dtype); }

  // The `count` elements from `offset` on. Throws kInternal when they leave the view.
  BufferView slice(std::int64_t offset, std::int64_t count) const {
    ZC_CHECK(offset >= 0 && count >= 0 && offset + count <= numel, kInternal, "[base] slice leaves its buffer: got [",
             offset, ", ", offset + count, "), expected within [0, ", numel, ")");
    return {static_cast<std::byte*>(data) + offset * size_bytes(dtype), count, dtype, device};
  }

  // The data as T*. The caller names the element type that matches dtype.
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

}  // namespace zc

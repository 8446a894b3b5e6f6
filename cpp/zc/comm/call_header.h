// What a rank tells its peers when it enters a collective. Travels as bytes between equal builds.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "zc/comm/communicator.h"
#include "zc/comm/transport.h"

namespace zc::comm {

// Texts are copied, never formatted, on the way in; the rest of them is cut. Error messages are made on failure only.
template <std::size_t N>
void copy_text(std::string_view text, char (&out)[N]) {
  const std::size_t length = text.copy(out, N);
  for (std::size_t i = length; i < N; ++i) out[i] = '\0';
}

template <std::size_t N>
std::string_view text_of(const char (&in)[N]) {
  const std::string_view all(in, N);
  return all.substr(0, all.find('\0'));
}

struct CallHeader {
  std::uint64_t fingerprint = 0;
  std::uint64_t sequence = 0;
  std::int64_t numel = 0;
  std::int64_t turn = 0;
  Place place{};  // of what this rank gives
  std::int32_t root = 0;
  Op op = Op::kBarrier;
  ReduceOp reduce = ReduceOp::kSum;
  DType dtype = DType::kF32;
  DType out_dtype = DType::kF32;
  char activity[60] = {};
  char label[68] = {};
};
static_assert(std::is_trivially_copyable_v<CallHeader> && sizeof(CallHeader) == 184);

// A header and, in the same message, the payload of collectives that need no more than this.
inline constexpr std::size_t kInlineBytes = 1024;
struct Envelope {
  CallHeader header;
  std::array<std::byte, kInlineBytes> payload;
};

// "step 41, reduce bucket 7 (layers.3.mlp.*)"
std::string describe(const CallHeader& header);

// The same with what the guard compares: "step 41, reduce bucket 7 [reduce_scatter_add of 8388608 fp32, call 812]"
std::string describe_call(const CallHeader& header);

}  // namespace zc::comm

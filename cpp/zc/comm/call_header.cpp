#include "zc/comm/call_header.h"

namespace zc::comm {

std::string describe(const CallHeader& header) {
  const std::string_view activity = text_of(header.activity);
  std::string_view label = text_of(header.label);
  if (label.empty()) label = name(header.op);
  return activity.empty() ? std::string(label) : concat(activity, ", ", label);
}

std::string describe_call(const CallHeader& header) {
  std::string call = name(header.op);
  if (header.op == Op::kAllReduce) {
    constexpr const char* kNames[] = {"sum", "max", "bit_or"};
    call += concat(" (", kNames[static_cast<std::size_t>(header.reduce)], ")");
  }
  if (header.numel > 0) call += concat(" of ", header.numel, " ", name(header.dtype));
  if (header.op == Op::kReduceScatterAdd && header.out_dtype != header.dtype) {
    call += concat(" into ", name(header.out_dtype));
  }
  if (header.op == Op::kBroadcast) call += concat(" from rank ", header.root);
  return concat(describe(header), " [", call, ", call ", header.sequence, "]");
}

}  // namespace zc::comm

#include "zc/cuda/over_host.h"

#include <span>

namespace zc::cuda {

using comm::Op;

comm::Work run_by(comm::Communicator& comm, const comm::Communicator::Call& call) {
  const auto bytes = [](const BufferView& view) {
    return std::span(view.as<std::byte>(), static_cast<std::size_t>(view.bytes()));
  };
  switch (call.op) {
    case Op::kReduceScatterAdd:
      return comm.reduce_scatter_add(call.in, call.out, call.label, call.first);
    case Op::kAllGather:
      return comm.all_gather(call.in, call.out, call.label);
    case Op::kBroadcast:
      return comm.broadcast(call.out, call.root, call.label);
    case Op::kAllReduce:
      return comm.all_reduce(call.out, call.reduce, call.label, {});
    case Op::kGatherBytes:
      return comm.gather_bytes(bytes(call.in), bytes(call.out), call.label);
    case Op::kBarrier:
      return comm.barrier(call.label);
    case Op::kSplit:
      break;
  }
  fail(ErrorKind::kInternal, "[cuda] ", comm::name(call.op), " is no collective of host memory");
}

comm::Work OverHost::run(const Call& call) {
  host_->set_timeout(timeout());
  if (call.in.device.type == DeviceType::kCpu && call.out.device.type == DeviceType::kCpu) {
    return call.meets_only ? host_->meet(call) : run_by(*host_, call);
  }
  ZC_CHECK(call.in.device == call.out.device, kInternal, "[cuda] ", comm::name(call.op), " \"", call.label, "\" from ",
           to_text(call.in.device), " to ", to_text(call.out.device), ": expected both on one device");
  ZC_CHECK(call.op != Op::kAllReduce || call.reduce != comm::ReduceOp::kBitOr, kUnsupported, "[cuda] all_reduce \"",
           call.label, "\" by bit_or of memory on ", to_text(call.in.device),
           ": expected sum or max. Reduce it in host memory.");
  return run_on_device(call);
}

std::shared_ptr<comm::Communicator> OverHost::split_host(int color, int key) {
  host_->set_timeout(timeout());
  return host_->split(color, key);
}

}  // namespace zc::cuda

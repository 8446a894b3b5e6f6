#include "zc/comm/communicator.h"

#include <algorithm>
#include <cstring>
#include <functional>

namespace zc::comm {
namespace {

// splitmix64's finalizer (Steele, Lea & Flood 2014): every input bit reaches every output bit.
std::uint64_t mix(std::uint64_t seed, std::uint64_t value) {
  std::uint64_t z = seed ^ (value + 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

std::uint64_t mix(std::uint64_t seed, std::string_view text) {
  seed = mix(seed, text.size());
  for (std::size_t at = 0; at < text.size(); at += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, text.data() + at, std::min<std::size_t>(8, text.size() - at));
    seed = mix(seed, word);
  }
  return seed;
}

}  // namespace

void Communicator::check_memory(const char* op, const char* what, const BufferView& view) const {
  ZC_CHECK(view.numel >= 0 && (view.data != nullptr || view.numel == 0), kInternal, "[comm] ", op, ": ", what,
           " is not a buffer: got ", view.numel, " elements at ", view.data, ", expected memory");
  ZC_CHECK(takes(view.device), kUnsupported, "[comm] ", op, ": ", what, " lies in ", to_text(view.device),
           ", which the \"", backend(), "\" communicator does not take.");
}

const char* name(Op op) {
  switch (op) {
    case Op::kReduceScatterAdd:
      return "reduce_scatter_add";
    case Op::kAllGather:
      return "all_gather";
    case Op::kBroadcast:
      return "broadcast";
    case Op::kAllReduce:
      return "all_reduce";
    case Op::kGatherBytes:
      return "gather_bytes";
    case Op::kBarrier:
      return "barrier";
    case Op::kSplit:
      return "split";
  }
  return "?";
}

Communicator::Communicator(int rank, int size, Options options) : rank_(rank), size_(size) {
  set_timeout(options.timeout);
}

void Communicator::set_timeout(std::chrono::milliseconds timeout) {
  ZC_CHECK(timeout.count() > 0, kConfig, "[comm] timeout_ms is not positive: got ", timeout.count(),
           ", expected at least 1. Give the time a rank may wait for its peers, in milliseconds.");
  timeout_ms_ = timeout.count();
}

Memory Communicator::allocate(std::int64_t bytes) { return allocate_host(bytes); }

Memory Communicator::allocate_shared(std::int64_t bytes, std::string_view /*label*/) {
  ZC_CHECK(size_ == 1, kUnsupported, "[comm] memory that ranks share: got ranks connected by ", backend(),
           ", expected ranks of one node, connected by \"shm\". Let each rank have its own.");
  return allocate(bytes);
}

Work Communicator::reduce_scatter_add(BufferView bucket, BufferView shard, std::string_view label, bool first,
                                      device::Stream after, std::int64_t turn) {
  check_memory("reduce_scatter_add", "bucket", bucket);
  check_memory("reduce_scatter_add", "shard", shard);
  ZC_CHECK(is_floating(bucket.dtype), kInternal, "[comm] reduce_scatter_add: bucket dtype: got ",
           zc::name(bucket.dtype), ", expected fp32, fp16 or bf16");
  ZC_CHECK(is_floating(shard.dtype), kInternal, "[comm] reduce_scatter_add: shard dtype: got ", zc::name(shard.dtype),
           ", expected fp32, fp16 or bf16");
  ZC_CHECK(bucket.numel == shard.numel * size_, kInternal, "[comm] reduce_scatter_add: bucket length: got ",
           bucket.numel, " elements, expected ", shard.numel * size_, " (", size_, " ranks times a shard of ",
           shard.numel, ")");
  return submit({.op = Op::kReduceScatterAdd,
                 .first = first,
                 .in = bucket,
                 .out = shard,
                 .after = after,
                 .turn = turn,
                 .label = label});
}

Work Communicator::all_gather(BufferView full, std::string_view label, device::Stream after) {
  check_memory("all_gather", "buffer", full);
  ZC_CHECK(full.numel % size_ == 0, kInternal, "[comm] all_gather: buffer length: got ", full.numel,
           " elements, expected a multiple of the ", size_, " ranks");
  const std::int64_t numel = full.numel / size_;
  return submit(
      {.op = Op::kAllGather, .in = full.slice(rank_ * numel, numel), .out = full, .after = after, .label = label});
}

Work Communicator::all_gather(BufferView shard, BufferView full, std::string_view label, device::Stream after) {
  check_memory("all_gather", "shard", shard);
  check_memory("all_gather", "buffer", full);
  ZC_CHECK(shard.dtype == full.dtype, kInternal, "[comm] all_gather: shard dtype: got ", zc::name(shard.dtype),
           ", expected the buffer's, ", zc::name(full.dtype));
  ZC_CHECK(full.numel == shard.numel * size_, kInternal, "[comm] all_gather: buffer length: got ", full.numel,
           " elements, expected ", shard.numel * size_, " (", size_, " ranks times a shard of ", shard.numel, ")");
  const auto* begin = shard.as<const std::byte>();
  const auto* whole = full.as<const std::byte>();
  const std::less<> before;  // of unrelated pointers
  ZC_CHECK(begin == whole + rank_ * shard.bytes() || !before(begin, whole + full.bytes()) ||
               !before(whole, begin + shard.bytes()),
           kInternal, "[comm] all_gather: the shard overlaps the buffer: got ", shard.numel, " elements at ",
           shard.data, ", expected slice ", rank_, " of the buffer at ", full.data, " or memory outside it");
  return submit({.op = Op::kAllGather, .in = shard, .out = full, .after = after, .label = label});
}

Work Communicator::broadcast(BufferView view, int root, std::string_view label, device::Stream after) {
  check_memory("broadcast", "buffer", view);
  ZC_CHECK(root >= 0 && root < size_, kConfig, "[comm] broadcast: root: got rank ", root, ", expected 0 to ", size_ - 1,
           ". Name a rank of this communicator.");
  return submit({.op = Op::kBroadcast, .root = root, .in = view, .out = view, .after = after, .label = label});
}

Work Communicator::all_reduce(std::span<std::int64_t> values, ReduceOp op, std::string_view label) {
  const BufferView view{values.data(), static_cast<std::int64_t>(values.size()), DType::kI64, {}};
  return all_reduce(view, op, label, {});
}

Work Communicator::all_reduce(BufferView values, ReduceOp op, std::string_view label, device::Stream after) {
  check_memory("all_reduce", "values", values);
  ZC_CHECK(values.dtype == DType::kI64, kInternal, "[comm] all_reduce: got values of ", zc::name(values.dtype),
           ", expected int64");
  return submit({.op = Op::kAllReduce, .reduce = op, .in = values, .out = values, .after = after, .label = label});
}

Work Communicator::gather_bytes(std::span<const std::byte> in, std::span<std::byte> out, std::string_view label) {
  ZC_CHECK(out.size() == in.size() * static_cast<std::size_t>(size_), kInternal,
           "[comm] gather_bytes: room for the result: got ", out.size(), " bytes, expected ",
           in.size() * static_cast<std::size_t>(size_), " (", size_, " ranks times ", in.size(), ")");
  const BufferView source{const_cast<std::byte*>(in.data()), static_cast<std::int64_t>(in.size()), DType::kU8, {}};
  const BufferView target{out.data(), static_cast<std::int64_t>(out.size()), DType::kU8, {}};
  return submit({.op = Op::kGatherBytes, .in = source, .out = target, .label = label});
}

Work Communicator::barrier(std::string_view label) { return submit({.op = Op::kBarrier, .label = label}); }

std::shared_ptr<Communicator> Communicator::split(int color, int key) {
  Call call{.op = Op::kSplit, .label = "split of a communicator"};
  seal(call);
  auto group = run_split(call, color, key);
  if (nanoseconds_[0]) group->time_calls();
  return group;
}

Work Communicator::meet(Call call) {
  call.meets_only = true;
  seal(call);
  return run(call);
}

Work Communicator::submit(Call call) {
  seal(call);
  const auto& nanoseconds = nanoseconds_[static_cast<std::size_t>(call.op)];
  if (!nanoseconds) return run(call);
  const auto begin = std::chrono::steady_clock::now();
  Work work = run(call);
  work.time_into(nanoseconds, begin);
  return work;
}

void Communicator::time_calls() {
  for (auto& each : nanoseconds_) {
    if (!each) each = std::make_shared<std::atomic<std::int64_t>>(0);
  }
}

std::int64_t Communicator::nanoseconds(Op op) const {
  const auto& total = nanoseconds_[static_cast<std::size_t>(op)];
  return total ? total->load() : 0;
}

void Communicator::seal(Call& call) {
  if (!call.meets_only) {
    Counter& counter = counters_[static_cast<std::size_t>(call.op)];
    ++counter.calls;
    counter.elements += call.numel();
    counter.bytes += call.numel() * size_bytes(call.in.dtype);
  }

  call.sequence = ++sequence_;
  std::uint64_t hash = mix(0, call.sequence);
  hash = mix(hash, static_cast<std::uint64_t>(call.op));
  hash = mix(hash, static_cast<std::uint64_t>(call.reduce));
  hash = mix(hash, static_cast<std::uint64_t>(call.root));
  hash = mix(hash, static_cast<std::uint64_t>(call.in.dtype));
  hash = mix(hash, static_cast<std::uint64_t>(call.out.dtype));
  hash = mix(hash, static_cast<std::uint64_t>(call.numel()));
  hash = mix(hash, static_cast<std::uint64_t>(call.meets_only));
  call.fingerprint = mix(hash, call.label);
}

}  // namespace zc::comm
